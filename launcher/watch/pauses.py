"""Whether this process could not run: it was stopped (Ctrl-Z, SIGSTOP), or the machine slept."""

from __future__ import annotations

import time

# The event loop turns at least once a second; under load it is late by less than this.
LONGEST_TURN = 5.0


def now() -> float:
    """Seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Pauses:
    """Call `check` in each turn of a loop."""

    def __init__(self):
        self._seen = now()
        self.longest = 0.0

    def check(self) -> float:
        """How many seconds since the last call this process did not run; 0 in an ordinary turn."""
        before, self._seen = self._seen, now()
        pause = self._seen - before
        if pause < LONGEST_TURN:
            return 0.0
        self.longest = max(self.longest, pause)
        return pause
