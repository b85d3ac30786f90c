"""What preflight finds in recorded facts. Each fault alone, and what is said of it:
tests/messages/ansible.txt."""

import copy
import functools
import http.server
import re
import threading

import pytest
from msgspec import structs

from planning import preflight, reading
from tests.unit.ansible.provision_machines import HEALTHY, QUESTION, ROOT, load, machine

network = preflight.network


def link(**changes):
    return {"links": [dict(HEALTHY["links"][0], **changes)]}


def disks(**changes):
    return {"disks": {name: dict(row, **changes) for name, row in HEALTHY["disks"].items()}}


def release(distribution, version):
    return {**machine(), "distribution": distribution, "release": version}


def turing(**changes):
    return machine("debian11", ["1e07"], **changes)


CARD = ("debian12", ["1e07"])
NO_DRIVER = {"driver": None, "driver_library": None}
OLD = dict.fromkeys(("driver", "driver_library", "module"), "430.50")
R580, R610 = (dict.fromkeys(("driver", "driver_library"), v) for v in ("580.126.20", "610.43.02"))
DOCKER = dict(HEALTHY["links"][0], name="docker0", addresses=[], networks=["192.168.0.1/16"])
TAILSCALE = dict(HEALTHY["links"][0], name="tailscale0", mac=None, mtu=1280, speed=None,
                 tunnel=True, physical=False, addresses=["100.64.0.7"],
                 networks=["100.64.0.7/32"])  # fmt: skip
