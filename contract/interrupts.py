"""Ctrl-C while a program still imports: it ends by the signal, without Python's traceback.

A program imports this before its other modules, and calls `heard` as its main begins, or runs its
main by `ended`. Where SIGINT is ignored (a shell's background job), it stays ignored. A standard
stream that a shell has closed (`>&-`) is /dev/null, before a file that is opened takes its place.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_handler = signal.getsignal(signal.SIGINT)
if _handler is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, _name) is None:
        setattr(sys, _name, Path(os.devnull).open(_mode))  # noqa: SIM115 - while the program lives


def heard() -> None:
    """From here on Ctrl-C is KeyboardInterrupt again."""
    signal.signal(signal.SIGINT, _handler)


def ended(main: Callable[[], int]) -> int:
    """The exit code of a program's main(); Ctrl-C is no defect, so it gets a sentence."""
    heard()
    try:
        return main()
    except KeyboardInterrupt:
        print("\ntandem: interrupted; the same command can be typed again", file=sys.stderr)
        return 128 + signal.SIGINT  # as a shell reports it


def printed(program: str, main: Callable[[], int]) -> int:
    """The exit code of a program's main() whose output may find no taker."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        code = 0
    except OSError as error:
        if error.filename is not None:  # it concerns a file: a defect, which needs its traceback
            raise
        print(f"{program}: the output cannot be printed: {error.strerror}", file=sys.stderr)
        code = 2
    # The interpreter would try again as it exits.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
