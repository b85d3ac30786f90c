"""Shows whoever asks who trains on a machine, by names that the kernel releases by itself."""

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

LONGEST = 107  # bytes of a name, the leading NUL apart
ALONE = "\0tandem-alone"
MOST_RUNS = 100  # that are told
TRIES, PAUSE = 100, 0.01  # seconds; a name has no listener for the moment between two system calls


class InUse(Exception):
    """Another run has the machine; the text says whose, for a person."""


def claim(run, holder):
    """A socket whose abstract name says run and holder while this process lives.

    /proc/net/unix shows it to every user of the machine, and the launcher's probe reads it.
    """
    name = "/".join(["tandem", str(os.getpid()), plain(run), plain(holder)])
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    mark.bind("\0" + name[:LONGEST])
    return mark


def claims():
    """The runs whose guards live on this machine, by the names that they claimed. Every user of the
    machine may take any name, of any bytes."""
    names = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    word = r"/([\w@.+-]+)"
    claimed = re.finditer(r" @tandem/(\d{1,9})" + word + word + "$", names, re.ASCII | re.MULTILINE)
    found = (match.groups() for match in itertools.islice(claimed, MOST_RUNS))
    return [
        {"pid": int(pid), "run": run, "holder": holder, "seconds": age_of(int(pid))}
        for pid, run, holder in found
    ]


def age_of(pid):
    """Whole seconds that a process has lived; 0 where that is not known."""
    try:
        line = pathlib.Path("/proc/{}/stat".format(pid)).read_text(errors="replace")
        ticks = int(line.rpartition(")")[2].split()[19])
    except (OSError, ValueError, LookupError):
        return 0
    return max(0, int(boottime() - ticks / os.sysconf("SC_CLK_TCK")))


def plain(word):
    return re.sub(r"[^\w@.+-]", "-", word, flags=re.ASCII)


def claim_alone(run):
    """The socket that only one guard on a machine can have; None where another guard of this run
    has it.

    Two launchers that look in the same second both find the machine free; the kernel lets only one
    of them have the name. Raises InUse for the other. Any local user may take the name and claim
    anything: the claim that this run already has the machine is believed only from the run's own
    user, and a holder that does not answer is not waited for.
    """
    for _ in range(TRIES):
        mark = bind_alone()
        if mark is not None:
            return mark
        try:
            user, other, holder = owner()
        except ConnectionRefusedError:  # the holder begins or ends this very moment
            time.sleep(PAUSE)
            continue
        except BlockingIOError:  # a full queue: the holder is not a guard, or is frozen
            break
        if user != os.getuid():
            holder = "{} (user {})".format(holder, name_of(user))
        elif other == plain(run):
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
    """(user id, run, holder) of whoever has the machine. Raises ConnectionRefusedError, and
    BlockingIOError when it accepts no connection now."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)  # the guard must come back to its lease, whoever listens there
        asking.connect(ALONE)
        size = struct.calcsize("3i")
        answer = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", answer)
    names = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    found = re.search(r" @tandem/{}/([^/\n]+)/([^/\n]+)$".format(pid), names, re.MULTILINE)
    run, holder = found.groups() if found else ("unknown", "process {}".format(pid))
    return user, run, holder


def name_of(user):
    """The name of a user id, or the id itself where it has none."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