BUSY = [{"pid": 99, "command": "python3"}]
GDM = {"display_manager": "gdm.service", "display_manager_active": True}
# Of a kernel on which the driver that stack cu102 began with is not built any more.
IMPOSSIBLE = turing(kernel="6.1.0-31-amd64", **NO_DRIVER)
DEAD = {"source": "http://ppa.example/x focal", "file": "/etc/apt/x.list"}
UNMET = "libnvidia-gl-535 : Depends: libnvidia-common-535"
TOOLKIT = {"gcc": "7.5.0", "driver": "440.33.01", "toolkits": {"/usr/local/cuda-10.2": "10.2.89"}}
# {fault, or fault and case: facts}
FAULTS = {
    "release": machine(distribution="fedora"),
    "release, newer": release("ubuntu", "28.04"),
    "release, between": release("ubuntu", "25.10"),
    "release, newer Debian": release("debian", "14"),
    "release, testing": release("debian", None),
    "release, older": release("ubuntu", "16.04"),
    "release, left out": release("ubuntu", "23.10"),
    "release, made of Ubuntu": {**release("linuxmint", "22"), "like": "ubuntu debian"},
    "arch": machine(arch="aarch64"),
    "python_new": machine("debian13", python="3.14.3"),
    "arch, unknown": machine(arch="riscv64"),
    "container": machine() | {"container": "docker"},
    "no_python": structs.replace(reading.as_machine_facts(machine()), python=""),
    "wsl": machine("ubuntu2404", kernel="5.15.167.4-microsoft-standard-WSL2"),
    "systemd": machine(systemd=False),
    "python": machine("ubuntu1804"),
    "sudo": machine(sudo=False),
    "disk_full": machine(**disks(free=1e9)),
    "inodes": machine(**disks(free_inodes=10)),
    "read_only": machine(**disks(read_only=True)),
    "mount": machine(missing_mounts=[{"path": "/data", "type": "nfs4"}]),
    "apt_source": machine(dead_sources=[DEAD]),
    "apt_source, unsigned": machine(dead_sources=[{**DEAD, "unsigned": True}]),
    "passphrase": machine(boot_passphrases=["dm_crypt-0"]),
    "toolkit": machine("ubuntu1804", ["1e07"], **TOOLKIT),
    "library_path": machine(missing_libraries=["/usr/lcoal/cuda/lib64"]),
    "address": machine(interface=None),
    "unlisted_address": machine(**link(networks=["192.168.56.111/24", "192.168.56.57/24"])),
    "wireless": machine(**link(wireless=True)),
    "link_speed": machine(**link(speed=100)),
    "duplex": machine(**link(duplex="half")),
    "mtu": machine(**link(mtu=1400)),
    "tunnel": machine(
        links=[TAILSCALE, {**HEALTHY["links"][0], "addresses": ["10.0.0.7"]}],
        interface="tailscale0",
    ),
    "tunnel, no card": machine(links=[TAILSCALE], interface="tailscale0"),
    "firewall": machine(ufw_conf='ENABLED="yes"\n'),
    "firewall, firewalld": machine(firewalld=True),
    "apt_lock": machine(apt_lock={"pid": 7, "command": "unattended-upgr"}),
    "dpkg": machine(dpkg_broken=True),
    "dpkg, broken packages": machine(broken=UNMET),
    "rsync": machine(rsync=False),
    "clock": machine(clock=1100.0),
    "clock, behind": machine(clock=991.0),
    "venv": machine(python_venv=False),
    "secure_boot": turing(secure_boot=True, driver=None),
    "nouveau": turing(nouveau=True, driver=None),
    "driver_missing": turing(driver=None),
    "driver_mismatch": turing(driver_library="580.130.1"),
    "kernel_module": turing(waiting_kernel="6.1.0-44-amd64", waiting_module=None),
    "driver_ended": turing(driver="535.183.01", driver_library="535.183.01", clock=1.79e9),
    "driver_ended, long ago": turing(driver="470.256.02", driver_library="470.256.02"),
    "driver_ended, 610": turing(driver="610.43.02", driver_library="610.43.02", clock=1.79e9),
    "driver_end_unknown": turing(driver="590.48.01", driver_library="590.48.01", clock=1.79e9),
    "driver_end_unknown, 615": turing(driver="615.71.09", driver_library="615.71.09"),
    "driver_old": turing(runfile="430.50", **OLD),
    "driver": turing(**OLD),
    "kernel_held": machine(held_since=1000.0 - 90 * 86400),
    "xid": turing(xids=[79]),
    "xid, unknown": turing(xids=[7]),
    "xid_program": turing(xids=[31]),
    "reboot_waits": machine(reboot_waits="kernel 6.1.0-32-amd64"),
    "stack": turing() | {"gpus": [{"vendor": "10de", "device": "ffff"}]},
    "table_old": turing(clock=2e9),
    "card_left_out": machine("debian12", ["128b", "1e07"]),
    "card_left_out, passed through": turing(passed_through=["2204"]),
    "card_hidden": machine(driver_library="580.126.20", module="580.126.20"),
    "card_hidden, prime-select": turing(prime="off", driver=None),
    "card_hidden, passed through": machine(passed_through=["2204"]),
    "gcc": turing(gcc="10.2.1"),
    "installer": machine(*CARD),
    "duplicate_address": machine(address_owner="3c:7c:3f:00:00:09"),
    "overlap": machine(links=[*HEALTHY["links"], DOCKER]),
}
# Likewise, with other settings.
ASKED = {
    "loopback_name": (machine(loopback_names=["node1"]), {"provisioned": True}),
    "uv": (machine(), {"env_manager": "uv"}),
    "python, by the newer Ansible": (
        machine("ubuntu2004"),
        {"ansible_core": "2.21.5", "stack": "cu102"},
    ),
    "arch, offline": (machine(arch="aarch64", driver_kept=True), {"offline": True}),
    "driver_missing, keep, aarch64": (
        machine("ubuntu2404", ["2e12"], arch="aarch64", driver_kept=True, **NO_DRIVER),
        {"stack": "cu132"},
    ),
    "driver_old, keep, aarch64": (
        machine("ubuntu2404", ["2e12"], arch="aarch64", driver_kept=True, **OLD),
        {"stack": "cu132"},
    ),
    "stack, keep, aarch64": (
        machine("ubuntu2404", ["2e12"], arch="aarch64", driver_kept=True),
        {"stack": "cu126"},
    ),
    "stack, keep, aarch64, an older Python": (
        machine("ubuntu2204", ["2e12"], arch="aarch64", driver_kept=True),
        {"stack": "cu132"},
    ),
    "installer, another Python": (
        machine("ubuntu2204", conda="3.10"),
        {"offline": True, "conda_installer": "Miniforge.sh"},
    ),
    "train_user": (machine(), {"users": {**QUESTION["users"], "there": False}}),
    "one_user": (machine(), {"users": {**QUESTION["users"], "provisions": "tandem"}}),
    "stack, driver": (IMPOSSIBLE, {"driver": {**QUESTION["driver"], "version": "440.33.01"}}),
    "driver, program": (machine(*CARD, **NO_DRIVER, gpu_processes=BUSY), {"stack": "cu126"}),
}
# What role driver does is not asked of a person, unless driver_policy forbids it.
BY_THE_ROLE = {
    "secure_boot": machine(*CARD, secure_boot=True, **NO_DRIVER),
    "nouveau": machine(*CARD, nouveau=True, **NO_DRIVER),
    "driver_missing": machine(*CARD, **NO_DRIVER),
    "driver_mismatch": machine(*CARD, driver_library="580.130.1"),
    "driver_old": machine(*CARD, runfile="430.50", **OLD),
    "kernel_module": machine(*CARD, **R580, waiting_kernel="6.1.0-44-amd64"),
    "driver_ended": machine(*CARD, **R610, clock=1.79e9),
}
ASKED |= {
    f"{fault}, {policy}": (
        {**facts, "driver_kept": policy == "keep"},
        {"stack": "cu126", "driver": {**QUESTION["driver"], "policy": policy}},
    )
    for fault, facts in BY_THE_ROLE.items()
    for policy in ("keep", "upgrade")
}
ILL = {case: (facts, QUESTION) for case, facts in FAULTS.items()}
ILL |= {case: (facts, {**QUESTION, **asked}) for case, (facts, asked) in ASKED.items()}
# What ssh says, and the fault that it is.
SSH = {
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! Host key verification failed.":
        "host_key_changed",
    "No ED25519 host key is known for 10.0.0.9. Host key verification failed.":
        "host_key_unknown",
    "tandem@10.0.0.9: Permission denied (publickey,password).": "login",
    "ssh: Could not resolve hostname node9: Name or service not known": "name",
    "ssh: connect to host 10.0.0.9 port 22: Connection refused": "no_sshd",
    "ssh: connect to host 10.0.0.9 port 22: No route\nto host": "unreachable",
}  # fmt: skip
# Faults that are not about one machine's facts.
TOLD_BY_OTHERS = {"collect", "duplicate_machine_id", "duplicate_mac", "faster_card", "mtu_differs"}
TOLD_BY_OTHERS |= {*SSH.values()}

