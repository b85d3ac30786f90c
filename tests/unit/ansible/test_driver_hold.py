"""Role driver's own tasks where an installation breaks off; dpkg is real, its state a folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.ansible.provision_machines import ROOT

ROLE = ROOT / "ansible/roles/driver"
OLD = "535.261.03"
# What the role held: the driver, of which a part has moved since, and what is gone by now.
INSTALLED = {
    "nvidia-kernel-dkms": ("hold ok installed", f"{OLD}-1"),
    "libnvidia-ml1": ("hold ok installed", f"{OLD}-1"),
    "nvidia-smi": ("hold ok half-configured", "535.300.01-1"),
    "linux-image-amd64": ("hold ok installed", "6.1.1-1"),
    "firmware-nvidia-gsp": ("deinstall ok config-files", f"{OLD}-1"),
    "nvidia-container-toolkit": ("install ok installed", "1.17.4-1"),
}
FACTS = {
    **{"held": [], "transitional": {}, "displays": [], "driver_library": OLD, "driver": OLD},
    "packages": {name: version for name, (status, version) in INSTALLED.items()
                 if status.endswith("ok installed")},
}  # fmt: skip
PLANNED = {"action": "package", "version": "535.300.01", "stop": "", "sessions": []}
PLAY = """\
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: driver, tasks_from: act}
"""
BROKEN = """\
- ansible.builtin.include_tasks: release.yml
- name: See what is held now
  ansible.builtin.command: dpkg --get-selections
- ansible.builtin.fail: {msg: "No space left on device"}
"""


@pytest.fixture
def machine(tmp_path):
    """Its folder: the role with a stand-in for what it asks and for what breaks off, dpkg's state,
    and the list of what the role held."""
    role, state, records = (tmp_path / name for name in ("roles/driver", "dpkg", "records"))
    shutil.copytree(ROLE, role)
    asked = [{"ansible.builtin.set_fact": {"driver_state": FACTS}}]
    (role / "tasks/facts.yml").write_text(yaml.safe_dump(asked))
    (role / "tasks/nouveau.yml").write_text("---\n[]\n")
    (role / "tasks/install.yml").write_text(BROKEN)
    for folder in (state / "info", state / "updates", records):
        folder.mkdir(parents=True)
    entry = (
        "Package: {}\nStatus: {}\nVersion: {}\nArchitecture: all\n"
        "Maintainer: T\nDescription: stand-in\n\n"
    )
    every = [entry.format(name, *of) for name, of in INSTALLED.items()]
    (state / "status").write_text("".join(every))
    ours = sorted(INSTALLED.keys() - {"nvidia-container-toolkit"})
    (records / "held").write_text("\n".join(ours) + "\n")
    variables = {"driver_planned": PLANNED, "driver_state": FACTS}
    (tmp_path / "play.yml").write_text(PLAY + f"  vars: {json.dumps(variables)}\n")
    return tmp_path


def run(machine, *argv):
    """A program that sees the dpkg of this machine, and its output."""
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(machine / "roles"),
        "DPKG_ADMINDIR": str(machine / "dpkg"),
    }
    return subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)


def test_what_an_installation_let_go_is_held_again_where_it_breaks_off(machine):
    settings = {
        "driver_folder": str(machine / "records"),
        "driver_pin": str(machine / "pin"),
        "driver_unattended": str(machine / "unattended"),
    }
    words = ("-v", "-i", "localhost,", str(machine / "play.yml"), "-e", json.dumps(settings))
    done = run(machine, Path(sys.executable).with_name("ansible-playbook"), *words)
    assert done.returncode == 2 and "No space left on device" in done.stdout, done.stdout
    before = done.stdout.partition("See what is held now")[2].partition("TASK")[0]
    assert "linux-image-amd64" in before and "hold" not in before.replace("is held", "")
    lines = run(machine, "dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}${Package}\n")
    held = {line[3:] for line in lines.stdout.splitlines() if line.startswith("h")}
    assert held == {"nvidia-kernel-dkms", "libnvidia-ml1", "nvidia-smi", "linux-image-amd64"}
    pin = f"Package: libnvidia-ml1 nvidia-kernel-dkms\nPin: version {OLD}-1\n"
    assert pin in (machine / "pin").read_text()
    kept = (machine / "records/held").read_text().split()
    assert {"nvidia-smi", "linux-image-amd64"} <= set(kept)
