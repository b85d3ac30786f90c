"""The records of a run: files of nodes/<host>/ that grow by whole lines (docs/run-directory.md)."""

import re
from typing import Iterable, List

# Of a rank's time, in the order of a step. A rank is in one of them at each moment.
CATEGORIES = (
    "start_stop",
    "data",
    "h2d",
    "forward",
    "backward",
    "sync_exposed",
    "optimizer",
    "evaluate",
    "checkpoint",
    "other",
)
# Newer torch begins each line of a rank's traceback with its rank.
RANK = re.compile(r"^\[rank\d+\]:\s?")
PIECE = 1 << 15  # bytes of a file that a guard sends at once (launcher/node/records.py)


def machine(attempt: int) -> str:
    """What a guard records of its machine."""
    return f"machine.{attempt}.jsonl"


def steps(rank: int, attempt: int) -> str:
    """What a rank records of its steps."""
    return f"rank{rank}.{attempt}.steps.jsonl"


def names(attempt: int, ranks: Iterable[int]) -> List[str]:
    """All files of a node in an attempt in which it has these ranks."""
    return [machine(attempt), *(steps(rank, attempt) for rank in ranks)]
