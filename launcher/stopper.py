"""Ctrl-C, SIGTERM and a closed terminal, for code that must end a run in an orderly way."""

from __future__ import annotations

import contextlib
import signal
import socket

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopper:
    """Counts how often the user asked to stop: once lets the workers save, twice kills.

    SIGHUP and SIGINT that were ignored from the start stay ignored: that is what nohup and a
    script's `&` mean. SIGTERM always counts: `make stop` sends it.
    """

    def __init__(self):
        self.asked = 0
        self.suspended = False  # Ctrl-Z was pressed: a stopped controller renews no lease

    def _suspend(self, *_: object) -> None:
        self.suspended = True

    def _ask(self, *_: object) -> None:
        self.asked += 1

    @contextlib.contextmanager
    def listening(self):
        ignored = {n for n in SIGNALS if signal.getsignal(n) is signal.SIG_IGN} - {signal.SIGTERM}
        handled = [number for number in SIGNALS if number not in ignored]
        before = {number: signal.signal(number, self._ask) for number in handled}
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        # After Ctrl-Z `make` is stopped and this process is in the background, where it may print.
        before[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def wakeup():
    """A socket that becomes readable at each signal, so that select() need not look for them."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
