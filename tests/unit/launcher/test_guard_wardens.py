"""Without systemd too, nothing of the run stays alive, whatever is killed."""

import os
import signal
import sys
import time
from itertools import combinations
from pathlib import Path

import pytest

from tests.unit.launcher.guard_client import (
    DEAF_WORKER,
    LAUNCH,
    Client,
    alive,
    kill,
    lives,
    wait_until_gone,
)

pytestmark = pytest.mark.skipif(
    Path("/run/systemd/system").is_dir(), reason="this machine runs systemd: see tests/lab"
)


class Tree:
    """A guard with all processes below it, by the name of their part."""

    def __init__(self, guard, tmp_path, mark):
        name, _, value = mark.partition("=")
        argv = [sys.executable, LAUNCH, "1", DEAF_WORKER]
        guard.start(tmp_path, argv, env={name: value, "DEAF": "1"}, beat=0.2, fail_grace=0.5)
        guard.wait_for_output(b"child")
        self.guard, self.mark = guard, mark
        self.pids = {
            "outer warden": guard.process.pid,
            "guard": guard.wait_for("hello")["pid"],
            "launch": guard.wait_for("started")["pid"],
            "worker": guard.wait_for("worker")["pid"],
            "child": int(guard.output[0, "stdout"].split()[1]),
        }
        self.pids["inner warden"] = parent_of(self.pids["guard"])
        self.pids["supervisor"] = parent_of(self.pids["worker"])
        assert parent_of(self.pids["inner warden"]) == self.pids["outer warden"]
        assert len(alive(mark)) == 4  # launch, supervisor, worker, child

    def left(self, seconds):
        """Processes of the run, and of the three that guard it, that outlive `seconds`."""
        limit = time.monotonic() + seconds
        rest = wait_until_gone(self.mark, seconds)
        while time.monotonic() < limit and any(lives(self.pids[name]) for name in KEEPERS):
            time.sleep(0.02)
        return rest + [name for name in KEEPERS if lives(self.pids[name])]


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def tree(guards, tmp_path, mark):
    return Tree(guards(), tmp_path, mark)


KEEPERS = ["outer warden", "inner warden", "guard"]


@pytest.mark.parametrize("victim", KEEPERS)
def test_one_is_killed(tree, victim):
    kill(tree.pids[victim])
    assert tree.left(10) == []


@pytest.mark.parametrize("victims", list(combinations(KEEPERS, 2)), ids=" then ".join)
def test_two_are_killed_in_a_row(tree, victims):
    for victim in victims:
        kill(tree.pids[victim])
    assert tree.left(10) == []


def test_all_that_guards_is_killed_at_once(tree):
    """Launch, supervisor and worker die with their parents; a worker's children are not covered."""
    kill(tree.pids["child"])
    for keeper in KEEPERS:
        os.kill(tree.pids[keeper], signal.SIGSTOP)  # so that none can act in between
    for keeper in KEEPERS:
        kill(tree.pids[keeper])
    assert tree.left(10) == []


@pytest.mark.parametrize("victim", ["supervisor", "worker"])
def test_a_worker_that_is_killed_is_named_although_launch_waits(tree, victim):
    """Launch takes seconds to notice; a peer that only lost this worker would seem to be first."""
    os.kill(tree.pids["launch"], signal.SIGSTOP)
    kill(tree.pids[victim])
    told = tree.guard.wait_for("worker_exit")
    assert (told["rank"], told["signal"], told["first"]) == (0, "SIGKILL", True)
    assert tree.guard.wait_for("exit")["reason"] == "failed"
    assert tree.left(10) == []


def test_a_launch_that_is_killed_is_named_and_no_worker_of_it(tree):
    kill(tree.pids["launch"])
    end = tree.guard.wait_for("exit")
    assert (end["reason"], end["signal"]) == ("failed", "SIGKILL")
    assert not [one for one in tree.guard.frames if one["type"] == "worker_exit"]
    assert tree.left(10) == []


def test_the_control_side_is_killed_with_its_process_group(tmp_path, mark):
    """As `kill -9 -- -PGID` of a control side does with guards of local nodes."""
    read, write = os.pipe()
    control = os.fork()
    if control == 0:
        os.setsid()
        tree = Tree(Client(), tmp_path, mark)
        os.write(write, str(tree.pids["guard"]).encode())
        time.sleep(600)
    os.close(write)
    guard = int(os.read(read, 100))
    os.killpg(control, signal.SIGKILL)
    os.waitpid(control, 0)
    assert wait_until_gone(mark, 10) == []
    limit = time.monotonic() + 10
    while lives(guard) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not lives(guard)


def test_ctrl_c_at_the_terminal_does_not_reach_the_run(tree):
    os.kill(tree.pids["outer warden"], signal.SIGINT)
    os.kill(tree.pids["outer warden"], signal.SIGHUP)
    tree.guard.send(type="lease")
    beats = len([f for f in tree.guard.frames if f["type"] == "beat"])
    while len([f for f in tree.guard.frames if f["type"] == "beat"]) < beats + 2:
        tree.guard.pump(2)
    assert lives(tree.pids["worker"])
