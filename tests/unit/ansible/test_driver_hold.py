"""Role driver's own tasks where an installation breaks off; dpkg is real, its state a folder."""

import json
import os
import shutil
import subprocess

import pytest
import yaml

from tests.unit.ansible.provision_machines import ROOT, ansible_playbook

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
    **{"kernel_series": None, "dkms": True, "release": "12"},
    **{"held": [], "transitional": {}, "displays": [], "driver_library": OLD, "driver": OLD},
    "packages": {name: version for name, (status, version) in INSTALLED.items()
                 if status.endswith("ok installed")},
}  # fmt: skip
PLANNED = {"action": "package", "version": "535.300.01", "without": "", "screen": False}
ACT = [{"ansible.builtin.include_role": {"name": "driver", "tasks_from": "act"}}]
BROKEN = """\
- ansible.builtin.include_tasks: release.yml
- name: Nothing is held now
  ansible.builtin.command: dpkg --get-selections
  register: selections
  failed_when: "'hold' in selections.stdout"
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
    (role / "tasks/prepare.yml").write_text("---\n[]\n")
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
    return tmp_path


@pytest.mark.long  # what is held again is decided in planning: test_driver_result.py
def test_what_an_installation_let_go_is_held_again_where_it_breaks_off(machine):
    settings = {"driver_folder": "records", "driver_pin": "pin", "driver_unattended": "unattended"}
    settings = {name: str(machine / file) for name, file in settings.items()}
    there = {"DPKG_ADMINDIR": str(machine / "dpkg")}
    variables = {"driver_planned": PLANNED, "driver_state": FACTS}
    variables["preflight_stack"] = {"name": "cu102"}
    play = {"hosts": "localhost", "gather_facts": False, "vars": variables, "tasks": ACT}
    words = ("-e", json.dumps(settings))
    there["ANSIBLE_ROLES_PATH"] = str(machine / "roles")
    done = ansible_playbook(machine, [play], *words, **there)
    assert done.returncode == 2 and "No space left on device" in done.stdout, done.stdout
    words = ["dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}${Package}\n"]
    shown = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **there})
    held = {line[3:] for line in shown.stdout.splitlines() if line.startswith("h")}
    assert held == {"nvidia-kernel-dkms", "libnvidia-ml1", "nvidia-smi", "linux-image-amd64"}
    pin = f"Package: libnvidia-ml1 nvidia-kernel-dkms\nPin: version {OLD}-1\n"
    assert pin in (machine / "pin").read_text()
    kept = (machine / "records/held").read_text().split()
    assert {"nvidia-smi", "linux-image-amd64"} <= set(kept)
