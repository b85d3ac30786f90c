"""The launcher's watch over real guards on three machines: what breaks is named, all ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.test_guard_orphans import copy_code
from tests.unit.launcher.guard_client import alive, kill, wait_until_gone

CHECKOUT = Path(__file__).resolve().parents[2]
NODES = 3


@pytest.fixture(scope="module")
def machines(start_lab):
    """Three machines with the guard's code."""
    lab = start_lab("watched", "--nodes", str(NODES), "--no-bundle")
    for node in range(1, NODES + 1):
        copy_code(lab, "tandem", f"192.168.56.{110 + node}")
    return lab


class Watched:
    """A run under the launcher's watch; `told` is its report of how it ended."""

    def __init__(self, lab, mark):
        self.mark = mark
        script = "tests/lab/watched_run.py"
        self.process = subprocess.Popen(
            lab.argv("exec", "--", sys.executable, script, str(NODES), mark),
            stdout=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
        )
        self.lines = []
        while sum("ready" in line for line in self.lines) < NODES:
            line = self.process.stdout.readline()
            assert line, self.lines
            self.lines.append(line)
        self.workers = {node: self.worker(node) for node in range(1, NODES + 1)}

    def worker(self, node):
        """The worker's pid, as this machine sees it, of a node."""
        for pid in alive(self.mark):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            environment = Path(f"/proc/{pid}/environ").read_text()
            mine = f"TANDEM_NODE=node{node}\0" in environment and "RANK=" in environment
            if mine and "supervisor" not in str(words) and not children_of_worker(pid):
                return pid
        raise AssertionError(f"no worker on node{node}")

    def controller(self):
        """The launcher's process below `lab exec`."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                if words[1:2] == ["tests/lab/watched_run.py"] and self.mark in words:
                    return int(entry.name)
        raise AssertionError("no controller")

    def told(self):
        self.lines += self.process.stdout.readlines()
        assert self.process.wait(10) == 0, self.lines
        return json.loads(self.lines[-1])


def children_of_worker(pid):
    """Whether this is the child that a worker forked: its parent is a worker, too."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{parent}/cmdline").read_bytes() == Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture
def run(machines):
    mark = f"TANDEM_TEST_MARK={os.urandom(16).hex()}"
    watched = Watched(machines, mark)
    yield watched
    for node in range(1, NODES + 1):
        machines("mend", str(node))
    watched.process.kill()
    watched.process.wait()
    for pid in alive(mark):
        kill(pid)


def test_a_worker_dies_and_the_run_ends_everywhere_within_5_seconds(run):
    begin = time.monotonic()
    kill(run.workers[2])
    told = run.told()
    assert told["over"] - begin < 5
    said = told["cause"].pop("said")
    assert re.match(r"node2, rank 1 was ended by SIGKILL after \d+ s: it was killed, by a p", said)
    cause = {"host": "node2", "kind": "worker", "rank": 1, "signal": "SIGKILL"}
    assert (told["status"], told["cause"], told["left"]) == ("failed", cause, [])
    assert wait_until_gone(run.mark, 0) == []


@pytest.mark.parametrize("fault", ["freeze", "kill"])
def test_a_node_that_is_gone_is_noticed_within_20_seconds(run, machines, fault):
    begin = time.monotonic()
    machines(fault, "3")
    told = run.told()
    assert told["over"] - begin < 20
    assert (told["status"], told["gone"]) == ("failed", ["node3"])
    assert told["cause"]["host"] == "node3"
    assert len(alive(run.mark)) == (4 if fault == "freeze" else 0)
    machines("mend", "3")
    assert wait_until_gone(run.mark, 5) == []


def test_a_stall_of_8_seconds_kills_nothing_and_stop_saves(run, machines):
    machines("cut", "1")
    time.sleep(8)
    machines("mend", "1")
    time.sleep(10)
    assert set(run.workers.values()) <= set(alive(run.mark))
    os.kill(run.controller(), signal.SIGINT)
    told = run.told()
    assert (told["status"], told["left"]) == ("stopped", [])
    assert sum("saved" in line for line in run.lines) == NODES
    assert wait_until_gone(run.mark, 0) == []


# As systemd-oomd does it: the mark by which systemd knows its kills, then SIGKILL to all.
STANDIN_OOMD = """
import os, pathlib
(group,) = pathlib.Path("/sys/fs/cgroup/user.slice").glob("**/tandem-watched-1-*.service")
print(os.getxattr(group, "user.oomd_omit").decode())
os.setxattr(group, "user.oomd_ooms", b"1")
os.setxattr(group, "user.oomd_kill", b"4")
(group / "cgroup.kill").write_text("1")
"""


def test_a_run_asks_oomd_to_spare_it_and_one_that_it_killed_is_named_so(run, machines):
    """systemd-oomd is a stand-in: the lab's machines have no limits on memory, which it needs."""
    assert machines.ssh(2, f"sudo python3 -c '{STANDIN_OOMD}'") == "1\n"
    told = run.told()
    cause = {"host": "node2", "kind": "guard", "rank": None, "signal": None}
    said = "node2: systemd-oomd ended the run there, since memory was short"
    assert (told["status"], told["cause"]) == ("failed", {**cause, "said": said})
    assert wait_until_gone(run.mark, 5) == []


def test_the_controller_is_killed(run):
    kill(run.controller())
    assert wait_until_gone(run.mark, 10) == []
