"""Asks silent ranks for their stacks: on a signal from the guard, faulthandler in the rank's Python
writes the main thread's stack into a file (startup/sitecustomize.py). The guard calls Stacks.look.

A rank answers even if its main thread waits in a collective. Only a stopped process and a process
in uninterruptible I/O cannot answer. For these, the record has the state of the process, and the
function in which the kernel waits.
"""

import contextlib
import os
import pathlib
import re
import signal
import time

from launcher.node.processes import PROC, stat_of

ANSWER_SECONDS = 5.0  # for an answer, on a busy machine
# A real-time signal, because other signals have a meaning for Slurm, trainers or launchers.
SIGNAL = signal.SIGRTMIN + 9
MOST_BYTES = 1 << 17  # of an answer
MOST_FRAMES, LONGEST = 30, 200  # frames of a stack, characters of a path or a name
# A frame, as faulthandler prints it.
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
STARTUP = str(pathlib.Path(__file__).resolve().parent / "startup")


def stacks_file(folder, rank):
    """Return the path of the file into which a rank writes its stacks."""
    return pathlib.Path(folder) / "rank{}.stacks".format(rank)


def let_rank_answer(environment, folder, rank):
    """Change the environment of a rank's Python, so that it answers into a file in `folder`."""
    environment["TANDEM_STACKS"] = "{}:{}".format(int(SIGNAL), stacks_file(folder, rank))
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = STARTUP + ":" + path if path else STARTUP


def has_handler(pid, number):
    """Return whether the process has a handler for this signal."""
    try:
        text = pathlib.Path("/proc/{}/status".format(pid)).read_text()
    except OSError:
        return False
    # `SigCgt:\t0000000180004202` has bit 0 for signal 1.
    mask = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def parse_stacks(text):
    """Return a list with the frames of the main thread, each [file, line, function], the deepest
    first; [] if the text has no stack."""
    matches = [match.groups() for match in map(FRAME.match, text.splitlines()) if match]
    frames = [[path[-LONGEST:], int(number), name[:LONGEST]] for path, number, name in matches]
    return [frames[:MOST_FRAMES]] if frames else []


class Question:
    """Asks a rank once, in a silence that began at `silent_since`. `file`: the Path of its stacks.
    `sums`: its counted sums. `threads`: the stacks of the answer, [] until an answer comes."""

    def __init__(self, file, pid, silent_since, asked_at, sums):
        self.file, self.pid, self.silent_since, self.asked_at = file, pid, silent_since, asked_at
        self.sums = sums
        self.threads, self.is_complete = [], False
        # Earlier answers are in the file, too.
        self.offset = file.stat().st_size if file.exists() else 0
        # The signal would end a process that has no handler for it.
        self.can_answer = has_handler(pid, SIGNAL)
        if self.can_answer:
            os.kill(pid, SIGNAL)

    def state(self):
        """Return the process's state, a letter as in ps: T if it is stopped; "" if it is gone."""
        stat = stat_of(self.pid)
        return stat.state if stat is not None else ""

    def is_settled(self, time_now):
        """Return whether the answer is complete, or will not come any more."""
        if self.can_answer and not self.is_complete and self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self.offset)
                threads = parse_stacks(file.read(MOST_BYTES).decode(errors="replace"))
            # faulthandler writes frame by frame, so an answer that stays the same is complete.
            self.is_complete, self.threads = bool(threads) and threads == self.threads, threads
        is_late = time_now - self.asked_at >= ANSWER_SECONDS
        return self.is_complete or is_late or not self.can_answer or self.state() == "T"

    def entry(self):
        """Return the rank's entry in a `stacks` line of the record."""
        entry = {"last": self.silent_since, "state": self.state(), "threads": self.threads}
        if self.sums:
            entry["sums"] = self.sums
        if entry["state"] == "D":
            with contextlib.suppress(OSError):
                entry["wait"] = (PROC / str(self.pid) / "wchan").read_text()[:LONGEST]
        return entry


class Stacks:
    """Asks each rank of this node once in each silence of `ask_after` seconds. `find_activity()`
    returns {rank: (pid, monotonic time when it was last active, its sums)} of living ranks."""

    def __init__(self, folder, ask_after, find_activity):
        self.folder, self.ask_after, self.find_activity = folder, ask_after, find_activity
        # {rank: Question} of the present silences, and of the last line in the record.
        self.questions, self.recorded = {}, {}

    def look(self, time_now, at_once=False):
        """Ask ranks that fell silent. Returns a line for the record about all silent ranks, if they
        have changed and no more answers are expected; else None. `at_once`: ask all ranks, also
        those that are not silent. Raises OSError."""
        # A rank that has ended is not in the loop. So it keeps its question, and stays in the line.
        for rank, (pid, last_activity, sums) in self.find_activity().items():
            if time_now - last_activity < self.ask_after and not at_once:
                self.questions.pop(rank, None)
            elif rank not in self.questions:
                file = stacks_file(self.folder, rank)
                self.questions[rank] = Question(file, pid, last_activity, time_now, sums)
        settled = [question.is_settled(time_now) for question in self.questions.values()]
        if self.questions == self.recorded or not all(settled):
            return None
        self.recorded = dict(self.questions)
        entries = {str(rank): question.entry() for rank, question in self.questions.items()}
        return {"kind": "stacks", "mono": time_now, "unix": round(time.time(), 3), "ranks": entries}
