"""What preflight finds in recorded facts: each fault is found alone, with a remedy."""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading

import pytest
import yaml

from planning import preflight
from tests.unit.ansible.provision_machines import HEALTHY, QUESTION, ROOT, load, machine

network = preflight.network


def link(**changes):
    return {"links": [dict(HEALTHY["links"][0], **changes)]}


def disks(**changes):
    return {"disks": {name: dict(row, **changes) for name, row in HEALTHY["disks"].items()}}


DOCKER = dict(HEALTHY["links"][0], name="docker0", addresses=[], networks=["192.168.0.1/16"])
LOADED = ("driver", "driver_library", "module")
# Of a kernel on which the driver that stack cu102 began with is not built any more.
IMPOSSIBLE = machine(
    "debian11", ["1e07"], kernel="6.1.0-31-amd64", driver=None, driver_library=None
)
FAULTS = [
    ("release", machine(distribution="fedora")),
    ("arch", machine(arch="aarch64")),
    ("systemd", machine(systemd=False)),
    ("python", machine("ubuntu1804")),
    ("sudo", machine(sudo=False)),
    ("disk_full", machine(**disks(free=1e9))),
    ("inodes", machine(**disks(free_inodes=10))),
    ("read_only", machine(**disks(read_only=True))),
    ("mount", machine(missing_mounts=[{"path": "/data", "type": "nfs4"}])),
    (
        "apt_source",
        machine(dead_sources=[{"source": "http://ppa.example/x focal", "file": "/etc/apt/x.list"}]),
    ),
    ("passphrase", machine(boot_passphrases=["dm_crypt-0"])),
    (
        "toolkit",
        machine(
            "ubuntu1804",
            ["1e07"],
            gcc="7.5.0",
            driver="440.33.01",
            toolkits={"/usr/local/cuda-10.2": "10.2.89"},
        ),
    ),
    ("library_path", machine(missing_libraries=["/usr/lcoal/cuda/lib64"])),
    ("address", machine(interface=None)),
    ("unlisted_address", machine(**link(networks=["192.168.56.111/24", "192.168.56.57/24"]))),
    ("wireless", machine(**link(wireless=True))),
    ("link_speed", machine(**link(speed=100))),
    ("duplex", machine(**link(duplex="half"))),
    ("mtu", machine(**link(mtu=1400))),
    ("firewall", machine(ufw_conf='ENABLED="yes"\n')),
    ("firewall", machine(firewalld=True)),
    ("apt_lock", machine(apt_lock={"pid": 7, "command": "unattended-upgr"})),
    ("dpkg", machine(dpkg_broken=True)),
    ("dpkg", machine(broken="libnvidia-gl-535 : Depends: libnvidia-common-535")),
    ("rsync", machine(rsync=False)),
    ("clock", machine(clock=1100.0)),
    ("venv", machine(python_venv=False)),
    ("secure_boot", machine("debian11", ["1e07"], secure_boot=True, driver=None)),
    ("nouveau", machine("debian11", ["1e07"], nouveau=True, driver=None)),
    ("driver_missing", machine("debian11", ["1e07"], driver=None)),
    ("driver_mismatch", machine("debian11", ["1e07"], driver_library="580.130.1")),
    (
        "driver_old",
        machine("debian11", ["1e07"], runfile="430.50", **dict.fromkeys(LOADED, "430.50")),
    ),
    ("driver", machine("debian11", ["1e07"], **dict.fromkeys(LOADED, "430.50"))),
    ("kernel_held", machine(held_since=1000.0 - 91 * 86400)),
    ("stack", machine("debian11", ["ffff"])),
    ("gcc", machine("debian11", ["1e07"], gcc="10.2.1")),
    ("installer", machine("debian12", ["1e07"])),
    ("duplicate_address", machine(address_owner="3c:7c:3f:00:00:09")),
    ("overlap", machine(links=[*HEALTHY["links"], DOCKER])),
]
# Faults that are not about one machine's facts.
TOLD_BY_OTHERS = {"collect", "duplicate_machine_id", "duplicate_mac", "faster_card"}
TOLD_BY_OTHERS |= {"gpu_failed", "gpu_hot", "xid", "xid_program", "disk_errors", "reboot_waits"}
# Faults that need other settings.
ASKED = [
    ("loopback_name", machine(loopback_names=["node1"]), {"provisioned": True}),
    ("uv", machine(), {"env_manager": "uv"}),
    ("train_user", machine(), {"users": {**QUESTION["users"], "there": False}}),
    ("one_user", machine(), {"users": {**QUESTION["users"], "provisions": "tandem"}}),
    (
        "stack",
        IMPOSSIBLE,
        {"driver": {**QUESTION["driver"], "version": "440.33.01"}},
    ),
]


