"""Doing something that must leave nothing behind when it does not succeed."""

import contextlib
import os
from collections.abc import Callable


def or_undo(action: Callable[[], None], undo: Callable[[], None]) -> None:
    """Runs `action`, and `undo` if it raises or this process dies of any signal (SIGKILL too).

    `undo` runs in a process that waits in a session of its own for the end of a pipe. It has
    finished when the exception of `action` reaches the caller.
    """
    reading, writing = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.setsid()
        os.close(writing)
        with contextlib.suppress(BaseException):
            if not os.read(reading, 1):
                undo()
        os._exit(0)
    os.close(reading)
    try:
        action()
    except BaseException:
        os.close(writing)
        os.waitpid(watcher, 0)
        raise
    os.write(writing, b"1")
    os.close(writing)
    os.waitpid(watcher, 0)
