"""Reads the files of a run as untrusted text from machines, possibly cut off or hostile.

Nothing found in a file makes reading fail: a value of the wrong type counts as absent, a line that
does not parse is skipped, and what is not a regular file is not opened.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

# A JSON object from a machine: a field may be absent, or of any type.
Entry = dict[str, Any]

LARGEST = 1e18  # no counter of bytes is larger
LONGEST = 1e10  # seconds
LARGEST_FILE = 4 << 30  # bytes
LONGEST_LINE = 1 << 20  # characters; what follows them counts as a line that does not parse


def number(value: object) -> float | None:
    """The value when it is a number that can occur in a file of a run, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) and abs(value) < LARGEST else None


def time_of(value: object) -> float | None:
    """The value when it can be seconds since boot, or a duration in seconds; else None."""
    value = number(value)
    return value if value is not None and 0 <= value < LONGEST else None


def dicts(value: object) -> list[Entry]:
    """The dictionaries in a list; empty when the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def parse(text: str) -> Any:
    """A JSON value; NaN and Infinity, which JSON does not have, become null. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_record(path: Path) -> TextIO:
    """Opens a regular file of at most LARGEST_FILE bytes for reading. Raises OSError for a link, a
    FIFO (opening it would block) or a device (which may have no end)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST_FILE:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file, or too large", str(path))
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def found_in(nodes: Path, pattern: str) -> list[Path]:
    """The files nodes/<host>/<pattern> in order; a name that cannot be decoded is no host's."""
    return by_host(path for path in nodes.glob(f"*/{pattern}") if str(path).isprintable())


def read_object(path: Path, missing: list[str]) -> Entry:
    """A JSON object. When it cannot be read, {} and a new sentence in `missing`."""
    try:
        with open_record(path) as file:
            value = parse(file.read())
    except FileNotFoundError:
        missing.append(f"{path.name} is missing.")
        return {}
    except (OSError, ValueError):
        missing.append(f"{'/'.join(path.parts[-2:])} cannot be read as JSON.")
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> Iterator[Entry]:
    """Yields the JSON objects of a JSON Lines file; lines that do not parse are skipped."""
    try:
        with open_record(path) as file:
            while line := file.readline(LONGEST_LINE):
                try:
                    value = parse(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value
    except OSError:
        return


def natural(name: str) -> list[str | int]:
    """A key that sorts node9 before node10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def by_host(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural(path.parent.name))
