"""Read the files of a run as untrusted text from machines, possibly cut off or hostile.

No content of a file makes reading fail. A value of the wrong type counts as absent, a line that
does not parse is skipped, and only regular files are opened. Limits bound the memory: of documents
by LARGEST_DOCUMENT, of lines by LONGEST_LINE. read.py gives the lines their meaning.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from boundary.run_files import LARGEST_FIGURE, LONGEST_SECONDS

# A JSON object from a machine: a field may be absent, or of any type.
Entry = dict[str, Any]

LARGEST_FILE = 4 << 30  # bytes of a file that is read line by line
LARGEST_DOCUMENT = 8 << 20  # bytes of a document; parsing it takes up to 30 times the memory
LONGEST_LINE = 1 << 20  # bytes; a longer line counts as a line that does not parse
LAST_BYTES = 1 << 16  # of a file's end, in which its last line is searched
MOST_FILES = 1 << 14  # of all hosts; each rank has a file in each attempt


def number(value: Any) -> float | None:
    """Return the value if it is a number that can occur in a file of a run, else None."""
    # `isinstance` would accept True and False, because bool is a subclass of int.
    if type(value) not in (int, float):
        return None
    # The comparison is false for NaN.
    return value if -LARGEST_FIGURE < value < LARGEST_FIGURE else None


def time_of(value: object) -> float | None:
    """Return the value if it can be seconds since boot or a duration in seconds, else None."""
    value = number(value)
    return value if value is not None and 0 <= value < LONGEST_SECONDS else None


# NaN and Infinity, which JSON does not have, become null. So do integers of 20 digits or more: no
# figure of a run has so many, and a float cannot hold an integer of 400.
DECODER = json.JSONDecoder(
    parse_constant=lambda name: None,
    parse_int=lambda digits: int(digits) if len(digits) < 20 else None,
)


def parse(document: str) -> Any:
    """Parse a JSON value. Raises ValueError."""
    try:
        return DECODER.decode(document)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_record(path: Path) -> TextIO:
    """Open a regular file of at most LARGEST_FILE bytes for reading. Raises OSError for a link, a
    FIFO (opening it would block) or a device (it may have no end)."""
    # The checks use the open file: the path may point to another one a moment later.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST_FILE:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file, or it is too large", str(path))
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def files_of_hosts(nodes: Path) -> dict[str, list[Path]]:
    """Map each host to its records in nodes/<host>/, in the order of attempts."""
    hosts: dict[str, list[Path]] = {}
    # A folder whose name cannot be decoded belongs to no host.
    paths = [path for path in nodes.glob("*/*.json*") if str(path).isprintable()]
    paths.sort(key=lambda path: (natural(path.parent.name), natural(path.name)))
    for path in paths[:MOST_FILES]:
        hosts.setdefault(path.parent.name, []).append(path)
    return hosts


def read_object(path: Path, missing: list[str]) -> Entry:
    """Read a JSON object. If that fails, return {} and add a sentence to `missing`."""
    try:
        with open_record(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_DOCUMENT:
                missing.append(
                    f"{'/'.join(path.parts[-2:])} has {size >> 20} MiB; up to "
                    f"{LARGEST_DOCUMENT >> 20} are read, so the report does without it."
                )
                return {}
            # At most `size` characters: the file may grow while it is read.
            value = parse(file.read(size))
    except FileNotFoundError:
        missing.append(f"{path.name} is missing.")
        return {}
    except (OSError, ValueError):
        missing.append(f"{'/'.join(path.parts[-2:])} cannot be read as JSON.")
        return {}
    return value if isinstance(value, dict) else {}


def before_hole(file: BinaryIO, begin: int) -> tuple[int, int]:
    """Return the offset at which the data after `begin` ends or a hole starts, and the size."""
    # No program writes records with a hole. A power cut may leave a hole at the end, and an archive
    # of a few bytes can unpack as a file with a hole of any size.
    descriptor = file.fileno()
    size, position = os.fstat(descriptor).st_size, os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        # SEEK_HOLE fails at or behind the end of the file.
        return (os.lseek(descriptor, begin, os.SEEK_HOLE) if begin < size else size), size
    except OSError:  # a file system without SEEK_HOLE
        return size, size
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


class Growing:
    """A file of JSON Lines that is read as it grows. `bad`: how many lines have no object."""

    def __init__(self, path: Path):
        self.path, self.bad = path, 0
        self._offset = 0  # bytes read so far
        self._in_long_line = False  # the next bytes belong to a line that is too long
        self._met_hole = False  # no data of the file follows

    def lines(self) -> Iterator[Entry]:
        """Yield the objects of lines added since the last call, except an unfinished last line."""
        try:
            with open_record(self.path) as text:
                file = text.buffer
                end, size = before_hole(file, self._offset)
                # A hole counts as one bad line, however often the file is read again.
                if end < size and not self._met_hole:
                    self._met_hole, self.bad = True, self.bad + 1
                file.seek(self._offset)
                while line := file.readline(min(LONGEST_LINE, end - self._offset)):
                    is_complete = line.endswith(b"\n")
                    # The writer has not finished this line, so the next call reads it again.
                    if not is_complete and len(line) < LONGEST_LINE:
                        return
                    # `readline` returns a line that is too long in pieces. The line counts as bad
                    # once, at its last piece.
                    self._offset += len(line)
                    is_later_piece, self._in_long_line = self._in_long_line, not is_complete
                    value = None if is_later_piece or not is_complete else object_in(line)
                    if value is not None:
                        yield value
                    elif is_complete:
                        self.bad += 1
        except OSError:
            return


def last_of(path: Path, size: int) -> str:
    """Return the text of a file's last `size` bytes; "" if it cannot be read."""
    try:
        with open_record(path) as file:
            file.buffer.seek(max(0, file.buffer.seek(0, os.SEEK_END) - size))
            return file.buffer.read(size).decode(errors="replace")
    except OSError:
        return ""


def read_last_object(path: Path) -> Entry | None:
    """Return the object of a file's last line; None if that line is unfinished or no object."""
    # A finished last line ends with "\n", so that "" follows it. The two empty strings in front
    # stand for missing lines: a file without "\n" gives line "" and the text as `unfinished`.
    *_, line, unfinished = ["", "", *last_of(path, LAST_BYTES).split("\n")]
    return object_in(line.encode()) if not unfinished else None


def object_in(line: bytes) -> Entry | None:
    """Parse the JSON object of a line; None for anything else."""
    try:
        value = parse(line.decode(errors="replace"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def natural(name: str) -> list[str | int]:
    """Return a sort key that puts node9 before node10: `node10` becomes ["node", 10, ""]."""
    pieces = re.split(r"(\d{1,18})", name)
    return [int(piece) if piece.isdecimal() else piece for piece in pieces]
