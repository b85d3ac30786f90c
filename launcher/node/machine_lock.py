"""Claims a machine for a run, and shows the claim to all users of the machine. A claim is the
abstract name of a socket, which the kernel releases when the guard's process ends. The guard
claims, and probe.py lists the claims."""

import errno
import itertools
import os
import pathlib
import pwd
import re
import socket
import struct
import time

from launcher.node.machine import boottime
from launcher.node.processes import TICK, stat_of

LONGEST = 107  # bytes of a name, without the leading NUL
ALONE = "\0tandem-alone"  # the name that only one guard on a machine can have
MOST_RUNS = 100  # in an answer: any user may make any number of claims
# The holder of ALONE accepts no connection between its bind() and listen(), so try again.
TRIES, PAUSE_SECONDS = 100, 0.01


class InUse(Exception):
    """Another run has the machine; the text names its holder, for people."""


def claim(run, holder):
    """Return a socket whose abstract name, tandem/PID/RUN/HOLDER, exists while this process lives.
    /proc/net/unix shows this name to every user of the machine."""
    name = "/".join(["tandem", str(os.getpid()), plain(run), plain(holder)])
    named_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    named_socket.bind("\0" + name[:LONGEST])
    return named_socket


def claims():
    """Return a dictionary for each run whose guard lives on this machine."""
    # `0000000000000000: 00000002 00000000 00000000 0002 01 32094 @tandem/4711/RUN/HOLDER`. Any user
    # may take any name, of any bytes, so only names of this form count.
    names = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    word = r"/([\w@.+-]+)"
    matches = re.finditer(r" @tandem/(\d{1,9})" + word + word + "$", names, re.ASCII | re.MULTILINE)
    runs = []
    for match in itertools.islice(matches, MOST_RUNS):
        pid, run, holder = match.groups()
        # The run is as old as its guard, and 0 seconds old if the guard's start is unknown.
        stat = stat_of(pid)
        age = boottime() - int(stat.start) * TICK if stat is not None else 0
        runs.append({"pid": int(pid), "run": run, "holder": holder, "seconds": max(0, int(age))})
    return runs


def plain(word):
    """Replace characters that may not be in a word of a claim."""
    return re.sub(r"[^\w@.+-]", "-", word, flags=re.ASCII)


def claim_alone(run):
    """Return a socket with the name ALONE, or None if another guard of this run has that name.
    Raises InUse if another run has it, and OSError.

    Two launchers that probe a machine in the same second both find the machine free. But the kernel
    gives the name to only one guard.
    """
    for _ in range(TRIES):
        named_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            named_socket.bind(ALONE)
            # No connection is ever accepted: a client that waits can already ask for the pid.
            named_socket.listen(socket.SOMAXCONN)
            return named_socket
        except OSError as error:
            named_socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
        try:
            uid, holder_run, holder = find_holder()
        except ConnectionRefusedError:  # the holder begins or ends at this moment
            time.sleep(PAUSE_SECONDS)
            continue
        except BlockingIOError:  # a full queue: the holder is not a guard, or is frozen
            break
        # Any user may take the name and make any claim. So the holder's claim to belong to this run
        # counts only if the holder's user is the run's user.
        if uid != os.getuid():
            try:
                user_name = pwd.getpwuid(uid).pw_name
            except KeyError:
                user_name = str(uid)
            holder = "{} (user {})".format(holder, user_name)
        elif holder_run == plain(run):
            return None
        raise InUse("it is in use by {}: run {}".format(holder, holder_run))
    raise InUse("it is in use by a process that does not say its run")


def find_holder():
    """Return (user id, run, holder) of the process with the name ALONE. Raises
    ConnectionRefusedError, and BlockingIOError if its queue of connections is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # no listener may keep the guard from renewing its lease
        client.connect(ALONE)
        # struct ucred: process id, user id, group id.
        size = struct.calcsize("3i")
        answer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", answer)
    names = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    match = re.search(r" @tandem/{}/([^/\n]+)/([^/\n]+)$".format(pid), names, re.MULTILINE)
    run, holder = match.groups() if match else ("unknown", "process {}".format(pid))
    return uid, run, holder
