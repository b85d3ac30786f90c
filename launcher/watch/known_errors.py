"""Loads known_errors.txt, a table of errors that a process may print, and explains signals.

failures.py makes kinds of failure of both tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class KnownError(NamedTuple):
    """Holds a line of the table: `pattern | meaning | remedy`, or with ` | general remedy`."""

    pattern: str
    meaning: str
    remedy: str
    # For a user's script, which has neither the trainer's options nor its checkpoints.
    general_remedy: str | None = None


_TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
KNOWN_ERRORS = tuple(
    KnownError(*line.split(" | ")) for line in _TABLE.splitlines() if not line.startswith("#")
)

# {name: (meaning, remedy)}
SIGNAL_MEANINGS = {
    "SIGKILL": (
        "somebody killed it, or the kernel did because memory ran out",
        "search `journalctl -k` on that machine for `Out of memory`",
    ),
    "SIGSEGV": (
        "it crashed inside a library",
        "run again without loader processes; if it crashes again, test the machine's memory",
    ),
    "SIGBUS": (
        "shared memory was full, or a file that it had mapped is gone",
        "check /dev/shm and the data's disk",
    ),
    "SIGTERM": ("a person or a program on that machine ended it", "find out who"),
}
