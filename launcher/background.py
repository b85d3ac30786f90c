"""Writes the terminal's text and the logs from threads, for terminal.py and watch/lines.py.

A terminal may take nothing (Ctrl-S, a pager, a hung ssh window), and so may a disk (an NFS server
that hangs, a disk that spins up). The launcher's loop must renew leases meanwhile. The size of logs
is limited, and a log that cannot be written is never a reason to end a run.

Background is the thread: Screen uses it for the terminal, and Spool for all logs. A SpooledLog is a
RotatingLog that is written through the Spool.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from launcher.node.machine import disk_free

SCREEN_CHARACTERS = 4 << 20  # that may wait for the terminal; beyond, the middle is dropped
OLDEST_CHARACTERS = 1 << 20  # of these, at the beginning, which are never dropped
DRAIN_SECONDS = 10.0  # that the launcher waits at its end for a terminal that takes nothing
SPOOL_CHARACTERS = 64 << 20  # that may wait for the disk; beyond, new lines are dropped
WRITE_OVERHEAD = 512  # characters added to the size of each write: empty ones fill memory, too


class Background:
    """A thread that writes pieces in order. A subclass holds the pieces that wait: it adds a piece
    under the lock `_changed`, and then calls `_wake`."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        # When the present write began, None without one. Meanwhile the lock is free, so that nobody
        # who adds a piece waits for the disk or the terminal.
        self._busy_since: float | None = None
        self._write_count = 0  # so far
        self._thread: threading.Thread | None = None

    def _waits(self) -> bool:
        """Return whether there is a piece to write."""
        raise NotImplementedError

    def _take_next(self) -> Callable[[], object]:
        """Take the next piece out, and return the function that writes it."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Wake the thread, or start it. The caller holds `_changed`, and has added a piece."""
        if self._thread is None:
            atexit.register(self.drain)
            # It is a daemon: a thread that hangs in a write must not keep this process alive.
            self._thread = threading.Thread(target=self._work, daemon=True, name=self._name)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        """Write one piece after the other, for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(self._waits)
                write = self._take_next()
                self._busy_since = time.monotonic()
            write()
            with self._changed:
                self._busy_since = None
                self._write_count += 1
                self._changed.notify_all()

    def stalled(self) -> float:
        """Return the seconds that the present write has taken so far, 0 without one."""
        since = self._busy_since
        return time.monotonic() - since if since is not None else 0.0

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until all pieces are written, or none was written for `seconds` (None: for ever).
        Returns whether all are written."""
        with self._changed:
            while self._waits() or self._busy_since is not None:
                # A slow output is waited for as long as it takes something.
                count = self._write_count
                if not self._changed.wait(seconds) and self._write_count == count:
                    return False
        return True


class Spool(Background):
    """A queue of writes to the disk, for all logs of a run."""

    def __init__(self):
        super().__init__("spool")
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()  # (size, write)
        self._size = 0  # characters that wait, with the overhead

    def add(self, write: Callable[[], object], size: int) -> bool:
        """Queue a function that writes `size` characters, without waiting. Returns False if the
        queue is full; for size 0 it never is, so that a log can always be closed."""
        with self._changed:
            if size and self._size + size > SPOOL_CHARACTERS:
                return False
            self._waiting.append((size, write))
            self._size += size + WRITE_OVERHEAD
            self._wake()
        return True

    def _waits(self) -> bool:
        return bool(self._waiting)

    def _take_next(self) -> Callable[[], object]:
        size, write = self._waiting.popleft()
        self._size -= size + WRITE_OVERHEAD
        return write


class Screen(Background):
    """Queues text for one output, and drops the middle of what it cannot take in time."""

    def __init__(self, out: IO[str]):
        super().__init__("screen")
        self._out = out
        # The descriptor is written to directly: a thread that is stuck in a file object would hold
        # its lock for ever. An output in memory, as in tests, has no descriptor.
        self._fd: int | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            out.flush()
            self._fd = out.fileno()
        # The texts that wait: `_oldest` is written first. Then the gap is named, if it has dropped
        # lines, and then `_newest` is written. Sizes are in characters.
        self._oldest: deque[str] = deque()
        self._newest: deque[str] = deque()
        self._oldest_size = self._newest_size = 0
        self._dropped_lines = 0

    def write(self, text: str) -> None:
        """Add text, without waiting. Text for an output in memory is written at once."""
        if self._fd is None:
            self._write_out(text)
            return
        with self._changed:
            # The first lines name the cause of a failure, and the last ones how the run ended.
            is_gapless = not self._newest and not self._dropped_lines
            if is_gapless and self._oldest_size < OLDEST_CHARACTERS:
                self._oldest.append(text)
                self._oldest_size += len(text)
            else:
                self._newest.append(text)
                self._newest_size += len(text)
                limit = SCREEN_CHARACTERS - OLDEST_CHARACTERS
                while self._newest_size > limit and len(self._newest) > 1:
                    dropped_text = self._newest.popleft()
                    self._newest_size -= len(dropped_text)
                    self._dropped_lines += dropped_text.count("\n")
            self._wake()

    def drain(self, seconds: float | None = DRAIN_SECONDS) -> bool:
        return super().drain(seconds)

    def _waits(self) -> bool:
        return bool(self._oldest or self._newest)

    def _take_next(self) -> Callable[[], object]:
        if self._oldest:
            text = self._oldest.popleft()
            self._oldest_size -= len(text)
        elif self._dropped_lines:
            text = (
                f"tandem: {self._dropped_lines} lines are not shown, because the terminal stopped "
                "reading for a while (controller.log has them)\n"
            )
            self._dropped_lines = 0
        else:
            text = self._newest.popleft()
            self._newest_size -= len(text)
        return lambda: self._write_out(text)

    def _write_out(self, text: str) -> None:
        # A closed terminal must not end the run through an error here: SIGHUP decides.
        with contextlib.suppress(OSError, ValueError):
            if self._fd is None:
                self._out.write(text)
                self._out.flush()
                return
            data = text.encode(errors="replace")
            while data:
                try:
                    # In pieces of 4 KiB, so that `drain` sees a slow terminal take something.
                    data = data[os.write(self._fd, data[:4096]) :]
                    self._write_count += 1
                except BlockingIOError:  # somebody else made the terminal non-blocking
                    select.select([], [self._fd], [], 1.0)


