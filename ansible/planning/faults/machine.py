"""Check the machine itself: system, rights, disks, packages, clock.

Each check yields (fault, cause, remedy) for every finding. preflight.findings calls the CHECKS with
a machine's MachineFacts (boundary/facts.py) and the question that it describes; looks.py calls
`check_support` and `check_python` before modules run on the machine.
"""

from typing import Any

from .. import offline, stacks
from .. import packages as apt

# ID of /etc/os-release: the name for users. Tandem supports the first two.
TITLES = {"debian": "Debian", "ubuntu": "Ubuntu", "linuxmint": "Linux Mint", "pop": "Pop!_OS"}
# systemd-detect-virt's answers for a PC, and for containers with an init process, as in the lab.
# Other containers cannot run the units that roles install.
ACCEPTED_CONTAINERS = ("", "none", "systemd-nspawn", "lxc", "lxc-libvirt")
# (an ansible-core, the oldest Python that its modules run on), the newest first. A version that the
# table lacks has the limit of the next older one.
# source: docs.ansible.com, "Releases and maintenance", the support matrix.
OLDEST_PYTHON = (((2, 20), (3, 9)), ((2, 18), (3, 8)), ((2, 17), (3, 7)), ((2, 13), (3, 6)))
# From the same matrix: the newest Python of ansible-core 2.19, and that of 2.20 and 2.21.
NEWEST_PYTHON, NEWER_CORE_PYTHON = (3, 13), (3, 14)
# Each file takes an inode, and a Python environment with torch has tens of thousands of files.
MIN_FREE_INODES = 100_000


def check_support(facts):
    """Find reasons why no role can provision a machine.

    facts: ShellFacts are enough, since looks.py calls this before modules run.
    """
    yield from check_release(facts.distribution, facts.release, facts.like)
    if facts.arch == "aarch64" and not facts.driver_kept:
        yield (
            "arch",
            "its processor is aarch64, for which Tandem installs no driver",
            "write driver_policy=keep into its line of inventory.ini; its own driver then stays as "
            "it is (docs/stacks.md, Two DGX Sparks)",
        )
    elif facts.arch not in ("x86_64", "aarch64"):
        yield (
            "arch",
            f"its processor is {facts.arch}, for which Tandem has no driver and no lock of PyTorch",
            "remove this machine from inventory.ini",
        )
    if "microsoft" in facts.kernel.lower():  # "5.15.153.1-microsoft-standard-WSL2"
        yield (
            "wsl",
            f"it is WSL on Windows (kernel {facts.kernel}): it uses the driver of Windows, "
            "and other PCs cannot connect to it",
            "install Debian or Ubuntu next to Windows on it (docs/windows.md), or take it out of "
            "inventory.ini",
        )
    elif facts.container not in ACCEPTED_CONTAINERS:
        yield (
            "container",
            f"it is a container ({facts.container}): its kernel, driver and clock belong to "
            "the host",
            "list that machine in inventory.ini instead",
        )


def check_system(facts, question):
    yield from check_support(facts)
    if facts.arch == "aarch64" and question["offline"]:
        yield (
            "arch",
            "its processor is aarch64, but make bundle downloads files only for x86_64",
            "connect it to the internet while make provision runs, and remove offline=true "
            "from its line in inventory.ini",
        )
    if not facts.systemd:
        # Roles install units, for example for the clock and for waking.
        yield (
            "systemd",
            "its first process is not systemd",
            "install Debian or Ubuntu with systemd, which is their default",
        )
    yield from check_python(facts, question["ansible_core"])


def check_python(facts, core):
    """Check that the modules of ansible-core run on the machine's Python.

    core: the version of ansible-core, "2.19.1".
    """
    oldest = next(python for since, python in OLDEST_PYTHON if stacks.parse_version(core) >= since)
    if not facts.python:
        yield ("no_python", "it has no Python, which Ansible needs", "sudo apt install python3")
    elif stacks.parse_version(facts.python) < oldest:
        yield (
            "python",
            f"its python3 is {facts.python}, but the modules of ansible-core {core} need "
            f"{'.'.join(map(str, oldest))}",
            # The modules of ansible-core 2.16 also run on Python 3.6 and 3.7.
            "provision it with `make provision CORE=2.16`"
            if stacks.parse_version(facts.python) < (3, 8)
            else "provision it with `make provision`, without CORE",
        )


