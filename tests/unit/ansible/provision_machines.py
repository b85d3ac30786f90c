"""Realistic machines, in the form that ansible/library/machine_facts.py returns, for the tests; how
to load ansible/'s files and to run its playbooks."""

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import ansible.release
import pytest
import yaml

import ansible.module_utils
from contract.machines import CLOCK_TOLERANCE
from planning import driver

ROOT = Path(__file__).parents[3]
# The older Ansible, by which the tests of this room run too, takes a Python 3.6.
by_the_newer = pytest.mark.skipif(
    ansible.release.__version__.startswith("2.16."), reason="the older Ansible takes a Python 3.6"
)
by_the_default = pytest.mark.skipif(
    not ansible.release.__version__.startswith("2.19."), reason="another Ansible names itself"
)
# Where Ansible looks because of ansible.cfg.
ansible.module_utils.__path__.append(str(ROOT / "ansible/module_utils"))
TABLE = yaml.safe_load((ROOT / "ansible/stacks.yml").read_text())["stacks"]

# A healthy member: Debian 12 on gigabit Ethernet, no GPU.
HEALTHY = {
    **dict.fromkeys(("gcc", "driver", "driver_library", "secure_boot", "address_owner")),
    **dict.fromkeys(("apt_lock", "broken", "held_since", "reboot_waits", "prime", "conda")),
    "passed_through": [],
    **dict.fromkeys(("kernel_headers", "nouveau", "firewalld", "dpkg_broken"), False),
    "uv": False,
    **dict.fromkeys(("python_venv", "systemd", "sudo", "rsync"), True),
    **{name: [] for name in ("environments", "gpus", "loopback_names", "missing_libraries")},
    **{name: [] for name in ("missing_mounts", "boot_passphrases", "dead_sources", "xids")},
    "host": "node1",
    "hostname": "node1",
    "distribution": "debian",
    "release": "12",
    "codename": "bookworm",
    "kernel": "6.1.0-31-amd64",
    "arch": "x86_64",
    "glibc": "2.36",
    "python": "3.11.2",
    "memory": 33_000_000_000,
    "machine_id": "0" * 31 + "1",
    "interface": "eno1",
    "links": [
        {"name": "eno1", "mac": "3c:7c:3f:00:00:01", "mtu": 1500, "speed": 1000, "duplex": "full",
         "wireless": False, "tunnel": False, "physical": True,
         "addresses": ["192.168.56.111"], "networks": ["192.168.56.111/24"]}
    ],
    "ufw_conf": "",
    "clock": 1000.0,
    "toolkits": {},
    "disks": {
        folder: {"free": 9e10, "free_inodes": 5e6, "read_only": False, "device": 1}
        for folder in ("/opt/tandem", "/var/tmp")
    },
}  # fmt: skip

QUESTION = {
    "address": "192.168.56.111",
    "listed": ["192.168.56.111", "192.168.56.122"],
    "space": [
        {"folder": "/opt/tandem", "bytes": 6_000_000_000},
        {"folder": "/var/tmp", "bytes": 3_500_000_000},
    ],
    "provisioned": False,
    "env_manager": "auto",
    "conda_installer": "",
    "offline": False,
    "stack": "auto",
    "kept": {},
    "driver": driver.driver_wanted({}, []),
    "toolkit": "auto",
    "table": TABLE,
    "clock": [999.0, 1001.0],
    "clock_tolerance": CLOCK_TOLERANCE,
    "ansible_core": "2.19.5",
    "users": {"provisions": "tandem-admin", "trains": "tandem", "there": True},
}

# release: (distribution, release, kernel, glibc, python), as installed.
RELEASES = {
    "debian11": ("debian", "11", "5.10.0-34-amd64", "2.31", "3.9.2"),
    "debian12": ("debian", "12", "6.1.0-31-amd64", "2.36", "3.11.2"),
    "debian13": ("debian", "13", "6.12.48-amd64", "2.41", "3.13.5"),
    "ubuntu1804": ("ubuntu", "18.04", "4.15.0-213-generic", "2.27", "3.6.9"),
    "ubuntu1804hwe": ("ubuntu", "18.04", "5.4.0-150-generic", "2.27", "3.6.9"),
    "ubuntu2004": ("ubuntu", "20.04", "5.15.0-139-generic", "2.31", "3.8.10"),
    "ubuntu2204": ("ubuntu", "22.04", "6.8.0-60-generic", "2.35", "3.10.12"),
    "ubuntu2404": ("ubuntu", "24.04", "6.8.0-60-generic", "2.39", "3.12.3"),
}