def found(facts, **question):
    return preflight.findings(facts, {**QUESTION, **question})


@pytest.mark.parametrize(("fault", "facts"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_fault(fault, facts):
    findings = found(facts)
    assert fault in [finding["fault"] for finding in findings]
    for finding in findings:
        assert finding["host"] == "node1"
        assert len(finding["cause"]) > 10
        assert len(finding["remedy"]) > 10


@pytest.mark.parametrize(("fault", "facts", "question"), ASKED, ids=[row[0] for row in ASKED])
def test_fault_of_other_settings(fault, facts, question):
    assert fault in [finding["fault"] for finding in found(facts, **question)]
    assert fault not in [finding["fault"] for finding in found(facts)]


def test_packages_that_apt_calls_broken_stop_a_machine_before_anything_is_changed():
    """By one sentence, on one with a card too, whose driver would be refused by the same."""
    why = "libreoffice-core : Depends: libreoffice-common (> 1:7.4) but it is not installed"
    for made in (machine(), machine("debian12", ["1e07"], driver=None, driver_library=None)):
        whole = {finding["fault"] for finding in found(made)}
        findings = [one for one in found({**made, "broken": why}) if one["fault"] not in whole]
        assert [one["fault"] for one in findings] == ["dpkg"] and preflight.blocking(findings)
        assert why in findings[0]["cause"] and "apt --fix-broken" in findings[0]["remedy"]
    left = machine("debian12", ["1e07"], broken=why, pending=True)  # by role driver, which goes on
    assert "dpkg" not in [one["fault"] for one in found(left)]


KNOWN = "Debian 11, 12 or 13; Ubuntu 18.04, 20.04, 22.04 or 24.04"


@pytest.mark.parametrize(
    ("distribution", "version", "cause", "remedy"),
    [
        ("ubuntu", "26.04", "Ubuntu 26.04 is newer than", "install Ubuntu 24.04 on it, the LTS"),
        ("ubuntu", "25.10", "Ubuntu 25.10 is newer than", "install Ubuntu 24.04 on it, the LTS"),
        ("debian", "14", "Debian 14 is newer than", "install Debian 13 on it, the release before"),
        ("debian", None, "Debian without a number is newer", "install Debian 13 on it"),
        ("ubuntu", "16.04", "do not know its release, Ubuntu 16.04", "install one of these"),
        ("ubuntu", "23.10", "do not know its release, Ubuntu 23.10", "install one of these"),
        ("linuxmint", "22", "do not know its release, linuxmint 22", "install one of these"),
    ],
)
def test_a_release_that_is_not_listed_is_refused_with_what_to_install(
    distribution, version, cause, remedy
):
    (finding,) = found({**machine(), "distribution": distribution, "release": version})
    assert finding["fault"] == "release" and preflight.blocking([finding])
    assert cause in finding["cause"]
    assert finding["remedy"].startswith(remedy) and KNOWN in finding["remedy"]


def test_one_line_of_releases_yml_makes_a_release_known(monkeypatch):
    """As somebody would add it who has seen a machine of it provisioned."""
    path = ROOT / "ansible/releases.yml"
    line = '  resolute: {distribution: ubuntu, version: "26.04", python: "3.14"}\n'
    table = yaml.safe_load(path.read_text() + line)
    new = {**machine(), "distribution": "ubuntu", "release": "26.04", "kernel": "7.0.0-14-generic"}
    assert [finding["fault"] for finding in found(new)] == ["release"]
    monkeypatch.setattr(preflight.machine.offline, "_table", lambda name: table)
    assert found(new) == []


FAULT = """

def beige(facts, question):
    if facts["host"] == "beige":
        yield "beige", "its case is beige", "paint it"


CHECKS = (*CHECKS, beige)
"""


def test_a_fault_is_one_file_s_change(tmp_path):
    """In a copy of planning, asked by itself."""
    shutil.copytree(ROOT / "ansible/planning", tmp_path / "planning")
    for name in ("releases.yml", "stacks.yml", "gpus.yml"):
        shutil.copy(ROOT / "ansible" / name, tmp_path)
    shutil.copytree(ROOT / "contract", tmp_path / "contract")
    with (tmp_path / "planning/faults/machine.py").open("a") as file:
        file.write(FAULT)
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps([{**machine(), "host": "beige"}, QUESTION], default=list))
    code = "import json, sys; from planning import preflight as p; "
    code += "print(*map(p.text, p.findings(*json.load(open(sys.argv[1])))), sep=chr(10))"
    argv = [sys.executable, "-c", code, str(facts)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "beige: its case is beige. Remedy: paint it" in done.stdout.splitlines()


def test_the_page_names_the_releases_that_are_known():
    known = preflight.machine.known_releases()
    assert preflight.machine.release_names(known) == KNOWN
    assert KNOWN in (ROOT / "docs/preflight.md").read_text()


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        # As the installers of Ubuntu 22.04 and Debian 12 write it.
        ("dm_crypt-0 UUID=6f-1 none luks,discard", ["dm_crypt-0"]),
        ("nvme0n1p3_crypt UUID=6f-1 none luks,discard,x-initrd.attach", ["nvme0n1p3_crypt"]),
        ("root UUID=6f-1 - luks,tpm2-device=auto", []),
        ("root UUID=6f-1 none luks,keyscript=decrypt_keyctl", ["root"]),
        ("root UUID=6f-1", ["root"]),
        ("swap /dev/sda2 /dev/urandom swap,cipher=aes-xts-plain64", []),
        ("data UUID=6f-2 /etc/keys/data luks", []),
        ("usb UUID=6f-3 none luks,noauto", []),
        ("# root UUID=6f-1 none luks", []),
        ("", []),
        ("root", []),
    ],
)
def test_disks_for_whose_passphrase_a_boot_waits(line, waits, tmp_path, monkeypatch):
    facts = load("ansible/library/machine_facts.py")
    (tmp_path / "crypttab").write_text(f"{line}\n")
    monkeypatch.setattr(facts, "CRYPTTAB", str(tmp_path / "crypttab"))
    monkeypatch.setattr(facts, "CLEVIS", str(tmp_path / "clevis"))
    assert facts.boot_passphrases() == waits
    (tmp_path / "clevis").touch()
    assert facts.boot_passphrases() == []