KNOWN = {case.partition(",")[0] for case in ILL} | TOLD_BY_OTHERS


def found(facts, **question):
    return [one["fault"] for one in preflight.findings(facts, {**QUESTION, **question})]


FRESH = machine(rsync=False, python_venv=False, dead_sources=[DEAD])
R620 = dict.fromkeys(("driver", "driver_library"), "620.61.03")
BIONIC = machine("ubuntu1804", ["1e07"], conda="3.10")
COLLECTED = {"clock": [400.0, 600.0]}  # the time of collecting counts, not that of judging


@pytest.mark.parametrize(
    ("facts", "question", "faults"),
    [
        (machine(loopback_names=["node1"]), {}, []),  # before /etc/hosts is written
        (turing(gcc="7.5.0"), {}, []),
        (machine(links=[*HEALTHY["links"], {**DOCKER, "networks": ["172.17.0.1/16"]}]), {}, []),
        (machine(sudo=False, rsync=False, firewalld=True), {}, ["sudo", "rsync", "firewall"]),
        # What the bundle brings, and what was needed to make the environment.
        (FRESH, {}, ["apt_source", "rsync", "venv"]),
        (FRESH, {"offline": True}, []),
        (machine(*CARD), {"provisioned": True}, []),
        (BIONIC, {}, ["python"]),
        (machine("debian13", python="3.14.3"), {"ansible_core": "2.21.5"}, []),
        (BIONIC, {"ansible_core": "2.16.19"}, []),
        # Folders of one disk need the sum.
        (machine(**disks(free=9.6e9)), {}, []),
        (machine(clock=500.0), COLLECTED, []),
        (machine(held_since=1000.0 - 89 * 86400), {}, []),
        # Its own driver does what the stack needs, and nothing more is asked.
        (machine("ubuntu2404", ["2e12"], arch="aarch64", driver_kept=True), {"stack": "cu132"}, []),
        (turing(gcc="7.5.0", driver_kept=True, clock=2e9), {"clock": [2e9, 2e9]}, ["driver_ended"]),
        (turing(gcc="7.5.0", **R620, clock=1.79e9), {"clock": [1.79e9, 1.79e9]}, []),
        # A VPN's own MTU and speed are none of the cable's.
        (FAULTS["tunnel"], {"address": "100.64.0.7", "listed": ["100.64.0.7"]}, ["tunnel"]),
        (machine(driver_library="580.126.20"), {}, []),  # as hwloc brings it, without a module
        (FAULTS["card_hidden"], {"stack": "cu126"}, ["card_hidden"]),
        ({**FAULTS["card_hidden"], "gpus_counted": 0}, {}, []),
        (turing(prime="off", gcc="7.5.0"), {}, []),  # its driver is loaded all the same
    ],
)
def test_what_is_a_fault_and_what_is_none(facts, question, faults):
    assert found(facts, **question) == faults


def test_packages_that_apt_calls_broken_stop_a_machine_by_one_fault_alone():
    """On one with a card too, whose driver would be refused for the same."""
    for made in (machine(), machine(*CARD, **NO_DRIVER)):
        assert sorted(found({**made, "broken": UNMET})) == sorted([*found(made), "dpkg"])
    left = machine(*CARD, broken=UNMET, pending=True)  # by role driver, which goes on
    assert "dpkg" not in found(left)


