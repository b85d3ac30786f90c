"""Writes lines into logs from a separate thread: a disk that takes nothing (an NFS server that
hangs, a disk that spins up) must not keep the loop from renewing leases."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from pathlib import Path

from launcher.rotating_log import RotatingLog

BACKLOG = 64 << 20  # characters that wait for the disk; the lines that come then are left out


class Spool:
    """What waits for the disk, in order, for all logs of a run."""

    def __init__(self):
        self._waiting: deque[tuple[SpooledLog, int, list[str] | None]] = deque()
        self._size = 0
        self._busy: float | None = None  # since when one piece is being written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, log: SpooledLog, missing: int, lines: list[str] | None) -> bool:
        """Queue lines for a log, before which `missing` lines were lost, or None for its end. Never
        waits; False where there is no room for them."""
        size = sum(map(len, lines or ()))
        with self._changed:
            if lines is not None and self._size + size > BACKLOG:
                return False
            if self._thread is None:
                atexit.register(self.drain)
                self._thread = threading.Thread(target=self._work, daemon=True, name="spool")
                self._thread.start()
            self._waiting.append((log, missing, lines))
            self._size += size
            self._changed.notify_all()
        return True

    def stalled(self) -> float:
        """Seconds that the piece being written has taken so far."""
        since = self._busy
        return time.monotonic() - since if since is not None else 0.0

    def drain(self) -> None:
        """Wait until the disk has taken all."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._busy is None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                log, missing, lines = self._waiting.popleft()
                self._busy = time.monotonic()
            log.carry_out(missing, lines)
            with self._changed:
                self._size -= sum(map(len, lines or ()))
                self._busy = None
                self._changed.notify_all()


class SpooledLog:
    """A log that is written through a spool: whoever writes to it never waits."""

    def __init__(self, path: Path, limit: int, spool: Spool):
        self._log = RotatingLog(path, limit)
        self._spool = spool
        self._dropped = 0  # lines that found no room in the spool, since the last that did

    @property
    def lost(self) -> int:
        """Lines, since the last that was written."""
        return self._dropped + self._log.lost

    def write(self, lines: list[str]) -> None:
        """Add lines, or count them as lost."""
        if self._spool.add(self, self._dropped, lines):
            self._dropped = 0
        else:
            self._dropped += len(lines)

    def close(self) -> None:
        self._spool.add(self, self._dropped, None)
        self._dropped = 0

    def carry_out(self, missing: int, lines: list[str] | None) -> None:
        """Called by the spool's thread: does what write or close asked for."""
        self._log.lost += missing
        if lines is None:
            self._log.close()
        else:
            self._log.write(lines)
