"""The judge of preflight: collected facts in, findings out. Pure functions.

Facts are what ansible/library/machine_facts.py returns, with the inventory name as "host". A
finding is {"host", "fault", "cause", "remedy"}; "fault" is a short name that scripts may rely on.
All are problems; those in HINDERS keep site.yml from going on with the machine.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import members
import stacks

SUPPORTED = {"debian": ("11", "12", "13"), "ubuntu": ("18.04", "20.04", "22.04", "24.04")}
OLDEST_PYTHON = (3, 8)  # of ansible-core 2.19's modules
CLOCK_TOLERANCE = 2.0  # seconds

HINDERS = frozenset(
    (
        *("release", "arch", "systemd", "python", "sudo", "disk_full", "read_only", "address"),
        *("apt_lock", "dpkg", "rsync", "venv", "stack", "collect"),
        *("duplicate_machine_id", "duplicate_mac"),
    )
)
# What ssh says, the fault's name, the remedy. The last row takes all the rest.
UNREACHABLE = (
    (
        "IDENTIFICATION HAS CHANGED",
        "host_key_changed",
        "if the machine was installed anew: ssh-keygen -R {address}, then make bootstrap; "
        "if not, somebody may stand in between: find out before you go on",
    ),
    (
        "Host key verification failed",
        "host_key_unknown",
        "make bootstrap shows its host key, to be compared with the machine's own screen",
    ),
    ("Permission denied", "login", "make bootstrap installs this control machine's key"),
    (
        "Could not resolve",
        "name",
        "write its address, as `ip -brief address` shows it there, into inventory.ini",
    ),
    (
        "Connection refused",
        "no_sshd",
        "on that machine: sudo apt install openssh-server",
    ),
    (
        "",
        "unreachable",
        "is it switched on, is its cable in, is {address} still its address? ping {address}",
    ),
)


def findings(facts, question):
    """All that is wrong with one machine.

    question: {"address": the one in the inventory, "space": [{"folder", "bytes"}] that must be
    free, "env_manager", "stack": the wish, "table": that of stacks.yml, "become_password": whether
    -K was given, "clock": [the control machine's seconds before and after collecting]}.
    """
    judges = (
        system,
        privileges,
        disks,
        names,
        links,
        filters,
        packages,
        clock,
        driver,
        environment,
    )
    return [
        dict(zip(("host", "fault", "cause", "remedy"), (facts["host"], *finding)))
        for judge in judges
        for finding in judge(facts, question)
    ]


def system(facts, question):
    releases = SUPPORTED.get(facts["distribution"])
    if releases is None or facts["release"] not in releases:
        yield (
            "release",
            f"the roles do not know its release, {facts['distribution']} {facts['release']}",
            "use Debian 11 to 13 or Ubuntu 18.04 to 24.04",
        )
    if facts["arch"] != "x86_64":
        yield (
            "arch",
            f"its processor is {facts['arch']}",
            "the stacks have wheels for x86_64 only: take this machine out of inventory.ini",
        )
    if not facts["systemd"]:
        yield ("systemd", "its first process is not systemd", "boot it with systemd")
    if stacks.version(facts["python"]) < OLDEST_PYTHON:
        yield (
            "python",
            f"its python3 is {facts['python']}, and Ansible's modules need 3.8",
            "provision it with `make provision CORE=2.16`",
        )


def privileges(facts, question):
    if not facts["sudo"] and not question.get("become_password"):
        yield (
            "sudo",
            "sudo asks for a password",
            "give it: add -K to the command; or run `make bootstrap`, which installs a sudo rule",
        )


def disks(facts, question):
    needed = {}
    for folder, size in ((row["folder"], int(row["bytes"])) for row in question["space"]):
        state = facts["disks"][folder]
        needed.setdefault(state["device"], []).append((folder, size, state))
        if state["read_only"]:
            yield (
                "read_only",
                f"the file system of {folder} is read-only",
                "see `dmesg` for disk errors; then sudo mount -o remount,rw on it",
            )
        if state["free_inodes"] is not None and state["free_inodes"] < 100_000:
            yield (
                "inodes",
                f"the file system of {folder} has {state['free_inodes']} free inodes",
                "delete folders of many small files, or use a file system with more inodes",
            )
    for rows in needed.values():
        wanted, free = sum(size for _, size, _ in rows), rows[0][2]["free"]
        if free < wanted:
            yield (
                "disk_full",
                f"{', '.join(folder for folder, _, _ in rows)} need {wanted / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free",
                "make room, or mount a larger disk there",
            )


def names(facts, question):
    if facts["missing_mounts"]:
        for mount in facts["missing_mounts"]:
            yield (
                "mount",
                f"{mount['path']} ({mount['type']}) is in /etc/fstab and not mounted",
                f"sudo mount {mount['path']}, or take its line out of /etc/fstab",
            )
    if facts["missing_libraries"]:
        yield (
            "library_path",
            f"LD_LIBRARY_PATH in /etc/environment names {', '.join(facts['missing_libraries'])}, "
            "which is not there",
            "correct or delete that line: the environment needs no LD_LIBRARY_PATH",
        )


def links(facts, question):
    if facts["interface"] is None:
        yield (
            "address",
            f"no network card of it has {question['address']}, its address in inventory.ini",
            "write the address that `ip -brief address` shows there, not a router's or a name",
        )
        return
    link = next(link for link in facts["links"] if link["name"] == facts["interface"])
    if link["wireless"]:
        yield ("wireless", f"{link['name']} is a wireless link", "plug in a network cable")
    if link["speed"] is not None and 0 < link["speed"] < 1000:
        yield (
            "link_speed",
            f"{link['name']} runs at {link['speed']} Mbit/s",
            "use a cable of category 5e or better, and a gigabit port of the switch",
        )
    if link["duplex"] == "half":
        yield (
            "duplex",
            f"{link['name']} runs at half duplex",
            "let switch and card negotiate: sudo ethtool -s " + link["name"] + " autoneg on",
        )
    if link["mtu"] != 1500 and link["mtu"] < 9000:
        yield (
            "mtu",
            f"{link['name']} has an MTU of {link['mtu']}",
            f"sudo ip link set {link['name']} mtu 1500",
        )


def filters(facts, question):
    if facts["firewall"]:
        yield (
            "firewall",
            f"{facts['firewall']} is switched on, and training opens ports of the kernel's choice",
            "let the other members in: sudo ufw allow from <address>, or "
            "sudo firewall-cmd --permanent --zone=trusted --add-source=<address>",
        )


def packages(facts, question):
    lock = facts["apt_lock"]
    if lock is not None:
        yield (
            "apt_lock",
            f"{lock['command']} (process {lock['pid']}) holds the lock of the package manager",
            "wait until it has finished",
        )
    if facts["dpkg_broken"]:
        yield ("dpkg", "an installation of packages was interrupted", "sudo dpkg --configure -a")
    if not facts["rsync"]:
        yield (
            "rsync",
            "rsync is missing, by which data and wheels arrive",
            "sudo apt install rsync",
        )


def clock(facts, question):
    before, after = (float(seconds) for seconds in question["clock"])
    off = facts["clock"] - min(max(facts["clock"], before), after)
    if abs(off) > CLOCK_TOLERANCE:
        yield (
            "clock",
            f"its clock is {off:+.0f} s off the control machine's",
            "sudo timedatectl set-ntp true, or set it: sudo date --set=@$(date +%s)",
        )


def driver(facts, question):
    own = [gpu for gpu in facts["gpus"] if gpu["vendor"] == stacks.NVIDIA]
    if not own:
        return
    if facts["secure_boot"] and facts["driver"] is None:
        yield (
            "secure_boot",
            "Secure Boot is on, and its kernel loads only signed modules: not the NVIDIA driver",
            "switch Secure Boot off in the firmware's setup, or enrol a key with mokutil",
        )
    if facts["nouveau"]:
        yield (
            "nouveau",
            "the nouveau driver holds the NVIDIA card",
            "blacklist it (echo blacklist nouveau | sudo tee /etc/modprobe.d/nouveau.conf; "
            "sudo update-initramfs -u) and reboot",
        )
    elif facts["driver"] is None:
        yield (
            "driver_missing",
            "no NVIDIA driver is loaded",
            "install the one that docs/stacks.md names for this card, and reboot",
        )
    if facts["driver"] and facts["driver_library"] and facts["driver"] != facts["driver_library"]:
        yield (
            "driver_mismatch",
            f"the loaded driver is {facts['driver']} and the installed library "
            f"{facts['driver_library']}: an update came in between",
            "reboot; to keep it from coming back, hold the packages: sudo apt-mark hold 'nvidia-*'",
        )


def environment(facts, question):
    table, wish = question["table"], question["stack"]
    try:
        stack = stacks.resolve([facts], wish, table)
        manager, _ = stacks.python_for(stack, facts, question["env_manager"])
        chosen = stacks.resolve_driver(facts, stack, table)
    except stacks.StackError as error:
        yield ("stack", str(error).removeprefix(f"{facts['host']}: "), "see docs/stacks.md")
        return
    if (
        chosen
        and facts["driver"]
        and stacks.version(facts["driver"]) < stacks.version(stack["driver"])
    ):
        yield (
            "driver_old",
            f"its driver is {facts['driver']}, and stack {stack['name']} needs {stack['driver']}",
            f"install {chosen['version']}",
        )
    if manager == "venv" and not facts["python_venv"]:
        yield ("venv", "its python3 cannot make environments", "sudo apt install python3-venv")


def cluster_findings(machines):
    """What is wrong between machines that are each in order: two that are one."""
    found = []
    for key, of in (("machine_id", "machine id"), ("mac", "hardware address")):
        first = {}
        for facts in machines:
            value = facts["machine_id"] if key == "machine_id" else own_mac(facts)
            other = first.setdefault(value, facts["host"])
            if value and other != facts["host"]:
                found.append(
                    {
                        "host": facts["host"],
                        "fault": "duplicate_" + key,
                        "cause": f"it has the same {of} as {other}: one machine under two names, "
                        "or a copied disk",
                        "remedy": "correct inventory.ini; or on a copied disk: "
                        "sudo rm /etc/machine-id && sudo systemd-machine-id-setup, and reboot",
                    }
                )
    return found


def unreachable(variables):
    """The finding on a machine that did not answer: what ssh said, in its variables, decides."""
    said = members.what_ssh_said(variables)
    name = variables["inventory_hostname"]
    address = variables.get("ansible_host", name)
    fault, remedy = next((fault, text) for words, fault, text in UNREACHABLE if words in said)
    return {
        "host": name,
        "fault": fault,
        "cause": f"{address} did not let ssh in: {said}",
        "remedy": remedy.format(address=address),
    }


def not_collected(host, message):
    """The finding on a machine that answers, and on which nothing can be collected."""
    return {
        "host": host,
        "fault": "collect",
        "cause": f"its facts could not be collected: {' '.join(str(message).split())}",
        "remedy": "a Python is needed there: sudo apt install python3",
    }


def own_mac(facts):
    return next(
        (link["mac"] for link in facts["links"] if link["name"] == facts["interface"]), None
    )


def hindering(found):
    """Those of `found` that keep site.yml from going on with the machine."""
    return [finding for finding in found if finding["fault"] in HINDERS]


def text(finding):
    """One line for people."""
    return f"{finding['host']}: {finding['cause']}. Remedy: {finding['remedy']}"


class FilterModule:
    """Names of these functions in playbooks."""

    def filters(self):
        return {
            "tandem_findings": findings,
            "tandem_cluster_findings": cluster_findings,
            "tandem_finding_text": text,
            "tandem_hindering": hindering,
            "tandem_unreachable": unreachable,
            "tandem_not_collected": not_collected,
        }
