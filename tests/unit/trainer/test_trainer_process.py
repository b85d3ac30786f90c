"""How a process of the trainer ends: its words first, at once, and all of --spawn together."""

import os
import subprocess
import sys
from types import SimpleNamespace

from tests.trainer_ranks import free_port
from trainer import process

HANGING = """
import os, sys
import torch.distributed as dist
from trainer import process

class Group:
    def __del__(self):
        print("tear-down")

process.dist.is_initialized = lambda: True
group = Group()
print("words")
process.leave(76)
"""


def test_nothing_is_torn_down_while_the_group_stands():
    """NCCL's tear-down waits for a collective, or the watchdog ends it with another code."""
    made = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True)
    assert (made.returncode, made.stdout) == (76, "words\n")


FAILING = """
import sys
from unittest import mock
from trainer import __main__ as program

def broken(options, world):
    raise ValueError("broken on purpose")

if __name__ == "__main__":
    with mock.patch("trainer.process.train", broken):
        program.run()
"""


def test_an_exception_is_said_last_and_the_code_is_1():
    env = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    made = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, env=env)
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1] == "ValueError: broken on purpose"


class Child:
    """A process of --spawn: failed, done, or waiting in a collective until it is killed."""

    def __init__(self, exitcode=None):
        self.exitcode, self.killed = exitcode, False

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        self.killed, self.exitcode = True, -9


def test_what_is_left_of_spawn_is_killed_once_one_has_failed(monkeypatch):
    slept = []
    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=slept.append))
    children = [Child(0), Child(1), Child()]
    process._end_all(children)
    assert slept == [process.GRACE]
    assert children[2].killed


def test_spawn_s_processes_that_finish_are_left_alone(monkeypatch):
    children = [Child(), Child(0)]

    def sleep(seconds):
        children[0].exitcode = 0

    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=sleep))
    process._end_all(children)
    assert not any(child.killed for child in children)
