"""Doing something that must leave nothing behind when it does not succeed."""

import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from lab.plan import LabError

Step = Callable[[], None]
READY, DONE = b"ready", b"done"


def or_undo(reserve: Step, action: Step, undo: Step) -> None:
    """Runs `action`, and `undo` if it raises or this process dies of any signal (SIGKILL too).

    `reserve` comes first; when it raises LabError, that reaches the caller and nothing is undone.
    It and `undo` run in a watcher, a process with a session of its own that waits for the end of
    a connection: so there is no moment at which something exists that nobody would undo. `undo`
    has finished when the exception of `action` reaches the caller.
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
        print(f"lab: could not undo what was begun: {error}", file=sys.stderr, flush=True)
    os._exit(0)


def _succeeded(connection: socket.socket) -> bool:
    try:
        connection.send(READY)
        return connection.recv(16) == DONE
    except ConnectionError:  # the caller ended before it read
        return False