def test_apt_itself_says_which_source_is_dead(tmp_path, monkeypatch):
    facts = load("ansible/library/machine_facts.py")
    alive = tmp_path / "web/alive/dists/stable"
    alive.mkdir(parents=True)
    (alive / "Release").write_text("Suite: stable\nArchitectures: amd64\nComponents: main\n")
    quiet = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "web")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "gone.list").write_text(f"deb {address}/gone focal main\n")
    monkeypatch.setattr(facts, "SOURCES", (f"{parts}/*",))
    own = f'Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "{parts}";'
    own += ' Acquire::http::Proxy "DIRECT"; APT::Sandbox::User "root";'
    monkeypatch.setattr(facts, "ASK_SOURCES", facts.ASK_SOURCES + own)
    assert facts.dead_sources() == []  # no source answers
    (parts / "alive.list").write_text(f"deb [trusted=yes] {address}/alive stable main\n")
    dead = {"source": f"{address}/gone focal", "file": f"{parts}/gone.list"}
    assert facts.dead_sources() == [dead]
    server.shutdown()


def test_a_user_that_trains_and_provisions_is_no_problem_but_to_be_known():
    (note,) = found(machine(), users={**QUESTION["users"], "provisions": "tandem"})
    assert preflight.problems([note]) == preflight.blocking([note]) == []
    assert "make bootstrap LOGIN=tandem" in note["remedy"]


def test_a_machine_without_the_user_that_trains_is_not_provisioned():
    missing = found(machine(), users={**QUESTION["users"], "there": False})
    assert preflight.blocking(missing) == preflight.problems(missing) == missing
    assert "no user tandem" in missing[0]["cause"]


def test_what_the_bundle_brings_is_no_fault_of_a_machine_without_internet():
    facts = machine(rsync=False, python_venv=False)
    assert {finding["fault"] for finding in found(facts)} == {"rsync", "venv"}
    assert found(facts, offline=True) == []


