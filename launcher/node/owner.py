"""Finds signs that somebody uses this machine: `tandem away`, a person at its screen, or programs.
The guard starts `stream` in a process (`watch`), and the launcher runs `show` before a run.

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

LOOK_EVERY = 2.0  # seconds between two looks
GPUS_EVERY = 10.0  # seconds between two looks at the GPUs, since nvidia-smi takes a second
COMMAND_SECONDS = 5.0  # for one command
WINDOW = 10.0  # seconds over which the use of processors is averaged
# A machine that is used less counts as free: half a processor, and a tenth of a GPU.
BUSY_PROCESSORS, BUSY_GPU_PERCENT = 0.5, 10
# User ids below the first one are the system's. The other ids that are no person's are `nobody` and
# those that systemd makes for services.
FIRST_PERSON, NO_PERSONS = 1000, (65534, *range(61184, 65520))
SESSION_PROPERTIES = ("Seat", "Class", "Active", "IdleHint", "LockedHint")  # of logind


def output(argv):
    """Return the output of a command; "" if the command is missing or takes too long."""
    try:
        result = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.decode(errors="replace")


def sessions(ask=output):
    """Return {property: text} of each session that logind knows."""
    # `     2 1000 anna seat0 tty2`: the first word is the session's name.
    lines = ask(["loginctl", "list-sessions", "--no-legend"]).split("\n")
    names = [line.split()[0] for line in lines if line.strip()]
    if not names:
        return []
    properties = ["--property=" + name for name in SESSION_PROPERTIES]
    # A block of lines such as `Class=user` for each session, with an empty line between.
    blocks = ask(["loginctl", "show-session", *names, *properties]).split("\n\n")
    lines = [[line.partition("=") for line in block.split("\n")] for block in blocks]
    return [{name: value for name, equals, value in block if equals} for block in lines]


def is_at_seat(session):
    """Return whether somebody is at the screen of this session now."""
    seat, kind, active, idle, locked = [session.get(name, "") for name in SESSION_PROPERTIES]
    # The class of a login screen is not `user`. A desktop that never reports that it is idle or
    # locked counts as used while somebody is logged in.
    return (
        bool(seat) and kind.startswith("user") and active == "yes" and "yes" not in (idle, locked)
    )


def is_other_person(user):
    """Return whether this user id belongs to a person, and not to the user that trains."""
    return user >= FIRST_PERSON and user not in NO_PERSONS and user != os.getuid()


def user_of(pid):
    """Return the user id of a process; -1 if the process has ended."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return -1


def processor_seconds():
    """Return {(pid, tick of its start): processor seconds} of the processes of other people."""
    # The start distinguishes a process from a later process with the same pid.
    seconds = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or not is_other_person(user_of(entry.name)):
            continue
        stat = stat_of(entry.name)
        if stat is not None:
            seconds[entry.name, stat.start] = stat.seconds
    return seconds


def gpu_pids(ask=output):
    """Return the pids of processes that use at least BUSY_GPU_PERCENT of a GPU."""
    # `# gpu     pid  type    sm   mem ...` names the columns, and `# Idx       #   C/G     %     %`
    # has their units. `    0    4711     C    97    12 ...` is a process, `-` is an unknown value.
    columns, pids = [], []
    for line in ask(["nvidia-smi", "pmon", "-c", "1", "-s", "u"]).split("\n"):
        words = line.lstrip("#").split()
        if line.startswith("#"):
            columns = columns or [word.lower() for word in words]
        elif "sm" in columns and len(words) >= len(columns):
            row = dict(zip(columns, words))
            pid, percent = row.get("pid", ""), row["sm"]
            are_numbers = all(re.match("[0-9]{1,9}$", text) for text in (pid, percent))
            if are_numbers and int(percent) >= BUSY_GPU_PERCENT:
                pids.append(int(pid))
    return pids


class Signs:
    """Looks for the signs `names`, which are keys of CHECKS. `away`: the folder in which the
    command `tandem away` makes files."""

    def __init__(self, names, away, window=WINDOW):
        self.names = [name for name in CHECKS if name in names]
        self.away, self.window = pathlib.Path(away), window
        # The seconds of each process at the last look, and of all processes since the first look.
        self.last_seconds, self.total = None, 0.0
        self.totals = collections.deque()  # (time, total at that time), over the window
        self.is_gpu_used, self.next_gpu_look = False, 0.0

    def find(self):
        """Return the first sign that somebody uses the machine, or ""."""
        return next((name for name in self.names if CHECKS[name](self)), "")

    def has_opted_out(self):
        """Return whether a user typed `tandem away`, and not `tandem back` since then."""
        # Each user who opts out has a file in the folder.
        try:
            return any(True for _ in self.away.iterdir())
        except OSError:
            return False

    def has_busy_processors(self):
        """Return whether processes of other people used more than BUSY_PROCESSORS."""
        time_now, seconds = time.monotonic(), processor_seconds()
        # All seconds of a new process count, unless this is the first look. A process that began
        # and ended between two looks is not seen.
        if self.last_seconds is not None:
            for process, used_seconds in seconds.items():
                self.total += max(0.0, used_seconds - self.last_seconds.get(process, 0.0))
        self.last_seconds = seconds
        self.totals.append((time_now, self.total))
        # The oldest entry has to be at least the window's length ago, and the next one less.
        while len(self.totals) > 2 and time_now - self.totals[1][0] >= self.window:
            self.totals.popleft()
        window_start, start_total = self.totals[0]
        passed = time_now - window_start
        return passed >= self.window and self.total - start_total > BUSY_PROCESSORS * passed

    def has_busy_gpu(self):
        """Return whether another person's process uses a GPU."""
        time_now = time.monotonic()
        if time_now >= self.next_gpu_look:
            self.is_gpu_used = any(is_other_person(user_of(pid)) for pid in gpu_pids())
            self.next_gpu_look = time_now + GPUS_EVERY
        return self.is_gpu_used


# {sign, by its name in boundary/answers.py: check}. The first sign whose check is true is reported.
CHECKS = {
    "asked": Signs.has_opted_out,
    "seat": lambda signs: any(map(is_at_seat, sessions())),
    "processors": Signs.has_busy_processors,
    "card": Signs.has_busy_gpu,
}


def stream(names, away):
    """Print the present sign, or an empty line for none, at the start and whenever it changes."""
    signs, printed_sign = Signs(names, away), None
    while True:
        sign = signs.find()
        if sign != printed_sign:
            print(sign, flush=True)
            printed_sign = sign
        time.sleep(LOOK_EVERY)


def show(mark, names, away):
    """Print the present sign as a line of JSON after a mark."""
    signs = Signs(names, away, LOOK_EVERY)
    sign = signs.find()
    # The use of processors is only known after two looks.
    if not sign and "processors" in names:
        time.sleep(LOOK_EVERY)
        sign = signs.find()
    print(mark + json.dumps({"sign": sign}), flush=True)


def watch(names, away):
    """Start a process that prints these signs for as long as the guard lives. Raises OSError."""
    # In another process, because its commands may hang, and the guard must not hang.
    root = str(pathlib.Path(__file__).resolve().parents[2])
    code = (
        "import sys; sys.path[0] = {!r}; from launcher.node import owner; owner.stream({!r}, {!r})"
    ).format(root, list(names), away)
    return LineProcess([sys.executable, "-IB", "-c", code])
