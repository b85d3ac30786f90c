"""Asks silent ranks where they stand: on a signal from the guard, faulthandler in the rank's Python
writes the main thread's stack into a file (startup/sitecustomize.py).

This needs no cooperation of the rank: its main thread may wait in a collective. Only a stopped
process and one in uninterruptible I/O cannot answer. Their state, and the function in which the
kernel waits, say so.
"""

import contextlib
import os
import pathlib
import re
import signal
import time

from launcher.node.processes import PROC, stat_of

ANSWER = 5.0  # seconds that an answer may take on a busy machine
# Real-time signals: the others have meanings of their own, to Slurm, trainers and launchers.
SIGNAL = signal.SIGRTMIN + 9
MOST_BYTES = 1 << 17  # of an answer that are read
MOST_FRAMES, LONGEST = 30, 200  # frames of a stack, characters of a path or a name
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
STARTUP = str(pathlib.Path(__file__).resolve().parent / "startup")


def stacks_file(folder, rank):
    return pathlib.Path(folder) / "rank{}.stacks".format(rank)


def let_rank_answer(environment, folder, rank):
    """Change the environment of a rank's Python so that it answers, into a file of this folder."""
    environment["TANDEM_STACKS"] = "{}:{}".format(int(SIGNAL), stacks_file(folder, rank))
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = STARTUP + ":" + path if path else STARTUP


def has_handler(pid, number):
    """Return whether the process has a handler for this signal."""
    try:
        text = pathlib.Path("/proc/{}/status".format(pid)).read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def parse_stacks(text):
    """Return [frames of the stack], each [file, line, function], the deepest first; [] if there is
    no stack."""
    matches = [match.groups() for match in map(FRAME.match, text.splitlines()) if match]
    frames = [[path[-LONGEST:], int(number), name[:LONGEST]] for path, number, name in matches]
    return [frames[:MOST_FRAMES]] if frames else []


class Question:
    """Asks a rank once, in a silence that began at `silent_since`. `threads`: the stacks of its
    answer, empty until one comes."""

    def __init__(self, file, pid, silent_since, now, sums):
        self.file, self.pid, self.silent_since, self.asked_at = file, pid, silent_since, now
        self.sums = sums
        self.threads, self.is_complete = [], False
        self.offset = file.stat().st_size if file.exists() else 0
        # The signal ends a process that has no handler for it.
        self.can_answer = has_handler(pid, SIGNAL)
        if self.can_answer:
            os.kill(pid, SIGNAL)

    def state(self):
        """Return a letter as ps writes it: T for a stopped process; "" if it is gone."""
        stat = stat_of(self.pid)
        return stat.state if stat is not None else ""

    def is_settled(self, now):
        """Return whether the answer is complete, or none can be expected any more."""
        if self.can_answer and not self.is_complete and self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self.offset)
                threads = parse_stacks(file.read(MOST_BYTES).decode(errors="replace"))
            # It is written frame by frame: complete once nothing has come between two looks.
            self.is_complete, self.threads = bool(threads) and threads == self.threads, threads
        is_late = now - self.asked_at >= ANSWER
        return self.is_complete or is_late or not self.can_answer or self.state() == "T"

    def entry(self):
        """Return what the record has of the silent rank."""
        entry = {"last": self.silent_since, "state": self.state(), "threads": self.threads}
        if self.sums:
            entry["sums"] = self.sums
        if entry["state"] == "D":
            with contextlib.suppress(OSError):
                entry["wait"] = (PROC / str(self.pid) / "wchan").read_text()[:LONGEST]
        return entry


class Stacks:
    """Asks the ranks of this node, once in each silence of `ask_after` seconds. `find_activity()`
    returns {rank: (pid, when it was last active by the monotonic clock, its counted sums)} of ranks
    that live."""

    def __init__(self, folder, ask_after, find_activity):
        self.folder, self.ask_after, self.find_activity = folder, ask_after, find_activity
        self.questions, self.recorded = {}, {}  # by rank: now, and in the last line

    def look(self, now, at_once=False):
        """Ask ranks that fell silent. Returns a line for the record if something has changed and no
        answer is to come: the silent ranks and where each stands; else None. `at_once`: all ranks
        count as silent. Raises OSError."""
        # A rank that ended silent keeps its question, so the line has it, too.
        for rank, (pid, last_activity, sums) in self.find_activity().items():
            if now - last_activity < self.ask_after and not at_once:
                self.questions.pop(rank, None)
            elif rank not in self.questions:
                file = stacks_file(self.folder, rank)
                self.questions[rank] = Question(file, pid, last_activity, now, sums)
        settled = [question.is_settled(now) for question in self.questions.values()]
        if self.questions == self.recorded or not all(settled):
            return None
        self.recorded = dict(self.questions)
        entries = {str(rank): question.entry() for rank, question in self.questions.items()}
        return {"kind": "stacks", "mono": now, "unix": round(time.time(), 3), "ranks": entries}
