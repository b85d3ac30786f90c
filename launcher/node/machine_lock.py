"""Shows every user of a machine who trains there, by names that the kernel releases when their
process ends."""

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

LONGEST = 107  # bytes of a name, the leading NUL apart
ALONE = "\0tandem-alone"
MOST_RUNS = 100  # listed in an answer; any user may claim any number
# A name has no listener between bind() and listen() of its owner.
TRIES, PAUSE_SECONDS = 100, 0.01


class InUse(Exception):
    """Another run has the machine; the text names its holder, for people."""


def claim(run, holder):
    """Return a socket whose abstract name has the run and its holder while this process lives.

    /proc/net/unix shows the name to every user of the machine, and the launcher's probe reads it.
    """
    name = "/".join(["tandem", str(os.getpid()), plain(run), plain(holder)])
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mark.bind("\0" + name[:LONGEST])
    return mark


def claims():
    """Return the runs whose guards live on this machine, a dictionary each, by their claims."""
    names = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    # Every user of the machine may take any name, of any bytes: only names of this form count.
    word = r"/([\w@.+-]+)"
    matches = re.finditer(r" @tandem/(\d{1,9})" + word + word + "$", names, re.ASCII | re.MULTILINE)
    runs = []
    for match in itertools.islice(matches, MOST_RUNS):
        pid, run, holder = match.groups()
        # The run is as old as its guard. An age that is unknown is 0.
        stat = stat_of(pid)
        age = boottime() - int(stat.start) * TICK if stat is not None else 0
        runs.append({"pid": int(pid), "run": run, "holder": holder, "seconds": max(0, int(age))})
    return runs


def plain(word):
    return re.sub(r"[^\w@.+-]", "-", word, flags=re.ASCII)


def claim_alone(run):
    """Return the socket that only one guard on a machine can have; None if another guard of this
    run has it. Raises InUse if another run has it.

    Two launchers that look in the same second both find the machine free, and the kernel lets only
    one of them have the name.
    """
    for _ in range(TRIES):
        mark = bind_alone()
        if mark is not None:
            return mark
        try:
            user, holder_run, holder = find_holder()
        except ConnectionRefusedError:  # the holder begins or ends this very moment
            time.sleep(PAUSE_SECONDS)
            continue
        except BlockingIOError:  # a full queue: the holder is not a guard, or is frozen
            break
        # Any local user may take the name and claim anything: that this run already has the machine
        # is believed only of a process of the run's user.
        if user != os.getuid():
            try:
                user_name = pwd.getpwuid(user).pw_name
            except KeyError:
                user_name = str(user)
            holder = "{} (user {})".format(holder, user_name)
        elif holder_run == plain(run):
            return None
        raise InUse("it is in use by {}: run {}".format(holder, holder_run))
    raise InUse("it is in use by a process that does not say its run")


def bind_alone():
    """Return the socket with the name; None if another process has it. Raises OSError."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mark.bind(ALONE)
    except OSError as error:
        mark.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    # No connection is ever accepted: one that waits can already ask for its peer's pid.
    mark.listen(socket.SOMAXCONN)
    return mark


def find_holder():
    """Return (user id, run, holder) of the process that has the machine. Raises
    ConnectionRefusedError, and BlockingIOError if it accepts no connection now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # the guard must come back to its lease, whoever listens there
        client.connect(ALONE)
        size = struct.calcsize("3i")
        answer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", answer)
    names = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    match = re.search(r" @tandem/{}/([^/\n]+)/([^/\n]+)$".format(pid), names, re.MULTILINE)
    run, holder = match.groups() if match else ("unknown", "process {}".format(pid))
    return user, run, holder
