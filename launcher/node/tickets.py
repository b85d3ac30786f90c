"""The queue of a machine: a file, its ticket, for each run that waits for it (docs/launcher.md).

They lie in a folder as /tmp, where everybody may write and nobody may remove what is another's. So
a ticket is of whoever its file belongs to, whatever it says; and it may say anything. It holds
while its run renews it, counted from the machine's boot: no clock of any machine plays a part.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import stat

from launcher.node.machine import boottime
from launcher.node.machine_lock import claims, name_of, plain

FOLDER = "/var/lib/tandem/queue"  # that provisioning makes
ELSEWHERE = "/tmp/tandem-queue"  # noqa: S108 (where it did not)
LEASE = 90.0  # seconds
LARGEST = 1 << 30  # number of a ticket: whoever takes more keeps nobody from having one
LONGEST, MOST = 1 << 12, 1000  # bytes of a ticket that are read; tickets
NAME = re.compile(r"[0-9A-Za-z][\w@+.-]{0,150}", re.ASCII)
BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
DAMAGED, BEFORE, SILENT = "it is damaged", "it is of a boot before", "its run renews it no more"


class Queue:
    """The tickets on this machine. Raises OSError where there can be none."""

    def __init__(self, folder="", elsewhere=ELSEWHERE):
        self.boot, self.now = BOOT.read_text().strip(), boottime()
        self.folder = pathlib.Path(folder or FOLDER)
        if not folder and not self.folder.is_dir():
            self.folder = pathlib.Path(elsewhere)
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
                self.folder.chmod(0o1777)
        mode = self.folder.lstat().st_mode
        if not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            raise NotADirectoryError(0, "it is no folder with a sticky bit", str(self.folder))

    def tickets(self):
        """All that are here: {name, number, user, holder, dead}, the last of which says why one
        counts no more; "" where it counts."""
        with os.scandir(str(self.folder)) as entries:
            shown = (entry.name for entry in entries if not entry.name.startswith("."))
            names = sorted(itertools.islice(shown, MOST))
        return [one for one in map(self._ticket, names) if one]

    def _ticket(self, name):
        path = self.folder / name
        try:
            info = path.lstat()
        except FileNotFoundError:  # taken back this moment
            return None
        user = plain(name_of(info.st_uid))
        damaged = {
            "name": plain(name)[:80],
            "number": 0,
            "user": user,
            "holder": "",
            "dead": DAMAGED,
        }
        try:
            number, holder, boot, until = self._read(path)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return damaged
        if not NAME.fullmatch(name):
            return damaged
        dead = "" if self.now <= until else SILENT
        dead = dead if boot == self.boot else BEFORE
        if info.st_uid == os.getuid() and (dead == BEFORE or self.now > until + LEASE):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return {"name": name, "number": number, "user": user, "holder": holder, "dead": dead}

    def _read(self, path):
        """Raises what a damaged one raises. Nothing is waited for, nor read elsewhere."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(str(path), flags), "rb") as file:  # noqa: PTH123 (a descriptor)
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("no file")
            said = json.loads(file.read(LONGEST).decode())
        number, until = said["number"], said["until"]
        if type(number) is not int or not 1 <= number <= LARGEST or type(until) is not float:
            raise ValueError("no ticket")
        if said["boot"] == self.boot and not until <= self.now + LEASE:  # NaN, too
            raise ValueError("no run holds one for so long")
        return number, plain(said["holder"])[:80], said["boot"], until

    def renew(self, name, number, holder):
        """Write one's own ticket: whole, so that nobody reads half. Raises OSError."""
        said = {"number": number, "holder": holder, "boot": self.boot, "until": self.now + LEASE}
        fresh = self.folder / ".{}.{}".format(name, os.getpid())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(str(fresh), flags, 0o644), "w") as file:  # noqa: PTH123
            file.write(json.dumps(said))
        try:
            fresh.replace(self.folder / name)
        except OSError:
            fresh.unlink()
            raise


def visit(mark, name, number, holder, held, folder=""):
    """Print, after the mark, all tickets; before that renew one's own, unless `number` is 0. One
    that is `held` and no longer here was taken away."""
    answer = {"tickets": [], "taken": False, "problem": ""}
    try:
        queue = Queue(folder)
        answer["taken"] = bool(held) and not os.path.lexists(str(queue.folder / name))
        if number and not answer["taken"]:
            queue.renew(name, number, holder)
        answer["tickets"] = queue.tickets()
    except OSError as error:
        answer["problem"] = plain_words(error)
    print(mark + json.dumps(answer), flush=True)


def remove(mark, names, folder=""):
    """Take these tickets away; print what came of each, "" where it is gone."""
    answer = {}
    for name in names:
        try:
            (Queue(folder).folder / name).unlink()
            answer[name] = ""
        except FileNotFoundError:
            answer[name] = ""
        except OSError as error:
            answer[name] = plain_words(error)
    print(mark + json.dumps(answer), flush=True)


def show_claims(mark):
    """Print the runs whose guards live here, after the mark."""
    print(mark + json.dumps(claims()), flush=True)


def plain_words(error):
    return "{}: {}".format(error.filename, error.strerror)
