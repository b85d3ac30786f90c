"""What the guard says about its machine, and how it words the machine's errors."""

import os
import platform
import pwd
import time

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOOTTIME = getattr(time, "CLOCK_BOOTTIME", 7)  # has a name since Python 3.7; counts sleep, too


def identity():
    """Which process on which machine this is."""
    python = platform.python_version()
    name = platform.node()
    return {"pid": os.getpid(), "hostname": name, "unix": time.time(), "python": python}


def boottime():
    """Seconds since boot, sleep included."""
    return time.clock_gettime(BOOTTIME)


def disk_free(folder):
    """Bytes an ordinary user may still write where the folder lies; None where that is unknown."""
    try:
        found = os.statvfs(str(folder))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def cause_of(error):
    """An error as one sentence."""
    if isinstance(error, OSError) and error.strerror:
        where = "{}: ".format(error.filename) if error.filename else ""
        return where + error.strerror
    return str(error)


def who():
    """Name and home of this user; a container may run under a user id that has neither."""
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        return str(os.getuid()), "/"
    return user.pw_name, user.pw_dir
