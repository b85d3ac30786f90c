"""What `make check` and Ansible's roles say of machines, each case planted alone."""

import json
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from planning import (
    PlanError,
    clock,
    data,
    driver_result,
    firewall,
    members,
    network,
    network_facts,
    offline,
    preflight,
    preserved_settings,
    reading,
    share,
    stacks,
    toolkit,
    wake,
)
from tests.unit.ansible import test_network_plan as cards
from tests.unit.ansible import test_preserved_settings as kept
from tests.unit.ansible.driver_machines import (
    BUSY,
    DEBIAN12,
    GDM,
    SEATED,
    XORG,
    by_runfile,
    facts,
    full,
    moving,
    packaged,
    refused,
    signed,
    upgrade,
)
from tests.unit.ansible.provision_machines import TABLE, load, machine
from tests.unit.ansible.test_driver_result import CARDS, LAPTOP
from tests.unit.ansible.test_network_wake import ETHTOOL, RECORD
from tests.unit.ansible.test_provision_preflight import ILL, SSH, of_ssh, two_cards
from tests.unit.ansible.test_share_filters import LSBLK, PLACE, mounted

data_set = load("ansible/data_set.py")


LISTING = json.dumps(
    {"files": {"classes": 0, "images": 3, "bytes": 9000, "sha256": 64 * "a", "note": ""}}
)


