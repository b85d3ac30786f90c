"""Ctrl-C while a program still imports: it ends by the signal, without Python's traceback.

A program imports this before its other modules, and calls `heard` as its main begins. Where SIGINT
is ignored (a shell's background job), it stays ignored.
"""

from __future__ import annotations

import signal

_handler = signal.getsignal(signal.SIGINT)
if _handler is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def heard() -> None:
    """From here on Ctrl-C is KeyboardInterrupt again."""
    signal.signal(signal.SIGINT, _handler)
