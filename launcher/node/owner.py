"""Finds signs that somebody uses this machine: `tandem away`, a person at its screen, programs.

A separate user trains, so processes of other people count. Processes of the system do not.
"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from launcher.node.processes import PROC, LineProcess, stat_of

LOOK_EVERY = 2.0  # seconds
GPUS_EVERY = 10.0  # seconds; nvidia-smi takes one
PATIENCE = 5.0  # seconds for one command
WINDOW = 10.0  # seconds over which the use of processors is a mean
BUSY_PROCESSORS, BUSY_GPU_PERCENT = 0.5, 10  # a machine that is used less counts as free
# Users that are no persons: those of the system, nobody, and those that systemd makes for services.
FIRST_PERSON, NO_PERSONS = 1000, (65534, *range(61184, 65520))
SEAT = ("Seat", "Class", "Active", "IdleHint", "LockedHint")


def output(argv):
    """Return what a command prints; "" if there is no such command, or it takes too long."""
    try:
        result = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.decode(errors="replace")


def sessions(ask=output):
    """Return {property: text} of each session that logind knows."""
    lines = ask(["loginctl", "list-sessions", "--no-legend"]).split("\n")
    names = [line.split()[0] for line in lines if line.strip()]
    if not names:
        return []
    properties = ["--property=" + name for name in SEAT]
    blocks = ask(["loginctl", "show-session", *names, *properties]).split("\n\n")
    lines = [[line.partition("=") for line in block.split("\n")] for block in blocks]
    return [{name: value for name, equals, value in block if equals} for block in lines]


def is_at_seat(session):
    """Return whether somebody is at the screen of this session now."""
    seat, kind, active, idle, locked = [session.get(name, "") for name in SEAT]
    # A desktop that never reports that it is idle or locked is in use for as long as somebody is
    # logged in. A login screen has another class than `user`.
    return (
        bool(seat) and kind.startswith("user") and active == "yes" and "yes" not in (idle, locked)
    )


def is_other_person(user):
    """Return whether this user id is a person's, and not the one that trains."""
    return user >= FIRST_PERSON and user not in NO_PERSONS and user != os.getuid()


def user_of(pid):
    """Return the user id of a process; -1 if it is gone."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return -1


def processor_seconds():
    """Return {(pid, tick of its start): processor seconds} of the processes of other people."""
    seconds = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or not is_other_person(user_of(entry.name)):
            continue
        stat = stat_of(entry.name)
        if stat is not None:
            seconds[entry.name, stat.start] = stat.seconds
    return seconds


def gpu_pids(ask=output):
    """Return the pids of processes that use a GPU above the limit, to compute or to draw."""
    columns, pids = [], []
    for line in ask(["nvidia-smi", "pmon", "-c", "1", "-s", "u"]).split("\n"):
        words = line.lstrip("#").split()
        if line.startswith("#"):
            columns = columns or [word.lower() for word in words]
        elif "sm" in columns and len(words) >= len(columns):
            row = dict(zip(columns, words))
            pid, percent = row.get("pid", ""), row["sm"]
            if re.match("[0-9]{1,9}$", pid) and re.match("[0-9]{1,9}$", percent):
                pids += [int(pid)] if int(percent) >= BUSY_GPU_PERCENT else []
    return pids


class Signs:
    """Looks for the signs `names` (of CHECKS). `away` is the folder of the command `tandem`."""

    def __init__(self, names, away, window=WINDOW):
        self.names = [name for name in CHECKS if name in names]
        self.away, self.window = pathlib.Path(away), window
        self.last_seconds, self.total = None, 0.0
        self.totals = collections.deque()  # (time, total then), over the window
        self.is_gpu_used, self.next_gpu_look = False, 0.0

    def find(self):
        """Return the first sign that somebody uses the machine, or ""."""
        return next((name for name in self.names if CHECKS[name](self)), "")

    def has_opted_out(self):
        """Return whether somebody typed `tandem away`, and has not taken it back."""
        # Each user who opts out has a file there.
        try:
            return any(True for _ in self.away.iterdir())
        except OSError:
            return False

    def has_busy_processors(self):
        """Return whether processes of other people used more than BUSY_PROCESSORS over the
        window."""
        now, seconds = time.monotonic(), processor_seconds()
        # All seconds of a process that is new count. A process that began and ended since the last
        # look is not seen.
        before = self.last_seconds
        if before is not None:
            self.total += sum(
                max(0.0, used - before.get(process, 0.0)) for process, used in seconds.items()
            )
        self.last_seconds = seconds
        self.totals.append((now, self.total))
        while len(self.totals) > 2 and now - self.totals[1][0] >= self.window:
            self.totals.popleft()
        window_start, total_then = self.totals[0]
        passed = now - window_start
        return passed >= self.window and self.total - total_then > BUSY_PROCESSORS * passed

    def has_busy_gpu(self):
        now = time.monotonic()
        if now >= self.next_gpu_look:
            self.is_gpu_used = any(is_other_person(user_of(pid)) for pid in gpu_pids())
            self.next_gpu_look = now + GPUS_EVERY
        return self.is_gpu_used


# By the names that the control side knows. The first that is true is reported.
CHECKS = {
    "asked": Signs.has_opted_out,
    "seat": lambda signs: any(map(is_at_seat, sessions())),
    "processors": Signs.has_busy_processors,
    "card": Signs.has_busy_gpu,
}


def stream(names, away):
    """Print the present sign, or an empty line: at the start, and whenever it changes."""
    signs, printed_sign = Signs(names, away), None
    while True:
        sign = signs.find()
        if sign != printed_sign:
            print(sign, flush=True)
            printed_sign = sign
        time.sleep(LOOK_EVERY)


def show(mark, names, away):
    """Print the present sign after a mark."""
    signs = Signs(names, away, LOOK_EVERY)
    sign = signs.find()
    # The use of processors needs two looks.
    if not sign and "processors" in names:
        time.sleep(LOOK_EVERY)
        sign = signs.find()
    print(mark + json.dumps({"sign": sign}), flush=True)


def watch(names, away):
    """Start a process that prints these signs for as long as the guard lives. Raises OSError."""
    # In a process of its own: the commands that it runs may hang, and the guard must not.
    root = str(pathlib.Path(__file__).resolve().parents[2])
    text = "import sys; sys.path[0] = {!r}; from launcher.node import owner; "
    text += "owner.stream({!r}, {!r})"
    return LineProcess([sys.executable, "-IB", "-c", text.format(root, list(names), away)])
