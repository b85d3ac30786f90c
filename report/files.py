"""Reads the files of a run as untrusted text from machines, possibly cut off or hostile.

Nothing found in a file makes reading fail: a value of the wrong type counts as absent, a line that
does not parse is skipped, and what is not a regular file is not opened. What is kept of a file is
bounded: documents by their size, lines and reports by what is folded from them as they are read.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from boundary.run_files import MOST_RANKS

# A JSON object from a machine: a field may be absent, or of any type.
Entry = dict[str, Any]

LARGEST = 1e18  # no counter of bytes is larger
LONGEST = 1e10  # seconds
LARGEST_FILE = 4 << 30  # bytes of a file that is read line by line
LARGEST_DOCUMENT = 8 << 20  # bytes of one that is parsed as a whole, in up to 30 times the memory
LONGEST_LINE = 1 << 20  # characters; what follows them counts as a line that does not parse
LONGEST_TEXT = 4096  # characters of one text
MOST_FILES = 1 << 14  # of all hosts, one a rank and attempt


def number(value: Any) -> float | None:
    """The value when it is a number that can occur in a file of a run, else None."""
    if type(value) not in (int, float):  # nor True
        return None
    return value if -LARGEST < value < LARGEST else None  # false for NaN


def positive(value: object) -> float | None:
    figure = number(value)
    return figure if figure is not None and figure > 0 else None


def natural_number(value: object) -> int | None:
    figure = number(value)
    return int(figure) if figure is not None and figure >= 0 else None


def count(value: object, most: int = MOST_RANKS) -> int | None:
    """The value when it is a whole number from 1 to `most`, else None."""
    return value if type(value) is int and 0 < value <= most else None


def text(value: object) -> str | None:
    """The value when it is text, cut to LONGEST_TEXT; else None."""
    return value[:LONGEST_TEXT] if isinstance(value, str) else None


def time_of(value: object) -> float | None:
    """The value when it can be seconds since boot, or a duration in seconds; else None."""
    value = number(value)
    return value if value is not None and 0 <= value < LONGEST else None


def dicts(value: object) -> list[Entry]:
    """The dictionaries in a list; empty when the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def parse_integer(digits: str) -> int | None:
    """An integer of JSON. One of 400 digits is no number of ours, and no float could hold it."""
    return int(digits) if len(digits) < 20 else None


# NaN and Infinity, which JSON does not have, become null.
DECODER = json.JSONDecoder(parse_constant=lambda name: None, parse_int=parse_integer)


def parse(document: str) -> Any:
    """A JSON value. Raises ValueError."""
    try:
        return DECODER.decode(document)
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


def files_of_hosts(nodes: Path) -> dict[str, list[Path]]:
    """Host -> its records in nodes/<host>/, the first MOST_FILES in order; a name that cannot be
    decoded is no host's."""
    hosts: dict[str, list[Path]] = {}
    named = (path for path in nodes.glob("*/*.json*") if str(path).isprintable())
    for path in by_host(named)[:MOST_FILES]:
        hosts.setdefault(path.parent.name, []).append(path)
    return hosts


def read_object(path: Path, missing: list[str]) -> Entry:
    """A JSON object. When it cannot be read, {} and a new sentence in `missing`."""
    try:
        with open_record(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_DOCUMENT:
                missing.append(
                    f"{'/'.join(path.parts[-2:])} has {size >> 20} MiB; up to "
                    f"{LARGEST_DOCUMENT >> 20} are read, so it is left out."
                )
                return {}
            value = parse(file.read(size))
    except FileNotFoundError:
        missing.append(f"{path.name} is missing.")
        return {}
    except (OSError, ValueError):
        missing.append(f"{'/'.join(path.parts[-2:])} cannot be read as JSON.")
        return {}
    return value if isinstance(value, dict) else {}


def before_hole(file: BinaryIO, begin: int) -> tuple[int, int]:
    """Up to where a file has bytes of its own from there on, and its size. Nobody writes records
    with a hole: it is what a power cut leaves at the end, or an archive of few bytes as a file of
    any size."""
    descriptor = file.fileno()
    size, place = os.fstat(descriptor).st_size, os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        return (os.lseek(descriptor, begin, os.SEEK_HOLE) if begin < size else size), size
    except OSError:  # a file system that does not know
        return size, size
    finally:
        os.lseek(descriptor, place, os.SEEK_SET)


LAST = 1 << 16  # bytes at a file's end in which its last line is looked for


class Growing:
    """A file of JSON Lines, whose objects are read as they come. `bad`: how many whole lines held
    none."""

    def __init__(self, path: Path):
        self.path, self.bad = path, 0
        self._at = 0  # bytes that were read
        self._skip = False  # in the middle of a line that is too long
        self._hole = False  # what follows is none of its bytes

    def lines(self) -> Iterator[Entry]:
        """The objects of lines added since the last call; an unfinished line waits for the next."""
        try:
            with open_record(self.path) as text:
                file = text.buffer
                whole, size = before_hole(file, self._at)
                if whole < size and not self._hole:
                    self._hole, self.bad = True, self.bad + 1
                file.seek(self._at)
                while line := file.readline(min(LONGEST_LINE, whole - self._at)):
                    complete = line.endswith(b"\n")
                    if not complete and len(line) < LONGEST_LINE:
                        return
                    self._at += len(line)
                    skipped, self._skip = self._skip, not complete
                    value = None if skipped or not complete else object_in(line)
                    if value is not None:
                        yield value
                    elif complete:
                        self.bad += 1
        except OSError:
            return

    def last(self) -> Entry | None:
        """The last line, where it is whole and an object."""
        *_, line, rest = ["", "", *last_of(self.path, LAST).split("\n")]
        return object_in(line.encode()) if not rest else None


def last_of(path: Path, size: int) -> str:
    """The text of a file's last bytes; "" where it cannot be read."""
    try:
        with open_record(path) as file:
            file.buffer.seek(max(0, file.buffer.seek(0, os.SEEK_END) - size))
            return file.buffer.read(size).decode(errors="replace")
    except OSError:
        return ""


def object_in(line: bytes) -> Entry | None:
    """The JSON object of a line; None for anything else."""
    try:
        value = parse(line.decode(errors="replace"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def natural(name: str) -> list[str | int]:
    """A key that sorts node9 before node10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d{1,18})", name)]


def by_host(paths: Iterable[Path]) -> list[Path]:
    """Each host's in the order of attempts, too."""
    return sorted(paths, key=lambda path: (natural(path.parent.name), natural(path.name)))
