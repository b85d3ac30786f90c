"""`or_undo`: what it started is undone whatever ends it."""

import os
import signal

import pytest

from lab import life
from lab.plan import LabError


def nothing():
    pass


@pytest.fixture
def undone(tmp_path):
    return tmp_path / "undone"


def test_success_is_kept(undone):
    life.or_undo(nothing, nothing, undone.touch)
    assert not undone.exists()


def test_what_could_not_be_reserved_is_not_undone(undone):
    def taken():
        raise LabError("taken")

    with pytest.raises(LabError, match="taken"):
        life.or_undo(taken, undone.with_name("acted").touch, undone.touch)
    assert not undone.exists()
    assert not undone.with_name("acted").exists()


def test_an_exception_arrives_after_the_undoing(undone):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        life.or_undo(nothing, fail, undone.touch)
    assert undone.exists()


@pytest.mark.parametrize(
    ("kill", "number"),
    [
        (os.kill, signal.SIGTERM),
        (os.killpg, signal.SIGKILL),  # as kill -9 -GROUP, which takes the shell's whole job
    ],
)
def test_a_process_that_is_killed_is_undone(undone, kill, number):
    """Waits for the watcher: both hold the pipe, which ends only after the watcher has."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    victim = os.fork()
    if victim == 0:
        os.setpgid(0, 0)
        os.close(reading)
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        life.or_undo(nothing, lambda: kill(os.getpid(), number), undone.touch)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b""
    assert os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) == -number
    assert undone.exists()