def test_the_page_lists_every_fault_and_release_and_no_other():
    page = (ROOT / "docs/preflight.md").read_text()
    assert preflight.machine.describe_releases() in page
    listed = re.findall(r"^\| `(\w+)`(\*?)†? \|", page, re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(KNOWN)
    blocking = preflight.blocking([{"fault": name} for name, _ in listed])
    assert [name for name, star in listed if star] == [one["fault"] for one in blocking]


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        # As the installer of Ubuntu 22.04 writes it.
        ("dm_crypt-0 UUID=6f-1 none luks,discard", ["dm_crypt-0"]),
        ("root UUID=6f-1 - luks,tpm2-device=auto", []),
        ("root UUID=6f-1 none luks,keyscript=decrypt_keyctl", ["root"]),
        ("root UUID=6f-1", ["root"]),
        ("swap /dev/sda2 /dev/urandom swap,cipher=aes-xts-plain64", []),
        ("usb UUID=6f-3 none luks,noauto", []),
    ],
)
def test_disks_for_whose_passphrase_a_boot_waits(line, waits, tmp_path, monkeypatch):
    facts = load("ansible/library/machine_facts.py")
    (tmp_path / "crypttab").write_text(f"{line}\n")
    monkeypatch.setattr(facts, "CRYPTTAB", str(tmp_path / "crypttab"))
    monkeypatch.setattr(facts, "CLEVIS", str(tmp_path / "clevis"))
    assert facts.list_boot_passphrases() == waits
    (tmp_path / "clevis").touch()
    assert facts.list_boot_passphrases() == []


@pytest.mark.parametrize(
    ("names", "kernel"),
    [("linux-image-amd64", True), ("nvidia-smi linux-modules-nvidia-580-generic", False)],
)
def test_only_a_kernel_that_is_held_grows_old(names, kernel, tmp_path, monkeypatch):
    facts = load("ansible/library/machine_facts.py")
    (tmp_path / "held").write_text("\n".join(["libcuda1", *names.split(), ""]))
    monkeypatch.setattr(facts, "HOLDS", str(tmp_path / "held"))
    assert (facts.read_held_since() is not None) is kernel


# Lines of the kernels of Ubuntu 18.04 (4.15) to Debian 13 (6.12), and NVIDIA's of 410 to 580.
LOG = """\
NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024
NVRM: GPU at PCI:0000:01:00: GPU-12345678-9abc-def0-1234-56789abcdef0
NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (PCI:0000:01:00): 31, pid=2519, name=python, Ch 00000008, intr 10000000. MMU Fault
NVRM: Xid (0000:01:00): 31, Ch 00000010, engmask 00000101, intr 10000000
"""


def test_a_card_of_virtual_machines_is_none_of_this_ones(tmp_path, monkeypatch):
    facts = load("ansible/library/machine_facts.py")
    for slot, vendor, device, holder in (
        ("01", "10de", "2204", "vfio-pci"),
        ("02", "10de", "1e07", "nvidia"),
        ("03", "8086", "4680", "i915"),
    ):
        (tmp_path / slot).mkdir()
        for name, text in (("class", "030000"), ("vendor", vendor), ("device", device)):
            (tmp_path / slot / name).write_text(f"0x{text}\n")
        (tmp_path / slot / "driver").symlink_to(f"/sys/bus/pci/drivers/{holder}")
    (tmp_path / "prime").write_text("on-demand\n")
    monkeypatch.setattr(facts, "DEVICES", f"{tmp_path}/0*")
    monkeypatch.setattr(facts, "PRIME", str(tmp_path / "prime"))
    found = facts.list_gpus()
    assert [card["device"] for card in found["gpus"]] == ["1e07", "4680"]
    assert (found["passed_through"], found["prime"]) == (["2204"], "on-demand")


@pytest.mark.parametrize("way", ["sudo", "dmesg"])
def test_nvidias_errors_are_read_from_the_kernels_log_by_whichever_way_is_open(monkeypatch, way):
    facts = load("ansible/library/machine_facts.py")
    monkeypatch.setattr(facts, "output", lambda *argv, **_: LOG if argv[0] == way else None)
    assert facts.list_logged_xids() == [31, 79]
    monkeypatch.setattr(facts, "output", lambda *argv, **_: None)
    assert facts.list_logged_xids() == []