def check_new_python(facts, question):
    """Find a Python that this ansible-core does not list yet, though modules may run on it."""
    present = stacks.parse_version(facts.python or "0")[:2]  # (3, 12); (0,) without Python
    core = stacks.parse_version(question["ansible_core"])
    # The remedy needs an ansible-core that supports this Python, so an even newer one is no note.
    if core < (2, 20) and NEWEST_PYTHON < present <= NEWER_CORE_PYTHON:
        yield (
            "python_new",
            f"its python3 is {facts.python}, which is newer than the versions that "
            f"ansible-core {question['ansible_core']} supports",
            "none; if a task fails because of it, type make provision CORE=2.21, for which "
            "the control node needs Python 3.12 or newer",
        )


def read_releases():
    """Read {"debian": ["11", ...], "ubuntu": [...]}, the versions in ansible/releases.yml."""
    table: dict[str, Any] = {}
    for row in offline.releases().values():
        table.setdefault(row["distribution"], []).append(row["version"])
    return {name: sorted(versions, key=stacks.parse_version) for name, versions in table.items()}


def describe_releases():
    """Write the releases as "Debian 11, 12 or 13; Ubuntu 18.04, 20.04, 22.04, 24.04 or 26.04"."""
    return "; ".join(
        f"{TITLES[name]} {', '.join(versions[:-1])} or {versions[-1]}"
        for name, versions in read_releases().items()
    )


def check_release(distribution, version, like=""):
    """Find a release that Tandem does not support.

    distribution, version, like: ID, VERSION_ID and ID_LIKE of /etc/os-release.
    """
    table = read_releases()
    versions = table.get(distribution, [])
    if version in versions:
        return
    name = f"{TITLES.get(distribution, distribution)} {version or 'without a number'}"
    # Debian's testing has no VERSION_ID, and is newer than every release.
    if versions and (
        not version or stacks.parse_version(version) > stacks.parse_version(versions[-1])
    ):
        yield (
            "release",
            f"{name} is newer than the releases that Tandem knows: nobody has tested its "
            "packages, kernel and Python",
            f"install {TITLES[distribution]} {versions[-1]} on it, "
            f"{'the previous LTS' if distribution == 'ubuntu' else 'the previous release'}; "
            f"Tandem knows {describe_releases()}; to add a release: docs/stacks.md, A newer "
            "release",
        )
        return
    # ID_LIKE of Linux Mint is "ubuntu debian". The table has ubuntu last, which is the closer one.
    bases = [TITLES[base] for base in table if base in like.split() and base != distribution]
    origin = (
        f", which is based on {bases[-1]} but has its own packages and kernels" if bases else ""
    )
    yield (
        "release",
        f"Tandem does not support its release, {name}{origin}",
        f"install one of these on it: {describe_releases()}",
    )


def check_privileges(facts, question):
    if not facts.sudo:
        yield (
            "sudo",
            "sudo asks for a password, or rejects the password that you typed",
            "type the password: add ASK_SUDO=1 to make, or -K to ansible-playbook; or run "
            "`make bootstrap`, which installs a sudo rule",
        )
    users = question["users"]
    if not users["there"]:
        yield (
            "train_user",
            f"the user {users['trains']}, who runs the training, does not exist on it",
            "`make bootstrap` creates it; or correct train_user in the inventory",
        )
    if users["trains"] == users["provisions"]:
        yield (
            "one_user",
            f"{users['trains']} trains there and may use sudo: code that trains there can become "
            "root",
            f"write train_user={users['trains']} and another ansible_user into the inventory, then "
            f"`make bootstrap LOGIN={users['trains']}` (docs/security.md, Two users)",
        )