def no_room():
    of_100_gb = mock.Mock(**{"stat.return_value.st_blocks": 10**11 // 512})
    with mock.patch.object(data, "Path", lambda *names: of_100_gb):
        return data.data_lack(
            ["coco"], [["<f+++++++++ a"]], f"Avail\n{10**10}\n", "/d", "/srv/data"
        )


faults = preflight.network


def driver(recorded, stack="cu102", **wanted):
    return partial(refused, recorded, stack, **wanted)


def upgrading(recorded):
    return partial(refused, recorded, by=upgrade)


def rebooting(state):
    asked = {**machine(), **state}, {"interrupt": False}, "7"
    return lambda: ". Remedy: ".join(driver_result.reboot_refused(*asked))


def error(function, *arguments, **named):
    """The sentence with which a function refuses."""

    def sentence():
        with pytest.raises(PlanError) as caught:
            function(*arguments, **named)
        return str(caught.value)

    return sentence


def own_runfile(version):
    return {"runfile": f"/srv/NVIDIA-Linux-x86_64-{version}.run", "runfile_sha256": "0" * 64}


GSP = "nvidia-kernel-dkms : Depends: firmware-nvidia-gsp (= 535.261.03) but it is not installable"
WHY = "libreoffice : Depends: libreoffice-core (= 1:7.4.7) but it is not installed"
OLD = by_runfile("410.48")
LOADED = dict.fromkeys(("driver", "driver_library"), "570.10.01")
NVIDIAS = dict.fromkeys(("nvidia-open", "nvidia-driver"), "590.48.01-1ubuntu1")
DRIVER = {
    # Where none is installed.
    "old packages": driver(facts(offered=DEBIAN12), "cu132", source="package"),
    "Pascal beside Blackwell": driver(facts(cards=["1080 Ti", "5090"]), "cu126"),
    "old runfile": driver(facts(), "cu132", **own_runfile("440.100")),
    "CUDA's runfile": driver(facts(), runfile="/srv/cuda_10.2.89_440.33.01_linux.run"),
    "unchecked runfile": driver(facts(), runfile="/srv/NVIDIA-Linux-x86_64-580.1.run"),
    "runfile too new": driver(facts(cards=["1080 Ti"]), "cu126", **own_runfile("590.48.01")),
    "runfile too old": driver(facts(cards=["5090"]), "cu126", **own_runfile("550.144.03")),
    "runfile not in the bundle": driver(facts(), offline=True),
    "version for old kernels": driver(facts(), version="440.33.01"),
    "version unknown": driver(facts(), version="999.1"),
    "no headers": driver(
        facts(offered={"linux-headers-6.1.0-50-amd64": "1"}, kernel="6.1.0-10-amd64")
    ),
    "no headers, mainline": driver(
        facts(offered={"linux-headers-6.1.0-50-amd64": "1"}, kernel="6.15.4-061504-generic")
    ),
    "prime-select": driver(facts(prime="off")),
    "no gcc": driver(
        facts(kernel_headers=True) | {"offered": DEBIAN12 | {"dkms": "3.0", "make": "4.3"}}
    ),
    "firmware missing": driver(
        facts(offered=DEBIAN12, uninstallable={"nvidia-kernel-dkms": GSP}), source="package"
    ),
    "full disk": driver(full(facts(kernel_headers=True))),
    "broken packages": driver(facts(offered=DEBIAN12, broken=WHY)),
    # Secure Boot.
    "would build": driver(signed(coming=["dkms", "nvidia-dkms-580-open"])),
    "signed not installable": driver(
        {**signed(), "uninstallable": dict.fromkeys(signed()["prebuilt"], "Depends: a-580")}
    ),
    "runfile that loads": driver(facts(secure_boot=True), **own_runfile("535.261.03")),
    "Debian 11 cannot sign": driver(facts("debian11", secure_boot=True)),
    # Where one is installed.
    "of unknown origin": driver(facts(**LOADED), "cu132"),
    "keep, none": driver(facts(), policy="keep"),
    "keep, mismatch": driver(packaged(driver_library="535.300.01"), policy="keep"),
    "keep, old": driver(packaged(), "cu132", policy="keep"),
    "old": driver(by_runfile("470.57.02"), "cu132"),
    "packages, then runfile": driver(packaged(), source="runfile", policy="upgrade"),
    "runfile, then packages": driver(by_runfile(), source="package", policy="upgrade"),
    "no newer packages": driver(packaged(), "cu132", policy="upgrade"),
    "two drivers": driver(packaged(runfile="580.126.20")),
    "590 for Pascal": driver(
        facts("ubuntu2204", ["1080 Ti"], packages=NVIDIAS, module="590.48.01"), "cu126"
    ),
    "old and offline": driver(OLD, offline=True),
    "old and offline, upgrade": driver(OLD, offline=True, policy="upgrade"),
    # What stands in the way.
    "display of nobody": driver(facts(displays=XORG)),
    "process": driver(packaged(driver="535.200.01", gpu_processes=BUSY)),
    "upgrade, somebody there": upgrading(moving(displays=XORG, **SEATED, **GDM)),
    "reboot, control node": rebooting({**SEATED, "machine_id": "7"}),
    "reboot, two there": rebooting({"seated": ["anna", "bela"], "machine_id": "8"}),
    "upgrade, process": upgrading(moving(gpu_processes=BUSY)),
    "upgrade, full disk": upgrading(full(moving())),
    "upgrade, held by its owner": upgrading(moving(held=["linux-image-amd64", "bash"])),
    "upgrade, its driver held": driver(
        packaged(
            offered=dict.fromkeys(DEBIAN12, "535.300.01-1"),
            held=["nvidia-smi", "libcuda1"],
            held_by_us=["libcuda1"],
        ),
        policy="upgrade",
    ),
    "upgrade, two drivers": upgrading(moving(runfile="580.126.20")),
}


STATE = by_runfile(signing_key="/var/lib/dkms/mok.pub")


def outcome(loading="", smi="NVIDIA-SMI has failed because it couldn't communicate", **changes):
    made = driver_result.driver_outcome(STATE | changes, loading, {"rc": 9, "text": smi})
    return f"{made['state']}: {made['reason']}. Remedy: {made['remedy'] or 'none'}"


UBUNTUS_KEY = "/var/lib/shim-signed/mok/MOK.der"
INSTALLED = {
    "mismatch": partial(outcome, driver_library="535.300.01"),
    "nouveau": partial(outcome, nouveau=True, driver=None),
    "not for this kernel": partial(outcome, driver=None, module=None),
    "for the next kernel": partial(
        outcome, driver=None, module=None, waiting_kernel="6.1.0-50", waiting_module="535.261.03"
    ),
    "key": partial(outcome, "insert 'nvidia': Key was rejected by service", driver=None),
    "Ubuntu's key": partial(outcome, "Required key", driver=None, signing_key=UBUNTUS_KEY),
    "no card": partial(outcome, "could not insert 'nvidia': No such device", driver=None),
    "other reason": partial(outcome, "\nsomething else\n", driver=None),
    "nvidia-smi fails": partial(outcome, "", "No devices were found"),
}


def resolved(machines, wanted="auto", members=(), kept=None):
    return error(stacks.resolve, machines, wanted, TABLE, members, kept)


def stack(name):
    return {**TABLE["rows"][name], "name": name}


PASCAL, VOLTA, BLACKWELL = (machine(cards=[card]) for card in ("1b06", "1db4", "2b85"))
ONLY_440 = {**TABLE, "drivers": [row for row in TABLE["drivers"] if row["branch"] == 440]}
STACKS = {
    "old glibc": resolved([machine("ubuntu1804", ["2204"])]),
    "switched off": resolved([PASCAL], members=["node1", "node2"]),
    "Pascal beside Turing": resolved([PASCAL, machine(cards=["1e07"], host="node2")], "cu132"),
    "Volta beside Blackwell": resolved([VOLTA, BLACKWELL]),
    "unknown stack": resolved([machine()], "cu999"),
    "unknown card": resolved([machine(cards=["ffff"])]),
    "decided before": resolved([BLACKWELL], kept={"stack": "cu126", "path": "/a/pc.stack.yml"}),
    "unknown decided before": resolved([PASCAL], kept={"stack": "cu1", "path": "x"}),
    "kept file": error(stacks.read_decision, "stack: 126\n", "/a/pc.stack.yml"),
    "driver 440": error(
        stacks.resolve_driver,
        reading.as_machine_facts(machine(cards=["1e07"])),
        stack("cu102"),
        ONLY_440,
    ),
    "venv": error(
        stacks.choose_environment,
        stack("cpu"),
        reading.as_machine_facts(machine("ubuntu2204")),
        "venv",
    ),
}


def tools(gcc="11.4.0", name="cu102", **wanted):
    made = machine("ubuntu2204", ["1e07"], gcc=gcc)
    asked = {"toolkit": "auto", "apex": "auto", "apex_extensions": "auto", **wanted}
    return error(toolkit.toolkit_plan, [made], stack(name), asked, TABLE)


TOOLKIT = {
    "no CUDA": tools(name="cpu", toolkit=True),
    "no apex": tools(name="cu132", apex=True),
    "no such word": tools(toolkit="yes"),
    "gcc too new": tools(apex_extensions=True),
    "no toolkit": tools("7.5.0", apex_extensions=True, toolkit=False),
}


def power(watts, printed):
    return error(driver_result.power_plan, "pc1", False, watts, printed)


def time_server(**changed):
    found = {"ufw_conf": "", "firewalld": False, **changed}
    return partial(clock.clock_servers_fault, "pc1", found, failed=False)


def without(disks):
    return json.dumps({"blockdevices": json.loads(LSBLK)["blockdevices"][disks:]})


def disk(name, protocol="smb"):
    return error(share.share_disk, name, LSBLK, True, protocol, PLACE, "node1")


def unread(protocol, journal):
    return partial(share.share_failure, protocol, journal, "ls: No")


LISTINGS = [
    {split: {"images": 10 * n, "classes": n, "sha256": 64 * str(n)} for split in ("train", "val")}
    for n in (3, 5)
]
DESKTOPS = "rw,nosuid,nodev,uid=1000,gid=1000,uhelper=udisks2"
SHARE = {
    "NTFS by NFS": partial(share.share_refusal, "nfs", "/media/win", mounted("fuseblk")),
    "NTFS by NFS, newer": partial(share.share_refusal, "nfs", "/media/win", mounted("ntfs3")),
    "share": partial(share.share_refusal, "smb", "/mnt/nas", mounted("nfs4")),
    "desktop's disk": partial(share.share_refusal, "smb", "/media/a", mounted("ntfs3", DESKTOPS)),
    "less than on the server": partial(
        share.share_loss,
        json.dumps({"set": LISTINGS[0]}),
        json.dumps({"set": LISTINGS[1]}),
        "node2",
        "node1",
    ),
    "folder missing": partial(share.share_missing, "/media/disk2/images", LSBLK),
    "folder missing, no disk": partial(share.share_missing, "/x", without(2)),
    "BitLocker": disk("/dev/sdb"),
    "no file system": disk("/dev/nvme0n1"),
    "unknown disk": disk("UUID=none"),
    "unknown kind of name": disk("PARTUUID=1"),
    "mounted elsewhere": disk("UUID=6a0f"),
    "NTFS disk by NFS": disk("LABEL=Daten", "nfs"),
    "password": unread("smb", "mount error(13): Permission denied"),
    "name": unread("smb", "mount error(2): No such file or directory"),
    "SMB 1": unread("smb", "mount error(112): Host is down"),
    "not exported": unread("nfs", "mount.nfs4: access denied by server while mounting"),
    "no route": unread("nfs", "mount.nfs4: No route to host"),
    "no answer": unread("smb", "mount error(113): could not connect to 10.0.0.5Unable to find"),
    "no cifs": unread("smb", "mount error: cifs filesystem not supported by the system"),
    "no nfs": unread("nfs", "mount: unknown filesystem type 'nfs4'"),
    "timeout": unread("nfs", "srv-x.mount: Mounting timed out. Terminating."),
    "something new": unread("nfs", "Mounting /srv/x...\nsomething new"),
    "not mounted": unread("nfs", "\n"),
}


def card(**changes):
    return error(network.network_plan, cards.card_of(**changes), cards.ADD)


def way(want=None, **changes):
    return error(preserved_settings.complete, kept.facts(**changes), want or kept.REPLACE)


def address(text):
    return error(network_facts.full_address, text, ["192.168.56.20/24"], "node1")


LAN = kept.LAN
LOCAL = {**kept.LOCAL, "resolv": "nameserver 127.0.0.53\n"}
AWAY = {**kept.REPLACE, "address": "10.7.0.5/24"}
FAR = {**kept.REPLACE, "address": "10.99.0.5/24", "gateway": "none"}
NETWORK = {
    "wireless": card(nmcli="100 (connected)\nHome\n6f1d-uuid\nwifi\n"),
    "netplan without the card": error(
        network.network_plan,
        {**cards.by_netplan(), "files": {"/etc/netplan/01.yaml": "network: {version: 2}"}},
        cards.ADD,
    ),
    "no folder of ifupdown": card(files={cards.INTERFACES: "iface eth0 inet dhcp\n"}),
    "no manager": card(),
    "address of no card": error(network_facts.interface_of, cards.IP_JSON, "10.0.0.1", "node1"),
    "unknown card": error(network_facts.interface_facts, cards.IP_JSON, "eno1", "node1"),
    "no prefix length": address("10.1.2.3"),
    "no address": address("node1"),
    "only DHCP knows": way(**kept.LOCAL),
    "only DHCP knows, no answer": way(card_dns="Link 2 (eno1):", resolv="nameserver 127.0.0.1\n"),
    "only DHCP knows, stub": way(**LOCAL),
    "router outside": way(AWAY),
    "drop-ins": error(
        kept.files_of,
        kept.facts(**kept.BY_NETWORKD) | {"files": {f"{LAN}.d/more.conf": "", LAN: kept.NETWORK}},
    ),
    "unread file": error(kept.files_of, kept.facts(**kept.BY_NETWORKD) | {"files": {}}),
    "route": error(kept.files_of, kept.facts(**kept.BY_IFUPDOWN, route=kept.GIVEN), FAR),
    "name in the firewall": error(firewall.split_by_family, ["pc1.local"]),
    "other addresses": error(
        firewall.member_addresses, ["a"], {"a": {"other_addresses": "10.0.0.0/24"}}
    ),
    "no hardware address": error(
        wake.wake_record, {**machine(), "interface": None}, "192.168.56.111", 22
    ),
    "host key": error(
        members.host_keys, dict.fromkeys(["ssh_host_key_rsa_public"], "AAAA x"), "node1"
    ),
}
AWAKE = ETHTOOL.format(able="pumbg", mode="g")
HOSTS = {"new": {"offline": True}, "desk": {"offline": "true", "release": "jammy"}}
SAID = {"desk": {"release": "bookworm", "python": "3.11", "gpus": False}}
DELETIONS = [f"*deleting   train/cat/{n}.jpg" for n in range(300)]
OTHERS = {
    "power, too much": power(300, CARDS),
    "power, too little": power(20, CARDS),
    "power, laptop": power(100, LAPTOP),
    "clock, gone": partial(clock.clock_servers_fault, "pc1", {}, failed=True),
    "clock, ufw": time_server(ufw_conf="ENABLED=yes\n"),
    "clock, firewalld": time_server(firewalld=True),
    "wake, card": partial(wake.wake_fault, ETHTOOL.format(able="d", mode="d")),
    "wake, virtual card": partial(wake.wake_fault, ""),
    "wake, not set": partial(wake.wake_fault, ETHTOOL.format(able="pumbg", mode="d")),
    "wake, service": partial(wake.wake_verdict, AWAKE, ["", "inactive"], "", RECORD),
    "wake, record": partial(wake.wake_verdict, AWAKE, ["enabled", "active"], "[", RECORD),
    "offline, no release": error(offline.bundle_order, HOSTS, ["new"], "cpu"),
    "offline, other release": error(offline.bundle_needed, HOSTS, ["desk"], SAID, "cpu"),
    "data, deletions": partial(data.data_refusal, "imagenet", DELETIONS, 400, False),
    "data, no folder": lambda: data_set.examine(Path("/nowhere"), "images")[0],
    "data, no room": no_room,
    "data, copy lacks files": partial(data.data_loss, "coco", LISTING.replace("3", "2"), LISTING),
    "data, copy is no data set": partial(data.data_loss, "coco", '"it is empty"', LISTING),
    "data, a shell that prints": partial(
        data.copy_failure,
        "node1",
        "protocol version mismatch -- is your shell clean?",
        ["+ /home/ann/.bashrc:3: echo Hi", "Hi"],
    ),
}


REFUSALS = {
    f"{room}: {case}": call
    for room, calls in (
        ("driver", DRIVER),
        ("driver installed", INSTALLED),
        ("stack", STACKS),
        ("toolkit", TOOLKIT),
        ("share", SHARE),
        ("network", NETWORK),
        ("provision", OTHERS),
    )
    for case, call in calls.items()
}


def findings():
    """(code, finding) of each fault, planted alone."""
    for case, planted in ILL.items():
        fault = case.partition(",")[0]
        found = preflight.findings(*planted)
        yield from ((case, one) for one in found if one["fault"] == fault)
    two = faults.check_cluster([machine(), machine(host="node2")])
    pair = faults.check_cluster([two_cards(n) for n in (1, 2)])
    two += [one for one in pair if one["fault"] == "faster_card"][:1]
    two.append(preflight.not_collected("node1", "python3:\nnot found"))
    yield from ((one["fault"], one) for one in two)


def render():
    sentences = {code: preflight.text(one) for code, one in findings()}
    sentences |= {fault: faults.describe_skipped(of_ssh(said)) for said, fault in SSH.items()}
    return sentences | {code: call() for code, call in REFUSALS.items()}
