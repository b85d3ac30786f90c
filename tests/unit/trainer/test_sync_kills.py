"""A rank that dies in the middle of an exchange: the others end too, and soon."""

import os
import re
import signal

import pytest

from tandem.sync import carrier
from tests.trainer_ranks import start_ranks, trainer

try:
    from launcher.watch.failures import PEER_LOST
except ImportError:  # a machine that has the trainer alone (tests/lab/test_legacy.py)
    PEER_LOST = re.compile("")

PER_CLASS = 18

SPECS = ("ef:5", "ef:3", "fp16")
ARGV = [
    "--model", "tests.trainer_models:normed", "--precision", "fp32", "--augment", "none",
    "--per_node_batch_size", 8, "--workers", 0, "--epochs", 9, "--sync_warmup", 0,
    "--timeout", 20,
]  # fmt: skip
HANG = 300  # seconds after which nobody would believe that the rank still ends


def dying(victim, turn, *argv):
    """The trainer; rank `victim` is killed before it sends for the `turn`th time."""
    if os.environ["RANK"] == str(victim):
        left = [turn]
        for name in ("isend", "all_reduce"):
            real = getattr(carrier.dist, name)

            def counted(*args, real=real, **words):
                if words.get("group") is not None:  # an exchange's, not another part's
                    left[0] -= 1
                    if left[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **words)

            setattr(carrier.dist, name, counted)
    return trainer(*argv)


def end_of(child, pipe):
    """How a rank ended: "killed", its exit code or its traceback. AssertionError if it hangs."""
    try:
        assert pipe.poll(HANG), "a rank hangs"
        _, value = pipe.recv()
        return value
    except EOFError:
        return "killed"
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize(
    "trial", [pytest.param(n, marks=[pytest.mark.long] if n else []) for n in range(20)]
)
def test_a_kill_in_the_middle_of_an_exchange_leaves_no_hang(images, trial):
    # (the first time is the meeting before the run)
    spec, victim, turn = SPECS[trial % len(SPECS)], trial % 3, 2 + trial
    argv = ["--data", images, "--sync", spec, *ARGV]
    started = start_ranks([1, 1, 1], dying, victim, turn, *argv, quiet=True)
    ends = [end_of(*one) for one in started]
    assert ends[victim] == "killed"
    others = [end for rank, end in enumerate(ends) if rank != victim]
    # What a survivor says is no cause to the launcher, and blames nobody else.
    assert all(PEER_LOST.search(end) if isinstance(end, str) else end != 0 for end in others), ends
