"""Doing something that must leave nothing behind when it does not succeed."""

import os
import socket
import sys
from collections.abc import Callable


def or_undo(action: Callable[[], None], undo: Callable[[], None]) -> None:
    """Runs `action`, and `undo` if it raises or this process dies of any signal (SIGKILL too).

    `undo` runs in a process that waits in a session of its own for the end of a connection. It
    has finished when the exception of `action` reaches the caller.
    """
    ours, theirs = socket.socketpair()
    watcher = os.fork()
    if watcher == 0:
        os.setsid()  # a signal to our process group must not reach it
        ours.close()
        theirs.send(b"ready")
        try:
            if not theirs.recv(16):
                undo()
        except Exception as error:
            print(f"lab: could not undo what was begun: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    theirs.close()
    ours.recv(16)
    try:
        action()
    except BaseException:
        ours.close()
        os.waitpid(watcher, 0)
        raise
    ours.send(b"done")
    os.waitpid(watcher, 0)
    ours.close()
