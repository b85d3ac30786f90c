"""What the guard says about its machine, how it words the machine's errors, and the hash by which
the control machine knows whether a node holds the same tree of files."""

import hashlib
import json
import os
import pathlib
import platform
import pwd
import time

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IN_JOB = "TANDEM_IN_JOB"  # in the environment of a guard that Slurm started
# What is printed at most once a second while a data set is read: for each the control machine waits
# 30 s more. The first reading of a million files takes minutes on a disk.
PULSE = " " * 63 + "\n"
BOOTTIME = getattr(time, "CLOCK_BOOTTIME", 7)  # has a name since Python 3.7; counts sleep, too


class Pulse:
    """Says that something goes on."""

    def __init__(self):
        self.last = time.monotonic()

    def beat(self):
        if time.monotonic() > self.last + 1:
            self.last = time.monotonic()
            print(PULSE, end="", flush=True)


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


def tree_sha256(root, names=None):
    """SHA-256 over the names and contents of these files below `root` (a Path), without `names` of
    all files there; None where there is no such folder.

    For each file, in the order of the names: name, NUL, "x" or "-" (executable), NUL, SHA-256 of
    the contents, newline.
    """
    if not root.is_dir():
        return None
    if names is None:
        files = [path for path in root.rglob("*") if path.is_file()]
        names = [str(path.relative_to(root)) for path in files if "__pycache__" not in path.parts]
    total = hashlib.sha256()
    for name in sorted(names):
        path = root / name
        mode = "x" if path.stat().st_mode & 0o100 else "-"  # which a mount without exec keeps
        total.update("{}\0{}\0{}\n".format(name, mode, file_sha256(path)).encode())
    return total.hexdigest()


def file_sha256(path):
    """The SHA-256 of a file's contents. Raises OSError."""
    contents = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            contents.update(piece)
    return contents.hexdigest()


def show(mark, folder):
    """Print the hash of a folder's tree, "" where there is none, after a mark by which it is found
    among other output."""
    print(mark + json.dumps(tree_sha256(pathlib.Path(folder)) or ""))