def test_what_the_roles_install_hinders_nobody_and_is_asked_of_nobody():
    """A fresh Ubuntu has no python3-venv, a fresh Debian no rsync."""
    for finding in found(machine(rsync=False, python_venv=False)):
        assert "make provision installs" in finding["remedy"] and "sudo" not in finding["remedy"]
        assert preflight.blocking([finding]) == []
    wanted = {}
    for role, file in (("base", "main"), ("python_env", "venv")):
        folder = ROOT / "ansible/roles" / role
        listed = yaml.safe_load((folder / "vars/main.yml").read_text())[f"{role}_packages"]
        for task in yaml.safe_load((folder / f"tasks/{file}.yml").read_text()):
            asked = task.get("vars", {}).get("packages_wanted", "").strip("{ }").partition(".")[2]
            names = listed.get(asked, []) if isinstance(listed, dict) else listed
            wanted |= dict.fromkeys(names, task.get("when"))
    assert {"rsync", "python3-venv"} <= wanted.keys()
    assert wanted["rsync"] is None is wanted["python3-venv"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "changed under a running display: gdm.service"),
        ({"display_manager_active": False}, None),
        ({"offered": {}}, None),  # its package lists were never read, which make provision does
    ],
)
def test_what_the_role_driver_will_refuse_is_said_before_by_its_own_decision(changes, told):
    state = {**NO_DRIVER, "display_manager": "gdm.service", "display_manager_active": True}
    facts = machine(*CARD, **{**state, **changes})
    said = [row["cause"] for row in found(facts, stack="cu126") if row["fault"] == "driver"]
    assert [told in cause for cause in said] == [True] * bool(told)
    for setting, value in (("policy", "keep"), ("offline", True), ("allow_stop_display", True)):
        asked = {**QUESTION["driver"], setting: value}
        assert "driver" not in [row["fault"] for row in found(facts, stack="cu126", driver=asked)]


def test_an_impossible_driver_hears_the_reason_and_the_nearest():
    asked = {**QUESTION["driver"], "version": "440.33.01"}
    (finding,) = [row for row in found(IMPOSSIBLE, driver=asked) if row["fault"] == "stack"]
    assert "builds on kernels below 5.6 only, and this is 6.1.0-31-amd64" in finding["cause"]
    assert finding["cause"].endswith("the nearest that fits: driver 580.126.20")


def test_a_gcc_that_is_too_new_hears_of_the_stack_that_takes_it():
    (finding,) = found(machine("debian11", ["1e07"], gcc="12.2.0"))
    assert "take gcc up to 7" in finding["cause"]
    assert finding["remedy"].endswith("stack: cu132")
    # Each Ubuntu 22.04 has such a gcc, and trains: `make check` is content with it.
    assert "sudo" not in finding["remedy"] and preflight.problems([finding]) == []


CARD = ("debian12", ["1e07"])
NO_DRIVER = {"driver": None, "driver_library": None}
DRIVER_FAULTS = {
    "secure_boot": machine(*CARD, secure_boot=True, **NO_DRIVER),
    "nouveau": machine(*CARD, nouveau=True, **NO_DRIVER),
    "driver_missing": machine(*CARD, **NO_DRIVER),
    "driver_mismatch": machine(*CARD, driver_library="580.130.1"),
    "driver_old": machine(*CARD, runfile="430.50", **dict.fromkeys(LOADED, "430.50")),
}


@pytest.mark.parametrize("fault", DRIVER_FAULTS)
@pytest.mark.parametrize("policy", ["keep", "install", "upgrade"])
def test_what_the_role_driver_does_is_not_asked_of_a_person(fault, policy):
    settings = {**QUESTION["driver"], "policy": policy}
    findings = found(DRIVER_FAULTS[fault], driver=settings, stack="cu126")
    (remedy,) = [row["remedy"] for row in findings if row["fault"] == fault]
    assert "make provision" in remedy
    assert "sudo" not in remedy
    wanted = {"driver_old": "upgrade"}.get(fault, "upgrade" if policy == "upgrade" else "install")
    assert ("set driver_policy: " + wanted in remedy) == (
        policy == "keep" or (fault == "driver_old" and policy == "install")
    )


def test_secure_boot_stays_off_where_the_release_cannot_sign():
    ill = machine("debian11", ["1e07"], secure_boot=True, **NO_DRIVER)
    (remedy,) = [row["remedy"] for row in found(ill) if row["fault"] == "secure_boot"]
    assert remedy.startswith("switch Secure Boot off")


def test_an_older_python_is_in_order_for_the_older_ansible():
    old = machine("ubuntu1804", ["1e07"], conda=True)
    assert [row["fault"] for row in found(old)] == ["python"]
    assert found(old, ansible_core="2.16.19") == []


def test_what_was_needed_to_make_the_environment_is_not_asked_for_afterwards():
    assert found(machine(python_venv=False), provisioned=True) == []
    assert found(machine("debian12", ["1e07"]), provisioned=True) == []


@pytest.mark.parametrize("cards", [[], ["1e07"]])
def test_healthy_machines_have_none(cards):
    assert found(machine("debian11" if cards else "debian12", cards)) == []


