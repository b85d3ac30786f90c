"""Loads known_errors.txt, a table of errors that are known by what a process prints, and lists what
signals mean. failures.py makes kinds of failure of both."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


# A script has neither the trainer's options nor its checkpoints, so it may need another remedy.
class KnownError(NamedTuple):
    """Holds a line of the table."""

    pattern: str
    meaning: str
    remedy: str
    general_remedy: str | None = None  # for a program with options of its own


_TABLE = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
KNOWN_ERRORS = tuple(
    KnownError(*line.split(" | ")) for line in _TABLE.splitlines() if not line.startswith("#")
)

# {name: (meaning, remedy)}
SIGNALS = {
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
