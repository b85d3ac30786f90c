"""Running an action that must leave nothing behind if it does not succeed."""

import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from lab.plan import LabError

Step = Callable[[], None]
READY, DONE = b"ready", b"done"


def or_undo(reserve: Step, action: Step, undo: Step) -> None:
    """Runs `action`, then `undo` if it raises or this process dies of any signal, even SIGKILL.

    `reserve` comes first; if it raises LabError, the caller gets that error and nothing is undone.
    It and `undo` run in a watcher, a process with a session of its own that waits for the end of a
    connection, so that at no moment something exists that nobody would undo. When the exception of
    `action` reaches the caller, `undo` has finished.
    """
    ours, theirs = socket.socketpair()
    watcher = os.fork()
    if watcher == 0:
        ours.close()
        _watch(theirs, reserve, undo)
    theirs.close()
    try:
        answer = ours.recv(4096)
        if answer != READY:
            raise LabError(answer.decode())
        action()
        ours.send(DONE)
    finally:
        ours.close()
        os.waitpid(watcher, 0)


def _watch(connection: socket.socket, reserve: Step, undo: Step) -> NoReturn:
    os.setsid()  # a signal to the caller's process group must not reach this one
    try:
        reserve()
    except (LabError, OSError) as error:
        connection.send(str(error).encode())
        os._exit(1)
    try:
        if not _succeeded(connection):
            undo()
    except Exception as error:
        print(f"lab: could not undo what was started: {error}", file=sys.stderr, flush=True)
    os._exit(0)


def _succeeded(connection: socket.socket) -> bool:
    try:
        connection.send(READY)
        return connection.recv(16) == DONE
    except ConnectionError:  # the caller died before it read
        return False