def test_apt_itself_says_which_source_is_dead(tmp_path, monkeypatch):
    facts = load("ansible/library/machine_facts.py")
    alive = tmp_path / "web/alive/dists/stable"
    alive.mkdir(parents=True)
    (alive / "Release").write_text("Suite: stable\nArchitectures: amd64\nComponents: main\n")
    quiet = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "web")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), quiet)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "gone.list").write_text(f"deb {address}/gone focal main\n")
    monkeypatch.setattr(facts, "SOURCES", (f"{parts}/*",))
    own = f'Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "{parts}";'
    own += ' Acquire::http::Proxy "DIRECT"; APT::Sandbox::User "root";'
    monkeypatch.setattr(facts, "ASK_SOURCES", facts.ASK_SOURCES + own)
    assert facts.find_dead_sources() == []  # no source answers
    (parts / "alive.list").write_text(f"deb [trusted=yes] {address}/alive stable main\n")
    dead = {"source": f"{address}/gone focal", "file": f"{parts}/gone.list", "unsigned": False}
    assert facts.find_dead_sources() == [dead]
    # Unsigned, and of no suite, as NVIDIA's.
    (tmp_path / "web/flat").mkdir()
    (tmp_path / "web/flat/Release").write_text("Suite: stable\n")
    (parts / "unsigned.list").write_text(f"deb {address}/flat /\n")
    flat = {"source": f"{address}/flat", "file": f"{parts}/unsigned.list", "unsigned": True}
    assert sorted(facts.find_dead_sources(), key=str) == sorted([dead, flat], key=str)
    server.shutdown()


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"gpu_processes": [], **GDM, "seated": ["anna"]}, {}),  # who is asked before a reboot
        ({"offered": {}}, {}),  # its package lists were never read, which make provision does
        ({"driver_kept": True}, {"policy": "keep"}),
        ({}, {"offline": True}),
    ],
)
def test_a_driver_that_the_role_will_not_refuse_is_no_fault(changes, setting):
    facts, question = ASKED["driver, program"]
    asked = {**QUESTION["driver"], **setting}
    assert "driver" not in found({**facts, **changes}, **question, driver=asked)


def of_ssh(said):
    """The variables of a machine of which ssh says this."""
    message = f"Task failed: Failed to connect to the host via ssh: {said}"
    return {"inventory_hostname": "node9", "ansible_host": "10.0.0.9",
            "reach_answer": {"msg": message}}  # fmt: skip


def two_cards(number, fast=2500, network="10.0.2"):
    """A machine that is listed by its gigabit card, and has a second one."""
    own = copy.deepcopy(machine()["links"][0])
    own.update(addresses=[f"192.168.56.{number}"], networks=[f"192.168.56.{number}/24"])
    second = {**own, "name": "enp5s0", "speed": fast, "addresses": [f"{network}.{number}"]}
    second["networks"] = [f"{network}.{number}/24"]
    return machine(host=f"pc{number}", links=[own, second])


def of_all(machines):
    """{fault: host} of what concerns several."""
    return {finding["fault"]: finding["host"] for finding in network.check_cluster(machines)}


@pytest.mark.parametrize(
    "machines",
    [
        [two_cards(1)],
        [two_cards(1), two_cards(2, network="10.0.3")],  # not one network
        [two_cards(1), two_cards(2, fast=1000)],  # the slowest card of a network is its speed
        [two_cards(1), machine(host="pc2")],
    ],
)
def test_no_faster_network_no_proposal(machines):
    assert "faster_card" not in of_all(machines)


def test_cards_of_unlike_packets_are_one_finding():
    jumbo = machine(host="node2", **link(mtu=9000))
    assert of_all([machine(interface=None), jumbo, machine()])["mtu_differs"] == "node2"
    assert "mtu_differs" not in of_all([jumbo, jumbo])
    assert "mtu_differs" not in of_all([FAULTS["mtu"], machine()])  # a finding of its own
    assert "mtu_differs" not in of_all([FAULTS["tunnel"], machine()])  # which says so already


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_the_drivers_library_is_found_in_the_folder_of_the_processor(monkeypatch, architecture):
    library = f"/usr/lib/{architecture}-linux-gnu/libnvidia-ml.so"
    links = {f"{library}.1": f"{library}.580.95.05"}
    collect = load("ansible/library/machine_facts.py")
    monkeypatch.setattr(collect.platform, "machine", lambda: architecture)
    monkeypatch.setattr(collect.os.path, "realpath", lambda path: links.get(path, path))
    monkeypatch.setattr(collect.os.path, "exists", lambda path: path in links.values())
    monkeypatch.setattr(collect, "list_logged_xids", list)
    assert collect.read_loaded_driver()["driver_library"] == "580.95.05"
