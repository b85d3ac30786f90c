"""Whether somebody uses this machine: what its owner said, who sits at it, whose programs run.

The user that trains is Tandem's own: what runs as another person counts, and what the system does
does not.
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
CARDS_EVERY = 10.0  # nvidia-smi takes a second
PATIENCE = 5.0  # for one command
WINDOW = 10.0  # over which the use of processors is a mean
PROCESSORS, CARD = 0.5, 10  # how much is use: of one processor; percent of a card
# Users that are no persons: those of the system, nobody, and those that systemd makes for services.
FIRST_PERSON, NO_PERSONS = 1000, (65534, *range(61184, 65520))
SEAT = ("Seat", "Class", "Active", "IdleHint", "LockedHint")


def output(argv):
    """What a command prints; "" where there is no such command, or it takes too long."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def sessions(ask=output):
    """What logind says of each session: {property: text}."""
    listed = [
        line.split() for line in ask(["loginctl", "list-sessions", "--no-legend"]).split("\n")
    ]
    names = [words[0] for words in listed if words]
    if not names:
        return []
    properties = ["--property=" + name for name in SEAT]
    blocks = ask(["loginctl", "show-session", *names, *properties]).split("\n\n")
    lines = [[line.partition("=") for line in block.split("\n")] for block in blocks]
    return [{name: value for name, equals, value in block if equals} for block in lines]


def is_at_seat(session):
    """Whether somebody sits there now. A desktop that never tells that it is idle or locked is in
    use for as long as somebody is logged in; a login screen is not."""
    told = [session.get(name, "") for name in SEAT]
    seat, kind, active, idle, locked = told
    return (
        bool(seat) and kind.startswith("user") and active == "yes" and "yes" not in (idle, locked)
    )


def is_other(user):
    """Whether this is a person who is not the user that trains."""
    return user >= FIRST_PERSON and user not in NO_PERSONS and user != os.getuid()


def owner_of(pid):
    """The user id of a process; -1 where it is gone."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return -1


def spent():
    """Seconds of processors that each process of others has had: {(pid, its start): seconds}."""
    found = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or not is_other(owner_of(entry.name)):
            continue
        stat = stat_of(entry.name)
        if stat is not None:
            found[entry.name, stat.start] = stat.seconds
    return found


def busy_cards(ask=output):
    """Pids that use a GPU over the limit, as programs that compute or that draw."""
    columns, found = [], []
    for line in ask(["nvidia-smi", "pmon", "-c", "1", "-s", "u"]).split("\n"):
        words = line.lstrip("#").split()
        if line.startswith("#"):
            columns = columns or [word.lower() for word in words]
        elif "sm" in columns and len(words) >= len(columns):
            row = dict(zip(columns, words))
            pid, share = row.get("pid", ""), row["sm"]
            if re.match("[0-9]{1,9}$", pid) and re.match("[0-9]{1,9}$", share):
                found += [int(pid)] if int(share) >= CARD else []
    return found


class Signs:
    """Looks for those of CHECKS that are named; `away` is the folder of the command `tandem`."""

    def __init__(self, names, away, window=WINDOW):
        self.names = [name for name in CHECKS if name in names]
        self.away, self.window = pathlib.Path(away), window
        self.before, self.total, self.totals = None, 0.0, collections.deque()
        self.card, self.next_card = False, 0.0

    def present(self):
        """The first sign of somebody's use, or ""."""
        return next((name for name in self.names if CHECKS[name](self)), "")

    def asked(self):
        """Whether anybody said `tandem away`, and has not taken it back."""
        try:
            return any(True for _ in self.away.iterdir())
        except OSError:
            return False

    def seat(self):
        return any(map(is_at_seat, sessions()))

    def processors(self):
        """Whether others had more of the processors than the limit, in the last seconds. What
        began since the last look counts whole; what began and ended since is not seen."""
        now, new = time.monotonic(), spent()
        if self.before is not None:
            old = self.before
            self.total += sum(max(0.0, one - old.get(key, 0.0)) for key, one in new.items())
        self.before = new
        self.totals.append((now, self.total))
        while len(self.totals) > 2 and now - self.totals[1][0] >= self.window:
            self.totals.popleft()
        begun, then = self.totals[0]
        passed = now - begun
        return passed >= self.window and self.total - then > PROCESSORS * passed

    def cards(self):
        now = time.monotonic()
        if now >= self.next_card:
            self.card = any(is_other(owner_of(pid)) for pid in busy_cards())
            self.next_card = now + CARDS_EVERY
        return self.card


# In the order in which they are told, by the names that the control side knows.
CHECKS = {
    "asked": Signs.asked,
    "seat": Signs.seat,
    "processors": Signs.processors,
    "card": Signs.cards,
}


def stream(names, away):
    """Print the sign that there is, or an empty line: first, and whenever that changes."""
    signs, told = Signs(names, away), None
    while True:
        now = signs.present()
        if now != told:
            print(now, flush=True)
            told = now
        time.sleep(LOOK_EVERY)


def show(mark, names, away):
    """Print the sign that there is now, after a mark."""
    signs = Signs(names, away, LOOK_EVERY)
    now = signs.present()
    if not now and "processors" in names:
        time.sleep(LOOK_EVERY)
        now = signs.present()
    print(mark + json.dumps({"sign": now}), flush=True)


def watch(names, away):
    """A process that tells these signs for as long as the guard lives: commands that it asks may
    hang, and the guard must not."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    text = "import sys; sys.path[0] = {!r}; from launcher.node import owner as one; "
    text += "one.stream({!r}, {!r})"
    return LineProcess([sys.executable, "-IB", "-c", text.format(root, list(names), away)])