def check_disks(facts, question):
    by_device: dict[int, list[Any]] = {}
    for row in question["space"]:
        folder, disk = row["folder"], facts.disks[row["folder"]]
        by_device.setdefault(disk.device, []).append(row)
        if disk.read_only:
            yield (
                "read_only",
                f"the file system of {folder} is read-only",
                "search `dmesg` for disk errors; then type on that machine: sudo mount -o "
                "remount,rw",
            )
        if disk.free_inodes is not None and disk.free_inodes < MIN_FREE_INODES:
            yield (
                "inodes",
                f"the file system of {folder} has {disk.free_inodes:.0f} free inodes",
                "delete folders of many small files, or use a file system with more inodes",
            )
    # Folders of one file system share its free space, so their needs are added.
    for rows in by_device.values():
        folders = [row["folder"] for row in rows]
        required_bytes = sum(int(row["bytes"]) for row in rows)
        free_bytes = facts.disks[folders[0]].free
        if free_bytes < required_bytes:
            yield (
                "disk_full",
                f"{', '.join(folders)} need {required_bytes / 1e9:.1f} GB, but only "
                f"{free_bytes / 1e9:.1f} GB are free",
                "free disk space on that machine, or mount a larger disk",
            )
    for mount in facts.missing_mounts:
        yield (
            "mount",
            f"{mount.path} ({mount.type}) is in /etc/fstab, but not mounted",
            f"sudo mount {mount.path}, or remove its line from /etc/fstab",
        )


def check_reboots(facts, question):
    if facts.boot_passphrases:
        disks = ", ".join(facts.boot_passphrases)
        yield (
            "passphrase",
            f"after a reboot it waits at its own screen for the passphrase of {disks}; make "
            "provision may reboot it for a driver, make upgrade reboots it, and make wake "
            "starts it",
            "type the passphrase after each reboot, or let its TPM open the disk (man "
            "systemd-cryptenroll)",
        )
    if facts.reboot_waits:
        waits = f"{facts.reboot_waits} needs a reboot"
        yield "reboot_waits", waits, "when no run uses it: sudo reboot"


def check_library_path(facts, question):
    if facts.missing_libraries:
        yield (
            "library_path",
            "LD_LIBRARY_PATH in /etc/environment contains "
            f"{', '.join(facts.missing_libraries)}, which does not exist",
            "correct or delete that line: the environment needs no LD_LIBRARY_PATH",
        )


def check_packages(facts, question):
    lock = facts.apt_lock
    if lock is not None:
        yield (
            "apt_lock",
            f"{lock.command} (process {lock.pid}) holds the lock of the package manager",
            "nothing to do: make provision waits for the lock, up to ten minutes each time",
        )
    if facts.dpkg_broken:
        yield ("dpkg", "an installation of packages was interrupted", "sudo dpkg --configure -a")
    elif apt.broken(facts):
        yield ("dpkg", *apt.broken(facts))
    # Offline machines use the bundle instead of apt's sources.
    for source in facts.dead_sources if not question["offline"] else ():
        file = source.file or "a file of /etc/apt/sources.list.d"
        cause, remedy = "no longer exists on its server", f"correct or delete it in {file}"
        if source.unsigned:
            cause = (
                "has no signature that apt can verify: its publisher's key is missing or expired"
            )
            remedy = f"install its publisher's current key (NVIDIA's: cuda-keyring), or {remedy}"
        yield (
            "apt_source",
            f"apt's source {source.source}, in {file}, {cause}; make provision continues with "
            "the other sources",
            f"{remedy}, then sudo apt update",
        )
    if not facts.rsync and not question["offline"]:  # the bundle brings rsync
        cause = "rsync, which copies data and wheels to it, is missing"
        yield "rsync", cause, "make provision installs it"


def check_clock(facts, question):
    # The machine read its clock between these two times of the control node, so no time between
    # them is wrong. The difference to the nearest of them is the least that the clock is wrong by.
    earliest, latest = (float(seconds) for seconds in question["clock"])
    offset_seconds = facts.clock - min(max(facts.clock, earliest), latest)
    if abs(offset_seconds) > question["clock_tolerance"]:
        yield (
            "clock",
            f"its clock differs by {offset_seconds:+.0f} s from the control node's clock",
            "type on that machine: sudo timedatectl set-ntp true",
        )


CHECKS = (
    *(check_system, check_new_python, check_privileges, check_disks),
    *(check_reboots, check_library_path, check_packages, check_clock),
)
