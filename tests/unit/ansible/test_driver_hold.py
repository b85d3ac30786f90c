"""Role driver's own tasks where an installation breaks off; dpkg is real, its state a folder."""

import json
import os
import shutil
import subprocess

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


def test_what_an_installation_let_go_is_held_again_where_it_breaks_off(tmp_path):
    role, state, records = (tmp_path / name for name in ("roles/driver", "dpkg", "records"))
    shutil.copytree(ROLE, role)
    facts = {"packages": {name: version for name, (status, version) in INSTALLED.items()
                          if status.endswith("ok installed")},
             "held": [], "transitional": {}, "displays": [],
             "driver_library": OLD, "driver": OLD}  # fmt: skip
    (role / "tasks/facts.yml").write_text(
        yaml.safe_dump([{"ansible.builtin.set_fact": {"driver_state": facts}}])
    )
    (role / "tasks/nouveau.yml").write_text("---\n[]\n")
    (role / "tasks/install.yml").write_text(BROKEN)
    for folder in (state / "info", state / "updates", records):
        folder.mkdir(parents=True)
    (state / "status").write_text("".join(
        f"Package: {name}\nStatus: {status}\nVersion: {version}\nArchitecture: all\n"
        "Maintainer: T\nDescription: stand-in\n\n"
        for name, (status, version) in INSTALLED.items()
    ))  # fmt: skip
    ours = sorted(INSTALLED.keys() - {"nvidia-container-toolkit"})
    (records / "held").write_text("\n".join(ours) + "\n")
    variables = {
        "driver_folder": str(records),
        "driver_pin": str(tmp_path / "pin"),
        "driver_unattended": str(tmp_path / "unattended"),
    }
    planned = {"action": "package", "version": "535.300.01", "stop": "", "sessions": []}
    (tmp_path / "play.yml").write_text(
        PLAY + f"  vars: {json.dumps({'driver_planned': planned, 'driver_state': facts})}\n"
    )
    argv = ["ansible-playbook", "-v", "-i", "localhost,", str(tmp_path / "play.yml")]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(tmp_path / "roles"),
        "DPKG_ADMINDIR": str(state),
    }
    done = subprocess.run(
        [*argv, "-e", json.dumps(variables)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2 and "No space left on device" in done.stdout, done.stdout
    before = done.stdout.partition("See what is held now")[2].partition("TASK")[0]
    assert "linux-image-amd64" in before and "hold" not in before.replace("is held", "")
    there = ("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}${Package}\n")
    lines = subprocess.run(there, capture_output=True, text=True, env=environment).stdout.split(
        "\n"
    )
    assert {line[3:] for line in lines if line.startswith("h")} == {
        "nvidia-kernel-dkms", "libnvidia-ml1", "nvidia-smi", "linux-image-amd64"
    }  # fmt: skip
    assert (
        f"Package: libnvidia-ml1 nvidia-kernel-dkms\nPin: version {OLD}-1\n"
        in (tmp_path / "pin").read_text()
    )
    assert set((records / "held").read_text().split()) >= {"nvidia-smi", "linux-image-amd64"}
