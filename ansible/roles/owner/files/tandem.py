#!/usr/bin/python3
"""Let the owner of a PC that trains for others see who uses it, and say no: the command `tandem`.

Role owner copies this file to machines as /usr/local/bin/tandem, so it has to run on Python 3.6. It
needs no rights: `tandem away` creates a file in AWAY, and the node's guard ends its run when that
folder has a file (launcher/node/owner.py).
"""

import contextlib
import os
import pathlib
import pwd
import re
import subprocess
import sys
import time

AWAY = pathlib.Path("/var/lib/tandem/away")
TEXT = pathlib.Path("/usr/local/share/tandem/owner.txt")
# The socket name of a guard with its run (launcher/node/machine_lock.py). Any user may claim such a
# name. Groups: process, run and user, as in " @tandem/4711/20261120T091231Z-resnet50/anna".
RUN = re.compile(r" @tandem/(\d{1,10})/([\w@.+-]{1,80})/([\w@.+-]{1,80})$", re.MULTILINE)
RUNS_LISTED = 20
SESSION_FIELDS = ["Seat", "Class", "Desktop", "Type", "IdleSinceHint", "Name"]


def output(argv):
    """Return a command's output; "" if there is no such command."""
    try:
        process = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.decode(errors="replace").strip()


def account(uid):
    """Return the name of a user by the number."""
    # Users can choose the names of files and LOGNAME, but not the number of their account.
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "user {}".format(uid)


def owner(path):
    """Return the owner of a file, or of a link itself; "" if it does not exist."""
    try:
        return account(path.lstat().st_uid)
    except OSError:
        return ""


def files():
    """List the files in the folder where people say no."""
    try:
        return sorted(AWAY.iterdir())
    except OSError:
        return []


def own_files():
    """List the files with which this user said no."""
    return [path for path in files() if owner(path) == account(os.getuid())]


def refusals():
    """Return {user who said no: day and time}."""
    times = {}
    for path in files():
        with contextlib.suppress(OSError):  # the owner may remove it at this moment
            changed = time.localtime(path.lstat().st_mtime)
            times[owner(path)] = time.strftime("%A %H:%M, %d %B", changed)
    return times


def runs():
    """Return a line for each run on this PC."""
    text = pathlib.Path("/proc/net/unix").read_text(errors="replace")
    claims = sorted(set(RUN.findall(text)))
    listed = claims[:RUNS_LISTED]
    pids = ",".join(pid for pid, _, _ in listed)
    # " 4711 Fri Nov 20 09:12:31 2026": the process and its start.
    printed = output(["ps", "-o", "pid=,lstart=", "-p", pids]) if pids else ""
    starts = dict(line.split(None, 1) for line in printed.split("\n") if " " in line.strip())
    lines = []
    for pid, run, user in listed:
        began = " since {}".format(starts[pid]) if pid in starts else ""
        lines.append("{} trains on it{} (run {}).".format(user, began, run))
    if len(claims) > RUNS_LISTED:
        lines.append("{} more users claim to train on it.".format(len(claims) - RUNS_LISTED))
    return lines


def print_users():
    """Print who uses this PC, since when, and how to say no: `tandem who`."""
    for line in runs() or ["Nobody trains on this PC now."]:
        print(line)
    for name, time_text in sorted(refusals().items()):
        text = (
            "{} typed `tandem away` on {}: nobody trains here until somebody types `tandem back`."
        )
        print(text.format(name, time_text))
    print()
    print(TEXT.read_text() if TEXT.exists() else "`tandem away` says no.")
    return 0


def report_error(path, error):
    reason = "{}: {}: ask the person who set up Tandem on this PC.".format(path, error.strerror)
    print(reason, file=sys.stderr)
    return 1


def say_no():
    """Forbid this PC to runs, and end the present run: `tandem away`."""
    path = AWAY / account(os.getuid())
    if not own_files():
        # Another user's file or link of this name is neither opened nor followed.
        if os.path.lexists(path):
            path = path.with_name("{}.{}".format(path.name, os.getpid()))
        try:
            os.close(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except OSError as error:
            return report_error(path, error)
    leaves = (
        "The run on this PC saves a checkpoint and ends, usually within 10 s and always within 45 s"
    )
    state = leaves if runs() else "No run is here"
    print("{}: no run uses this PC until you type `tandem back`.".format(state))
    return 0


def take_no_back():
    """Allow this PC to runs again: `tandem back`."""
    paths = own_files()
    for path in paths:
        try:
            path.unlink()
        except OSError as error:
            return report_error(path, error)
    if not paths:
        print("You had not said no.")
    names = ", ".join(sorted(refusals()))
    if names:
        text = "{} also typed `tandem away`: only that user or root can type `tandem back`."
        print(text.format(names))
    else:
        print("Training may use this PC again, as `tandem who` shows.")
    return 0


def describe_desktops():
    """Print if the desktops at this PC's seats tell systemd-logind when nobody uses them."""
    # A guard sees from this that nobody is at the machine. "2 1000 anna seat0 tty2" is a session.
    lines = output(["loginctl", "list-sessions", "--no-legend"]).split("\n")
    names = [line.split()[0] for line in lines if line]
    sessions = []
    for name in names:
        fields = ["--property=" + field for field in SESSION_FIELDS]
        argv = ["loginctl", "show-session", name, *fields]
        lines = [line.partition("=") for line in output(argv).split("\n")]
        session = {key: value for key, _, value in lines}
        if session.get("Seat") and session.get("Class", "").startswith("user"):
            sessions.append(session)
    for session in sessions:
        which = session.get("Desktop") or session.get("Type") or "session"
        if session.get("IdleSinceHint", "0") != "0":
            text = "{}'s {} reports to systemd-logind when it is idle."
        else:
            text = (
                "{}'s {} has not reported to systemd-logind yet that it is idle: if it never does, "
            )
            text += "lock it on leaving; else this PC counts as used while they are logged in."
        print(text.format(session.get("Name", "somebody"), which))
    if not sessions:
        print(
            "Nobody is logged in at a screen, so Tandem does not know yet if the desktop "
            "reports that it is idle."
        )
    return 0


VERBS = {"who": print_users, "away": say_no, "back": take_no_back, "desktop": describe_desktops}


def main(words):
    if len(words) == 1 and words[0] in VERBS:
        return VERBS[words[0]]()
    print("tandem who: shows who uses this PC, and how to stop that", file=sys.stderr)
    print("tandem away: nobody may train here; tandem back: they may again", file=sys.stderr)
    print("tandem desktop: shows if your desktop reports that nobody uses it", file=sys.stderr)
    return 0 if words in (["help"], ["--help"], ["-h"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
