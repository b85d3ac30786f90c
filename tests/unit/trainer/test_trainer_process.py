"""How a process of the trainer ends: its words first, at once, and all of --spawn together."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.trainer_ranks import free_port
from trainer import process

FORK = multiprocessing.get_context("fork")

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


QUICK = """
import runpy, sys
try:
    runpy.run_module("trainer", run_name="__main__")
except SystemExit as end:
    print("torch" in sys.modules, end.code)
"""


@pytest.mark.parametrize(
    ("word", "code", "said"),
    [("--help", 0, "--epochs"), ("--epoch=3", 2, "trainer: unknown option --epoch")],
)
def test_help_and_refused_options_do_not_wait_for_torch(word, code, said):
    command = [sys.executable, "-c", QUICK, word]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.stdout.splitlines()[-1] == f"False {code}"
    assert said in made.stdout + made.stderr


FAILING = """
import sys
from unittest import mock
from trainer import __main__ as program

def broken(options, world):
    raise ValueError("broken on purpose")

if __name__ == "__main__":
    with mock.patch("trainer.process.Run", broken):
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


def leaving(code, after):
    time.sleep(after)
    os._exit(code)


def hanging(number=None):
    if number:
        os.kill(os.getpid(), number)
    time.sleep(1000)


def first(*works):
    """Of --spawn's ranks that do so: the exit code, and each rank's own."""
    ranks = [FORK.Process(target=work, args=args) for work, *args in works]
    for rank in ranks:
        rank.start()
    code = process.first_failure(ranks)
    return code, [rank.exitcode for rank in ranks]


def test_the_first_failure_ends_the_ranks_that_wait_for_it(monkeypatch):
    """mp.spawn asks them to leave, and waits for ever where they are in a collective."""
    monkeypatch.setattr(process, "GRACE", 0.3)
    assert first((leaving, 0, 0), (leaving, 7, 0), (hanging,)) == (7, [0, 7, -9])


def test_a_rank_that_was_killed_is_told_as_a_shell_tells_it(monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.3)
    assert first((hanging, signal.SIGTERM), (hanging,)) == (143, [-15, -9])


def test_ranks_that_stop_together_are_left_alone():
    assert first((leaving, 75, 0), (leaving, 75, 0.1)) == (75, [75, 75])
    assert first((leaving, 0, 0), (leaving, 0, 0.1)) == (0, [0, 0])


def test_a_rank_that_hangs_at_its_end_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(process, "TEAR_DOWN", 0.3)
    assert first((leaving, 0, 0), (hanging,)) == (137, [0, -9])