TOOLS = {"dkms": "3.0.10-8", "gcc": "4:12.2.0-3", "make": "4.3-4.1", "openssl": "3.0.17-1"}
# What driver_facts adds on a machine with a card: no driver of packages or by the installer.
NO_DRIVER = {
    **{name: {} for name in ("packages", "transitional", "offered_transitional", "prebuilt")},
    **{name: [] for name in ("held", "held_by_us", "displays", "seated", "gpu_processes")},
    **dict.fromkeys(("kernel_series", "runfile", "module", "kernel_compiler", "waiting_kernel")),
    **dict.fromkeys(("waiting_module", "signing_key", "display_manager")),
    **dict.fromkeys(("pending", "display_manager_active"), False),
    "uninstallable": {},
    "dkms": True,
    "free": dict.fromkeys(driver.REQUIRED_BYTES, 9e10),
}


def machine(release="debian12", cards=(), **changes):
    """A healthy machine of a release, with NVIDIA cards by device number and changed facts."""
    made = copy.deepcopy(HEALTHY)
    names = ("distribution", "release", "kernel", "glibc", "python")
    made.update(zip(names, RELEASES[release]))
    made["gpus"] = [{"vendor": "10de", "device": card} for card in cards]
    if cards:
        made.update(copy.deepcopy(NO_DRIVER), driver="580.126.20", driver_library="580.126.20")
        made["offered"] = TOOLS | {f"linux-headers-{made['kernel']}": "1"}
    made.update(changes)
    return made


def load(path):
    """Loads a Python file from ansible/, which is not a package."""
    folder = (ROOT / path).parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # behind the packages: the filters' file is called as one is
    name = f"{folder.name}_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def parsed(path):
    """A file of plays or tasks, by the quick loader."""
    return yaml.load(path.read_text(), yaml.CSafeLoader)


def tasks_of(rows):
    """Tasks of a file or of its plays, those in blocks too."""
    for row in rows or []:
        for part in ("block", "rescue", "always", "pre_tasks", "tasks", "post_tasks", "handlers"):
            yield from tasks_of(row.get(part))
        yield row


def ansible_playbook(folder, plays, *words, inventory="localhost,", **environment):
    """Ansible's end: it plays `plays`, or their text, on machines that are this one."""
    text = plays if isinstance(plays, str) else yaml.safe_dump(plays)
    (folder / "book.yml").write_text(text)
    if isinstance(inventory, dict):
        (folder / "hosts.yml").write_text(yaml.safe_dump({"cluster": {"hosts": inventory}}))
        inventory = folder / "hosts.yml"
    argv = [Path(sys.executable).with_name("ansible-playbook"), "--connection", "local", *words]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), **environment}
    argv += ["--inventory", inventory, folder / "book.yml"]
    return subprocess.run(argv, capture_output=True, text=True, env=environment, cwd=folder)


def played(folder, plays, code=0, inventory="localhost,", **environment):
    """What Ansible prints of them, on one line, when it ends with `code`."""
    done = ansible_playbook(folder, plays, inventory=inventory, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def stand_in(folder, **programs):
    """Writes programs, shell scripts; returns a PATH on which they come first."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def reviewed(name, made):
    """{case: text} is what the file says, which is written as `make snapshots` writes others:
    TANDEM_SNAPSHOTS=write python -m pytest tests/unit/ansible -k reviewed"""
    path = Path(__file__).parent / name
    text = "".join(f"== {case}\n{lines}\n\n" for case, lines in made.items())
    if os.environ.get("TANDEM_SNAPSHOTS") == "write":
        path.write_text(text)
    assert path.read_text() == text, "read the difference, then write it anew"
