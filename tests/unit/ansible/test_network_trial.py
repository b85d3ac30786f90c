"""The scripts that a machine runs by itself: a trial, and its rollback."""

import shlex
import subprocess
from pathlib import PurePath

import jinja2
import pytest

from tests.unit.ansible.provision_machines import ROOT

TEMPLATES = ROOT / "ansible/roles/network/templates"
PLACE = "/var/lib/tandem/network"


@pytest.fixture
def machine(tmp_path):
    """A folder that stands for a machine: its network files, its programs, what the role copied."""
    for name in ("etc/netplan", "bin", f".{PLACE}/new"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/netplan/01-lan.yaml").write_text("as it was")
    (tmp_path / "etc/netplan/90-tandem.yaml").write_text("ours of an earlier run")
    (tmp_path / f".{PLACE}/new/1").write_text("new")
    (tmp_path / f".{PLACE}/new/2").write_text("drop-in")
    (tmp_path / "bin/systemctl").write_text("#!/bin/sh\n")
    (tmp_path / "bin/systemctl").chmod(0o755)
    return tmp_path


def run(machine, script: str) -> None:
    """Runs a script of the role as if `machine` were all there is."""
    network = {
        "files": {
            f"{machine}/etc/netplan/90-tandem.yaml": {"mode": "0600"},
            f"{machine}/etc/network/eth0.network.d/tandem.conf": {"mode": "0644"},
        },
        "aside": [f"{machine}/etc/netplan/01-lan.yaml"],
        "apply": [f"touch {machine}/applied"],
        "back": [f"rm {machine}/applied"],
    }
    words = jinja2.Environment(trim_blocks=True, autoescape=False)
    words.filters |= {"quote": shlex.quote, "dirname": lambda path: str(PurePath(path).parent)}
    text = words.from_string((TEMPLATES / f"{script}.sh.j2").read_text()).render(
        network_planned=network, ansible_managed="by a test"
    )
    text = text.replace(PLACE, f"{machine}{PLACE}")
    path = f"{machine}/bin:/usr/bin:/bin"
    done = subprocess.run(["sh", "-c", text], env={"PATH": path}, capture_output=True, text=True)
    log = machine / f".{PLACE}/trial.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")


def files(machine) -> dict[str, str]:
    found = (path for path in (machine / "etc").rglob("*") if path.is_file())
    return {str(path.relative_to(machine)): path.read_text() for path in found}


def test_a_trial_sets_all_and_the_way_back_puts_all_back(machine):
    before = files(machine)
    run(machine, "trial")
    assert files(machine) == {
        "etc/netplan/90-tandem.yaml": "new",
        "etc/network/eth0.network.d/tandem.conf": "drop-in",
    }
    assert (machine / "applied").exists()
    run(machine, "rollback")
    assert files(machine) == before
    assert not (machine / "applied").exists()
    assert not (machine / "etc/network/eth0.network.d").exists()


def test_once_decided_nothing_is_put_back(machine):
    run(machine, "trial")
    (machine / f".{PLACE}/pending").rename(machine / f".{PLACE}/decided")
    after = files(machine)
    run(machine, "rollback")
    assert files(machine) == after
