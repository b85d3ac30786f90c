"""Says what the launcher is waiting for, so that it is never silent for long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from launcher.watch.lines import Terminal

FIRST = 5.0  # seconds until the first message
EVERY = 15.0


class WaitNotice:
    """A line on the terminal now and then, as long as `update` is called."""

    def __init__(self, terminal: Terminal, what: str):
        self._terminal, self._what = terminal, what
        self._begun = time.monotonic()
        self._next = self._begun + FIRST

    def update(self, progress: str = "") -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            done = f", {progress}" if progress else ""
            self._terminal.say(f"{self._what}: {now - self._begun:.0f} s so far{done}")


@contextlib.contextmanager
def waiting(terminal: Terminal, what: str) -> Iterator[None]:
    """Says so from a thread of its own while the body runs."""
    notice, over = WaitNotice(terminal, what), threading.Event()

    def say() -> None:
        while not over.wait(1.0):
            notice.update()

    thread = threading.Thread(target=say, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
