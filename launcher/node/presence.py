"""Who trains on a machine, for whoever asks next: names that the kernel takes back by itself."""

import errno
import os
import pathlib
import re
import socket
import struct
import time

LONGEST = 107  # bytes of a name, the leading NUL apart
ALONE = "\0tandem-alone"
TRIES, PAUSE = 100, 0.01  # seconds; a name has no listener for the moment between two system calls


class InUse(Exception):
    """Another run has the machine; the text says whose, for a person."""


def claim(run, holder):
    """A socket whose abstract name says run and holder while this process lives.

    /proc/net/unix shows it to every user of the machine (launcher/node/probe.py reads it there).
    """
    name = "/".join(["tandem", str(os.getpid()), plain(run), plain(holder)])
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mark.bind("\0" + name[:LONGEST])
    return mark


def plain(word):
    return re.sub(r"[^\w@.+-]", "-", word, flags=re.ASCII)


def claim_alone(run):
    """The socket that one guard on a machine has; None where another guard of this run has it.

    Two launchers that looked in the same second both found the machine free; the kernel lets only
    one of them have the name. Raises InUse for the other.
    """
    for _ in range(TRIES):
        mark = bind_alone()
        if mark is not None:
            return mark
        try:
            other, holder = owner()
        except ConnectionRefusedError:  # it begins or ends this very moment
            time.sleep(PAUSE)
            continue
        if other == plain(run):
            return None
        raise InUse("it is in use by {}: run {}".format(holder, other))
    raise InUse("it is in use by a process that does not say its run")


def bind_alone():
    """The socket with the name; None where somebody has it."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mark.bind(ALONE)
    except OSError as error:
        mark.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    mark.listen(socket.SOMAXCONN)  # nobody is ever accepted: asking who has it is all
    return mark


def owner():
    """(run, holder) of the guard that has the machine. Raises ConnectionRefusedError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.connect(ALONE)
        size = struct.calcsize("3i")
        answer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid = struct.unpack("3i", answer)[0]
    names = pathlib.Path("/proc/net/unix").read_text()
    found = re.search(r" @tandem/{}/([^/\n]+)/([^/\n]+)$".format(pid), names, re.MULTILINE)
    return found.groups() if found else ("unknown", "process {}".format(pid))