MIB = 1 << 20
LOG_BYTES = 256 * MIB  # the most of a log: what a rank prints, and controller.log
# Logs leave these bytes of the disk free: attempts.json, the records and the report need them.
RESERVED_BYTES = 64 * MIB
CHECK_SECONDS = 1.0  # between two looks at the free space
# The first 1/16 of a log's limit stays in <name>.first. The rest is in four files, from new to old:
# <name>, <name>.1, <name>.2, <name>.3.
FIRST_FRACTION, FILE_COUNT = 16, 4


class SpooledLog:
    """A log that is written through a spool, so that no call waits for the disk."""

    def __init__(self, path: Path, limit: int, spool: Spool):
        self._log = RotatingLog(path, limit)
        self._spool = spool
        self._dropped_lines = 0  # for which the spool had no room, since it last took lines

    @property
    def lost_lines(self) -> int:
        """Return the number of lines that were lost since lines were last written."""
        return self._dropped_lines + self._log.lost_lines

    def write(self, lines: list[str]) -> None:
        """Add lines, or count them as lost."""
        # The count travels with the lines, so that the log names the gap where it is.
        write = partial(self._log.write, lines, self._dropped_lines)
        is_added = self._spool.add(write, sum(map(len, lines)) + len(lines))
        self._dropped_lines = 0 if is_added else self._dropped_lines + len(lines)

    def close(self) -> None:
        self._spool.add(partial(self._log.close, self._dropped_lines), 0)
        self._dropped_lines = 0


class RotatingLog:
    """Appends whole lines to a file, which becomes an older file when it is full: at most `limit`
    bytes in all. Counts lines that the disk cannot take, and writes their number in their place.
    Raises nothing."""

    def __init__(self, path: Path, limit: int):
        self.path, self._limit = path, limit
        self.lost_lines = 0  # since lines were last written
        self._checked_at, self._had_room = 0.0, True  # the last look at the free space
        self._fd: int | None = None
        self._size = 0  # bytes of the file, whose last line is whole

    def _open(self) -> None:
        """Open the file, and make its folder: a machine that prints nothing needs none. Raises
        OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A link or a FIFO in its place is not of this log: nothing is written through it.
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            self.path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._size = os.fstat(self._fd).st_size

    def write(self, lines: list[str], dropped: int = 0) -> None:
        """Add lines, or count them as lost. `dropped`: how many were lost before them, in the
        spool."""
        self.lost_lines += dropped
        count = self.lost_lines
        note = (
            f"tandem: {count} lines are missing here: the control node's disk was full or failed\n"
        )
        text = (note if count else "") + "\n".join(lines) + "\n"
        if self._has_room() and self._append(text.encode(errors="replace")):
            self.lost_lines = 0
        else:
            self.lost_lines += len(lines)

    def _append(self, data: bytes) -> bool:
        """Append all of the data or nothing. Returns whether it was appended."""
        try:
            if self._fd is None:
                self._open()
            assert self._fd is not None
            size = os.write(self._fd, data)
        except OSError:
            size = 0
        if size != len(data):
            if self._fd is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)  # no half line
            return False
        self._size += size
        first, *numbered = older_files(self.path)
        limit = self._limit // FIRST_FRACTION
        with contextlib.suppress(OSError):  # if no file can be renamed, this file grows on
            if first.exists():
                limit = (self._limit - limit) // FILE_COUNT
            if self._size >= limit:
                # Begin a new file. The first file stays for ever, since it has the run's start.
                if not first.exists():
                    self.path.replace(first)
                else:  # .2 becomes .3, then .1 becomes .2, then the file becomes .1
                    for older, newer in zip(numbered, [*numbered[1:], self.path]):
                        if newer.exists():
                            newer.replace(older)
                self._close_file()
                self._open()
        return True

    def _has_room(self) -> bool:
        """Return whether the disk has more than RESERVED_BYTES, looking once in CHECK_SECONDS."""
        time_now = time.monotonic()
        if time_now >= self._checked_at + CHECK_SECONDS:
            self._checked_at = time_now
            # The folder may not exist yet: the nearest parent that exists is on the same disk.
            folder = next((path for path in self.path.parents if path.exists()), self.path.parent)
            free = disk_free(folder)
            self._had_room = self._had_room if free is None else free >= RESERVED_BYTES
        return self._had_room

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self, dropped: int = 0) -> None:
        """Close the file, with a note on lost lines. A later write opens it again."""
        self.lost_lines += dropped
        if self.lost_lines and self._has_room():
            self._append(f"tandem: {self.lost_lines} lines are missing here\n".encode())
        self._close_file()


def older_files(path: Path) -> list[Path]:
    """Return the older files of a log, the oldest first, which may not exist: <name>.first, and
    then <name>.3 to <name>.1."""
    suffixes = ["first", *map(str, reversed(range(1, FILE_COUNT)))]
    return [path.with_name(f"{path.name}.{suffix}") for suffix in suffixes]