def test_everything_is_said_at_once():
    ill = machine(sudo=False, rsync=False, firewalld=True)
    assert {finding["fault"] for finding in found(ill)} == {"sudo", "rsync", "firewall"}


def test_folders_of_one_disk_need_the_sum():
    assert found(machine(**disks(free=9.4e9)))[0]["fault"] == "disk_full"
    assert found(machine(**disks(free=9.6e9))) == []


def test_the_clock_is_judged_against_the_time_of_collecting_not_of_judging():
    assert found(machine(clock=500.0), clock=[400.0, 600.0]) == []
    assert found(machine(clock=391.0), clock=[400.0, 600.0])[0]["cause"].startswith(
        "its clock differs by -9 s"
    )


def test_one_machine_under_two_names_is_seen():
    twin = machine(host="node2")
    faults = [(row["host"], row["fault"]) for row in network.duplicates([machine(), twin])]
    assert faults == [("node2", "duplicate_machine_id"), ("node2", "duplicate_mac")]
    other = machine(host="node2", machine_id="f", **link(mac="3c:7c:3f:00:00:02"))
    assert network.duplicates([machine(), other]) == []


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! Host key verification failed.",
            "host_key_changed",
        ),
        (
            "No ED25519 host key is known for 10.0.0.9. Host key verification failed.",
            "host_key_unknown",
        ),
        ("tandem@10.0.0.9: Permission denied (publickey,password).", "login"),
        ("ssh: Could not resolve hostname node9: Name or service not known", "name"),
        ("ssh: connect to host 10.0.0.9 port 22: Connection refused", "no_sshd"),
        ("ssh: connect to host 10.0.0.9 port 22: No route to host", "unreachable"),
    ],
)
def test_what_ssh_says_decides(said, fault):
    message = f"Task failed: Failed to connect to the host via ssh: {said}"
    variables = {
        "inventory_hostname": "node9",
        "ansible_host": "10.0.0.9",
        "reach_answer": {"msg": message},
    }
    finding = network.unreachable(variables)
    assert finding["fault"] == fault
    assert said in finding["cause"]
    assert "{address}" not in finding["remedy"]
    if fault in ("name", "unreachable", "no_sshd"):  # nobody was there to let anybody in
        assert "let ssh in" not in finding["cause"]


def test_a_machine_that_is_set_aside_comes_with_a_remedy():
    said = "ssh: connect to host 10.0.0.5 port 22: No route\nto host"
    variables = {
        "inventory_hostname": "node5",
        "ansible_host": "10.0.0.5",
        "reach_answer": {"msg": f"Failed to connect to the host via ssh: {said}"},
    }
    assert network.set_aside(variables) == (
        "SET ASIDE: node5: 10.0.0.5 did not answer: ssh: connect to host 10.0.0.5 "
        "port 22: No route to host. Remedy: is it switched on, is its cable in, "
        "is 10.0.0.5 still its address? ping 10.0.0.5."
    )


def test_a_full_disk_hinders_and_a_slow_cable_does_not():
    slow, full = machine(**link(speed=100)), machine(**disks(free=1e9))
    assert preflight.blocking(found(slow)) == []
    assert [row["fault"] for row in preflight.blocking(found(full))] == ["disk_full"]


def test_a_package_manager_that_is_at_work_is_waited_for():
    busy = machine(apt_lock={"pid": 7, "command": "unattended-upgr"})
    (finding,) = found(busy)
    assert preflight.blocking([finding]) == []
    assert finding["remedy"].startswith("nothing: make provision waits")


def test_only_faults_that_exist_hinder():
    known = {row[0] for row in [*FAULTS, *ASKED]} | TOLD_BY_OTHERS
    assert known >= preflight.BLOCKING


def test_the_page_lists_every_fault_and_no_other():
    page = (ROOT / "docs/preflight.md").read_text()
    listed = re.findall(r"^\| `(\w+)`(\*?) \|", page, re.MULTILINE)
    known = {row[0] for row in [*FAULTS, *ASKED]} | TOLD_BY_OTHERS
    known |= {fault for _, fault, _ in network.UNREACHABLE}
    assert sorted(name for name, _ in listed) == sorted(known)
    assert {name for name, star in listed if star} == preflight.BLOCKING


def test_a_kernel_that_is_held_for_a_while_is_no_finding_yet():
    assert preflight.findings(machine(held_since=1000.0 - 89 * 86400), QUESTION) == []
    (finding,) = preflight.findings(machine(held_since=1000.0 - 90 * 86400), QUESTION)
    assert "for 90 days" in finding["cause"] and "make upgrade LIMIT=node1" in finding["remedy"]
