"""Errors whose sentence is meant for the user."""

import sys


class UserError(Exception):
    """Bad input: one sentence naming the thing, the cause and the remedy. Exit code 2."""


class RankError(UserError):
    """Bad input that this rank alone has met; its peers only lose a connection."""


def tell(error: UserError, local_rank: int) -> int:
    """Print the sentence, once per node where all ranks know it; returns the exit code."""
    if local_rank == 0 or isinstance(error, RankError):
        print(f"trainer: {error}", file=sys.stderr)
    return 2
