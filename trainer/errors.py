"""Errors whose text is meant for the user, and the exit codes that say more than "failed"."""

import sys

# For whatever starts the trainer (docs/run-directory.md): the launcher acts on them.
BAD_INPUT = 2
STOPPED = 75  # on request, after saving
OUT_OF_MEMORY = 76  # of the device: smaller micro-batches may fit
INTERRUPTED = 130  # by Ctrl-C, as a shell reports it


class UserError(Exception):
    """Bad input: one sentence naming the thing, the cause and the remedy."""


class RankError(UserError):
    """Bad input that only this rank has found; its peers only see a lost connection."""


def explain(error: UserError, local_rank: int) -> int:
    """Print the error, once per node if all ranks know it; returns the exit code."""
    if local_rank == 0 or isinstance(error, RankError):
        print(f"trainer: {error}", file=sys.stderr)
    return BAD_INPUT
