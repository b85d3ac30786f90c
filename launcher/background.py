"""Writes from threads of their own: a terminal that takes nothing (Ctrl-S, a pager, a hung ssh
window) or a disk that takes nothing (an NFS server that hangs, a disk that spins up) must not keep
the loop from renewing leases."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO

SHOWN = 4 << 20  # characters that wait for the terminal; beyond it the ones in the middle go
FIRST = 1 << 20  # of them the oldest, which stay
LEAVE = 10.0  # seconds to wait at the end for a terminal that takes nothing
SPOOLED = 64 << 20  # characters that wait for the disk; the lines that come then are left out


class Background:
    """A thread that writes what waits, piece by piece and in order. Subclasses say what waits."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        self._busy: float | None = None  # since when one piece is being written
        self._taken = 0  # pieces written so far
        self._thread: threading.Thread | None = None

    def _waits(self) -> bool:
        """Whether there is a piece to write."""
        raise NotImplementedError

    def _next(self) -> Callable[[], object]:
        """Take the next piece out; what writes it."""
        raise NotImplementedError

    def _added(self) -> None:
        """Called under `_changed` when something was added."""
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
        """Seconds that the piece being written has taken so far."""
        since = self._busy
        return time.monotonic() - since if since is not None else 0.0

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until all is written; with `seconds`, as long as something is taken every so many.
        Returns whether all is."""
        with self._changed:
            while self._waits() or self._busy is not None:
                before = self._taken
                if not self._changed.wait(seconds) and self._taken == before:
                    return False
        return True


class Spool(Background):
    """What waits for the disk, for all logs of a run."""

    def __init__(self):
        super().__init__("spool")
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._size = 0

    def add(self, write: Callable[[], object], size: int) -> bool:
        """Queue what writes so many characters. Never waits; False where there is no room."""
        with self._changed:
            if size and self._size + size > SPOOLED:
                return False
            self._waiting.append((size, write))
            self._size += size
            self._added()
        return True

    def _waits(self) -> bool:
        return bool(self._waiting)

    def _next(self) -> Callable[[], object]:
        size, write = self._waiting.popleft()
        self._size -= size
        return write


class Screen(Background):
    """Text for one output; of what it cannot take in time the middle is left out."""

    def __init__(self, out: IO[str]):
        super().__init__("screen")
        self._out = out
        self._fd = _descriptor(out)
        self._first: deque[str] = deque()  # oldest first; then, once lines were left out, _last
        self._last: deque[str] = deque()
        self._size = {"first": 0, "last": 0}
        self._dropped = 0  # lines left out between the two

    def write(self, text: str) -> None:
        """Add text. Never waits where the output could be a terminal."""
        if self._fd is None:
            self._put(text)
            return
        with self._changed:
            if not self._last and not self._dropped and self._size["first"] < FIRST:
                self._first.append(text)
                self._size["first"] += len(text)
            else:
                self._last.append(text)
                self._size["last"] += len(text)
                while self._size["last"] > SHOWN - FIRST and len(self._last) > 1:
                    gone = self._last.popleft()
                    self._size["last"] -= len(gone)
                    self._dropped += gone.count("\n")
            self._added()

    def drain(self, seconds: float | None = LEAVE) -> bool:
        return super().drain(seconds)

    def _waits(self) -> bool:
        return bool(self._first or self._last)

    def _next(self) -> Callable[[], object]:
        text = self._text()
        return lambda: self._put(text)

    def _text(self) -> str:
        if self._first:
            text = self._first.popleft()
            self._size["first"] -= len(text)
            return text
        if self._dropped:
            notice = f"tandem: {self._dropped} lines not shown: the terminal took none for a while "
            self._dropped = 0
            return notice + "(controller.log has them)\n"
        text = self._last.popleft()
        self._size["last"] -= len(text)
        return text

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


def _descriptor(out: IO[str]) -> int | None:
    """The output's descriptor, which is written to directly: a thread that is stuck in a file
    object would hold its lock for ever."""
    try:
        out.flush()
        return out.fileno()
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return None
