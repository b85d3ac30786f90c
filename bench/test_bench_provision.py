"""What a second run of roles costs on 4 and on 16 machines, as shipped and with mitogen."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.site_plays import write_play

CHECKOUT = Path(__file__).resolve().parents[1]
MACHINES = 16
NAME = f"bench-{os.getpid()}"
MITOGEN = "mitogen==0.3.54"  # measured only: it is no part of the project
RESULTS = re.compile(r"^node\d+\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=0\s+failed=0", re.M)
# The part of site.yml that needs no bundle, no data and no minutes.
ROLES = ["preflight", "identity", "base", "clock", "sysstat"]


def lab(verb, *words, **variables):
    argv = [sys.executable, "-m", "lab", verb, "--name", NAME, *words]
    environment = {**os.environ, **variables}
    process = subprocess.run(argv, cwd=CHECKOUT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def inventory(folder, count):
    """A file that lists the machines of the lab."""
    file = folder / "inventory.ini"
    hosts = "".join(f"node{n} ansible_host=192.168.56.{110 + n}\n" for n in range(1, count + 1))
    file.write_text(f"[cluster]\n{hosts}\n[cluster:vars]\nansible_user=tandem\n")
    return str(file)


def run(folder, count, **variables):
    """(wall seconds, task results, changes) of one run of the roles on the first machines."""
    argv = ["ansible-playbook", "--inventory", inventory(folder, MACHINES)]
    argv += ["--limit", f"cluster[0:{count - 1}]", "-e", "@group_vars/all.yml"]
    play = write_play(folder, ROLES, become=True)
    begin = time.monotonic()
    printed = lab("exec", "--", *argv, play, **variables)
    wall = time.monotonic() - begin
    rows = [[int(figure) for figure in row] for row in RESULTS.findall(printed)]
    assert len(rows) == count, printed
    return wall, sum(ok for ok, _ in rows), sum(changed for _, changed in rows)


def mitogen(folder):
    """The variables by which Ansible takes mitogen, fetched into a folder that goes afterwards."""
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), MITOGEN]
    subprocess.run(argv, check=True)
    plugins = folder / "ansible_mitogen/plugins/strategy"
    return {
        "PYTHONPATH": str(folder),
        "ANSIBLE_STRATEGY_PLUGINS": str(plugins),
        "ANSIBLE_STRATEGY": "mitogen_linear",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")
def test_a_second_run(figure, tmp_path):
    ways = {"as shipped": {}, "mitogen": mitogen(tmp_path / "mitogen")}
    try:
        lab("up", "--nodes", str(MACHINES), "--no-bundle")
        run(tmp_path, MACHINES)
        for way, variables in ways.items():
            walls = {}
            for count in (4, MACHINES):
                walls[count], results, changes = run(tmp_path, count, **variables)
                assert changes == 0
                figure(f"second run, {count} machines, {way}", walls[count], "s")
                each = 1000 * walls[count] / results
                figure(f"a task on a machine, {count} machines, {way}", each, "ms")
            aim = "3" if way == "as shipped" else ""
            figure(f"16 machines over 4, {way}", walls[MACHINES] / walls[4], "", aim)
    finally:
        lab("down")
