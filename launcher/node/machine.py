"""Describes the guard's machine and its errors, and hashes trees of files. By the hash the control
node knows whether this node has the same tree."""

import hashlib
import json
import os
import pathlib
import platform
import pwd
import time

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IN_JOB = "TANDEM_IN_JOB"  # in the environment of a guard that Slurm started
# A line that is printed at most once a second while a data set is read. After each line the control
# node waits 30 s more, because the first reading of a million files takes minutes on a disk.
PULSE = " " * 63 + "\n"
BOOTTIME = getattr(time, "CLOCK_BOOTTIME", 7)  # a clock that counts sleep; named since Python 3.7


class Pulse:
    """Shows the control node that long work continues."""

    def __init__(self):
        self.last_beat = time.monotonic()

    def beat(self):
        """Print PULSE, unless the last one is less than a second ago."""
        if time.monotonic() > self.last_beat + 1:
            self.last_beat = time.monotonic()
            print(PULSE, end="", flush=True)


def identity():
    """Return which process on which machine this is, as fields of the `hello` frame."""
    python = platform.python_version()
    name = platform.node()
    return {"pid": os.getpid(), "hostname": name, "unix": time.time(), "python": python}


def boottime():
    """Return the seconds since boot, sleep included."""
    return time.clock_gettime(BOOTTIME)


def disk_free(folder):
    """Return the bytes that an ordinary user may still write in this folder; None if unknown."""
    try:
        status = os.statvfs(str(folder))
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def cause_of(error):
    """Return the text of an error for people."""
    if isinstance(error, OSError) and error.strerror:
        prefix = "{}: ".format(error.filename) if error.filename else ""
        return prefix + error.strerror
    return str(error)


def current_user():
    """Return this user's name and home."""
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:  # a container may run under a user id that has neither
        return str(os.getuid()), "/"
    return user.pw_name, user.pw_dir


def tree_sha256(root, names=None):
    """Return the SHA-256 over the names and contents of the files `names` (all files if None) below
    the Path `root`; None if there is no such folder. Raises OSError.

    For each file, in the order of the names: name, NUL, "x" or "-" (executable), NUL, SHA-256 of
    the contents, newline.
    """
    if not root.is_dir():
        return None
    # Python may have written caches into the tree since the tree was made.
    if names is None:
        files = [path for path in root.rglob("*") if path.is_file()]
        names = [str(path.relative_to(root)) for path in files if "__pycache__" not in path.parts]
    total = hashlib.sha256()
    for name in sorted(names):
        path = root / name
        mode = "x" if path.stat().st_mode & 0o100 else "-"
        total.update("{}\0{}\0{}\n".format(name, mode, file_sha256(path)).encode())
    return total.hexdigest()


def file_sha256(path):
    """Return the SHA-256 of a file's contents, in hex. Raises OSError."""
    # A file may be larger than memory, so it is read in pieces.
    contents = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            contents.update(piece)
    return contents.hexdigest()


def show(mark, folder):
    """Print the hash of a folder's tree ("" without a folder) after `mark`, by which the control
    node finds the hash among other output."""
    print(mark + json.dumps(tree_sha256(pathlib.Path(folder)) or ""))
