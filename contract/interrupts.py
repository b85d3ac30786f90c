"""End a program by Ctrl-C without Python's traceback, even while it still imports.

A program imports this before its other modules. Its main begins with `accept_ctrl_c`, or it calls
`run_main`. If SIGINT is ignored, as in a shell's background job, it stays ignored.
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

# A shell may have closed a standard stream (`>&-`). Without /dev/null in its place, the next opened
# file would get its number, and prints would go into that file.
for _name, _mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, _name) is None:
        setattr(sys, _name, Path(os.devnull).open(_mode))  # noqa: SIM115 - while the program lives


def accept_ctrl_c() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    signal.signal(signal.SIGINT, _handler)


def run_main(main: Callable[[], int]) -> int:
    """Call a main() and return its exit code. After Ctrl-C prints a sentence, no traceback."""
    accept_ctrl_c()
    try:
        return main()
    except KeyboardInterrupt:
        print("\ntandem: interrupted; the same command can be typed again", file=sys.stderr)
        return 128 + signal.SIGINT  # as a shell reports it


def run_printing_main(program: str, main: Callable[[], int]) -> int:
    """Call a program's main() and return its exit code. Handles a reader that closes the pipe, and
    a disk that has no space for the output."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        code = 0
    except OSError as error:
        if error.filename is not None:  # an error of a file is a defect, and needs its traceback
            raise
        print(f"{program}: the output cannot be printed: {error.strerror}", file=sys.stderr)
        code = 2
    # The interpreter flushes stdout when it exits, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code
