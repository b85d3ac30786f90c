"""Writes from threads of their own: a terminal that takes nothing (Ctrl-S, a pager, a hung ssh
window) or a disk that takes nothing (an NFS server that hangs, a disk that spins up) must not keep
the loop from renewing leases. Logs are capped and rotated, and never a reason to end a run."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from launcher.node.machine import disk_free

SHOWN = 4 << 20  # characters that wait for the terminal; beyond it the ones in the middle go
FIRST = 1 << 20  # of them the oldest, which stay
LEAVE = 10.0  # seconds to wait at the end for a terminal that takes nothing
SPOOLED = 64 << 20  # characters that wait for the disk; the lines that come then are left out
PIECE = 512  # characters that a piece counts beside its own: many empty ones fill memory, too


class Background:
    """A thread that writes waiting pieces in order. Subclasses hold the pieces."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        # Since when one piece is being written. Meanwhile the lock is free, so that nobody who adds
        # a piece waits for the disk or the terminal.
        self._busy: float | None = None
        self._taken = 0  # pieces written so far
        self._thread: threading.Thread | None = None

    def _waits(self) -> bool:
        """Return whether there is a piece to write."""
        raise NotImplementedError

    def _next(self) -> Callable[[], object]:
        """Take the next piece out, and return the function that writes it."""
        raise NotImplementedError

    def _added(self) -> None:
        """Wake the thread. Called under `_changed` after a piece was added."""
        # The thread is a daemon, since one that hangs in a write must not keep this process alive.
        if self._thread is None:
            atexit.register(self.drain)
            self._thread = threading.Thread(target=self._work, daemon=True, name=self._name)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._waits)
                write = self._next()
                self._busy = time.monotonic()
            write()
            with self._changed:
                self._busy = None
                self._taken += 1
                self._changed.notify_all()

    def stalled(self) -> float:
        """Return the seconds that the piece being written has taken so far."""
        since = self._busy
        return time.monotonic() - since if since is not None else 0.0

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until all is written; with `seconds`, as long as a piece is written in that time.
        Returns whether all is written."""
        with self._changed:
            while self._waits() or self._busy is not None:
                # A slow output is waited for as long as it takes something.
                count = self._taken
                if not self._changed.wait(seconds) and self._taken == count:
                    return False
        return True


class Spool(Background):
    """A queue of writes to the disk, for all logs of a run."""

    def __init__(self):
        super().__init__("spool")
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._size = 0

    def add(self, write: Callable[[], object], size: int) -> bool:
        """Queue a function that writes `size` characters, without waiting. Returns False if there
        is no room, as there always is for size 0."""
        with self._changed:
            if size and self._size + size > SPOOLED:
                return False
            self._waiting.append((size, write))
            self._size += size + PIECE
            self._added()
        return True

    def _waits(self) -> bool:
        return bool(self._waiting)

    def _next(self) -> Callable[[], object]:
        size, write = self._waiting.popleft()
        self._size -= size + PIECE
        return write


class Screen(Background):
    """Queues text for one output, and drops the middle of what it cannot take in time."""

    def __init__(self, out: IO[str]):
        super().__init__("screen")
        self._out = out
        # The descriptor is written to directly: a thread that is stuck in a file object would hold
        # its lock for ever.
        self._fd: int | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # an output without one
            out.flush()
            self._fd = out.fileno()
        self._first: deque[str] = deque()  # oldest first; then, once lines were left out, _last
        self._last: deque[str] = deque()
        self._size = {"first": 0, "last": 0}
        self._dropped = 0  # lines left out between the two

    def write(self, text: str) -> None:
        """Add text, without waiting if the output could be a terminal."""
        if self._fd is None:
            self._put(text)
            return
        with self._changed:
            # The first lines name the cause of a failure, and the last ones how the run ended.
            if not self._last and not self._dropped and self._size["first"] < FIRST:
                self._first.append(text)
                self._size["first"] += len(text)
            else:
                self._last.append(text)
                self._size["last"] += len(text)
                while self._size["last"] > SHOWN - FIRST and len(self._last) > 1:
                    dropped = self._last.popleft()
                    self._size["last"] -= len(dropped)
                    self._dropped += dropped.count("\n")
            self._added()

    def drain(self, seconds: float | None = LEAVE) -> bool:
        return super().drain(seconds)

    def _waits(self) -> bool:
        return bool(self._first or self._last)

    def _next(self) -> Callable[[], object]:
        if self._dropped and not self._first:
            text = (
                f"tandem: {self._dropped} lines are not shown, because the terminal stopped "
                "reading for a while "
            )
            text += "(controller.log has them)\n"
            self._dropped = 0
        else:
            name, queue = ("first", self._first) if self._first else ("last", self._last)
            text = queue.popleft()
            self._size[name] -= len(text)
        return lambda: self._put(text)

    def _put(self, text: str) -> None:
        # A closed terminal must not end the run through an error here: SIGHUP decides.
        with contextlib.suppress(OSError, ValueError):
            if self._fd is None:
                self._out.write(text)
                self._out.flush()
                return
            data = text.encode(errors="replace")
            while data:
                try:
                    # In pieces, so that a slow terminal is seen to take something.
                    data = data[os.write(self._fd, data[:4096]) :]
                    self._taken += 1
                except BlockingIOError:  # somebody else made the terminal non-blocking
                    select.select([], [self._fd], [], 1.0)


MIB = 1 << 20
LOG = 256 * MIB  # the most of a log: what a rank prints, and controller.log
# Logs leave this much of the disk free: attempts.json, the records and the report need it.
RESERVE = 64 * MIB
CHECK_EVERY = 1.0
FIRST_PART = 16  # the first 1/16 of what a log may have is kept in <name>.first
NEWER = 4  # the rest in four parts: <name>, <name>.1, ... <name>.3, each older than the one before


class SpooledLog:
    """A log that is written through a spool: whoever writes to it never waits."""

    def __init__(self, path: Path, limit: int, spool: Spool):
        self._log = RotatingLog(path, limit)
        self._spool = spool
        self._dropped = 0  # lines that found no room in the spool, since the last that did

    @property
    def lost_lines(self) -> int:
        """Return the number of lost lines since the last that was written."""
        return self._dropped + self._log.lost_lines

    def write(self, lines: list[str]) -> None:
        """Add lines, or count them as lost."""
        dropped = self._dropped

        # The count travels with the lines, so that the log names the gap where it is.
        def carry_out() -> None:
            self._log.lost_lines += dropped
            self._log.write(lines)

        is_added = self._spool.add(carry_out, sum(map(len, lines)) + len(lines))
        self._dropped = 0 if is_added else dropped + len(lines)

    def close(self) -> None:
        dropped, self._dropped = self._dropped, 0

        def carry_out() -> None:
            self._log.lost_lines += dropped
            self._log.close()

        self._spool.add(carry_out, 0)


class RotatingLog:
    """Appends whole lines to a file, at most `limit` bytes in all. It counts lines that the disk
    cannot take, and writes their number in their place. Raises nothing."""

    def __init__(self, path: Path, limit: int):
        self.path, self._limit = path, limit
        self.lost_lines = 0  # since the last that was written
        self._checked, self._room = 0.0, True
        self._fd: int | None = None
        self._size = 0

    def _open(self) -> None:
        """Open the file. Raises OSError."""
        # Only now: a machine that prints nothing needs no folder.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # We did not make a link or a FIFO in its place: nothing is written through it.
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            self.path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._size = os.fstat(self._fd).st_size

    def write(self, lines: list[str]) -> None:
        """Add lines, or count them as lost."""
        count = self.lost_lines
        missing = (
            f"tandem: {count} lines are missing here: the control node's disk was full or failed\n"
        )
        text = (missing if count else "") + "\n".join(lines) + "\n"
        if self._has_room() and self._append(text.encode(errors="replace")):
            self.lost_lines = 0
        else:
            self.lost_lines += len(lines)

    def _append(self, data: bytes) -> bool:
        """Append all of it or nothing. Returns whether it was appended."""
        try:
            if self._fd is None:
                self._open()
            assert self._fd is not None
            size = os.write(self._fd, data)
        except OSError:
            size = 0
        if size == len(data):
            self._size += size
            oldest = _named(self.path, "first")
            with contextlib.suppress(OSError):  # if nothing can be renamed, this file grows on
                limit = self._limit // FIRST_PART
                if oldest.exists():
                    limit = (self._limit - limit) // NEWER
                if self._size >= limit:
                    # Begin a new file. The first one stays for ever, since it has the run's start.
                    names = [self.path, *(_named(self.path, n) for n in range(1, NEWER))]
                    if not oldest.exists():
                        self.path.replace(oldest)
                    else:
                        for newer, older in zip(reversed(names[:-1]), reversed(names[1:])):
                            if newer.exists():
                                newer.replace(older)
                    self._leave()
                    self._open()
            return True
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half line
        return False

    def _has_room(self) -> bool:
        now = time.monotonic()
        if now >= self._checked + CHECK_EVERY:
            self._checked = now
            # The folder may not exist yet: the nearest one above it that does is on the same disk.
            folder = next((f for f in self.path.parents if f.exists()), self.path.parent)
            free = disk_free(folder)
            self._room = self._room if free is None else free >= RESERVE
        return self._room

    def _leave(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self.lost_lines and self._has_room():
            self._append(f"tandem: {self.lost_lines} lines are missing here\n".encode())
        self._leave()


def _named(path: Path, suffix: str | int) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def log_files(path: Path) -> list[Path]:
    """Return the existing files of a log, the oldest lines first."""
    older = [_named(path, n) for n in reversed(range(1, NEWER))]
    return [file for file in (_named(path, "first"), *older, path) if file.exists()]
