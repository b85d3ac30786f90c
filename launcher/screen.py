"""Writes to the terminal from a thread of its own: a terminal that takes nothing (Ctrl-S, a pager,
a hung ssh window) must not keep the loop from renewing leases."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import threading
from collections import deque
from typing import IO

BACKLOG = 4 << 20  # characters that wait for the terminal; beyond it the ones in the middle go
FIRST = 1 << 20  # of them the oldest, which stay
LEAVE = 10.0  # seconds to wait at the end for a terminal that takes nothing


class Screen:
    """Text for one output, in order; of what it cannot take in time the middle is left out."""

    def __init__(self, out: IO[str]):
        self._out = out
        self._fd = _descriptor(out)
        self._first: deque[str] = deque()  # oldest first; then, once lines were left out, _last
        self._last: deque[str] = deque()
        self._size = {"first": 0, "last": 0}
        self._dropped = 0  # lines left out between the two
        self._busy = False
        self._taken = 0  # pieces written so far
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Add text. Never waits where the output could be a terminal."""
        if self._fd is None:
            self._put(text)
            return
        with self._changed:
            if self._thread is None:
                atexit.register(self.drain)
                self._thread = threading.Thread(target=self._work, daemon=True, name="screen")
                self._thread.start()
            if not self._last and not self._dropped and self._size["first"] < FIRST:
                self._first.append(text)
                self._size["first"] += len(text)
            else:
                self._last.append(text)
                self._size["last"] += len(text)
                while self._size["last"] > BACKLOG - FIRST and len(self._last) > 1:
                    gone = self._last.popleft()
                    self._size["last"] -= len(gone)
                    self._dropped += gone.count("\n")
            self._changed.notify_all()

    def drain(self, seconds: float = LEAVE) -> bool:
        """Wait until all is written, as long as the output takes something every `seconds`."""
        with self._changed:
            while self._waits():
                before = self._taken
                self._changed.wait(seconds)
                if self._taken == before and self._waits():
                    return False
        return True

    def _waits(self) -> bool:
        return bool(self._first or self._last or self._busy)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._first or self._last)
                text = self._next()
                self._busy = True
            self._put(text)
            with self._changed:
                self._busy = False
                self._taken += 1
                self._changed.notify_all()

    def _next(self) -> str:
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
