"""Errors whose text is meant for the user, and the exit codes that say more than "failed"."""

import sys

from .place import Place

# For whatever starts the trainer (docs/run-directory.md): the launcher acts on them.
BAD_INPUT = 2
STOPPED = 75  # on request, after saving
OUT_OF_MEMORY = 76  # of the device: smaller micro-batches may fit
UNTRIED = 69  # a model needs a package that is not here (python -m trainer.models)
DIVERGED = 77  # the loss or the weights are no finite numbers any more
DATA_LOST = 78  # the disk or file server of the images fails: it may be well again later
INTERRUPTED = 130  # by Ctrl-C, as a shell reports it


class UserError(Exception):
    """Bad input: one sentence naming the thing, the cause and the remedy."""

    code = BAD_INPUT


class RankError(UserError):
    """Bad input that only this rank has found; its peers only see a lost connection."""


class DataLost(RankError):
    """The images cannot be read any more, and no image is at fault."""

    code = DATA_LOST


class Diverged(UserError):
    """The run's numbers are not finite any more; all ranks know it."""

    code = DIVERGED


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`, `3 classes`, `50,000 images`: for what a user reads, in any room."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("s") else "s")


def explain(error: UserError, here: Place) -> int:
    """Print the error, once per node if all ranks know it, and once per run if it concerns no
    machine; returns the exit code."""
    first = (here.rank if isinstance(error, Diverged) else here.local_rank) == 0
    if first or isinstance(error, RankError):
        print(f"trainer: {error}", file=sys.stderr)
    return error.code
