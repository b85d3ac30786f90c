"""Where silent ranks stand: the guard asks each by a signal, on which its Python's faulthandler
writes the stack of the main thread, which the kernel gives it to, into a file
(startup/sitecustomize.py). Nothing of the rank has to
run for that, not even its main thread, which may wait in a collective; only a stopped process
cannot answer, and its state says why."""

import os
import pathlib
import re
import signal
import time

from launcher.node.processes import stat_of

ANSWER = 5.0  # seconds that an answer may take on a busy machine
# Real-time signals: the others have meanings of their own, to Slurm, trainers and launchers.
SIGNAL = signal.SIGRTMIN + 9
MOST_BYTES = 1 << 17  # of an answer that are read
MOST_FRAMES, LONGEST = 30, 200
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
STARTUP = str(pathlib.Path(__file__).resolve().parent / "startup")


def stacks_file(folder, rank):
    return pathlib.Path(folder) / "rank{}.stacks".format(rank)


def let_rank_answer(environment, folder, rank):
    """Change the environment of a rank's Python so that it answers, into a file of this folder."""
    environment["TANDEM_STACKS"] = "{}:{}".format(int(SIGNAL), stacks_file(folder, rank))
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = STARTUP + ":" + others if others else STARTUP


def catches(pid, number):
    """Whether the process has a handler for this signal, which ends those that have none."""
    try:
        text = pathlib.Path("/proc/{}/status".format(pid)).read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def parse_stacks(text):
    """The stack: [its frames [file, line, function], deepest first]; [] where there is none."""
    found = [match.groups() for match in map(FRAME.match, text.splitlines()) if match]
    frames = [[path[-LONGEST:], int(number), name[:LONGEST]] for path, number, name in found]
    return [frames[:MOST_FRAMES]] if frames else []


class Question:
    """What a rank was asked in one silence, which began at `last`. `threads`: its answer, empty
    where none came."""

    def __init__(self, file, pid, last, now):
        self.file, self.pid, self.last, self.asked = file, pid, last, now
        self.threads, self.is_whole = [], False
        self.offset = file.stat().st_size if file.exists() else 0
        self.can_answer = catches(pid, SIGNAL)
        if self.can_answer:
            os.kill(pid, SIGNAL)

    def state(self):
        """As ps writes it: T for a process that is stopped, "" for one that is gone."""
        stat = stat_of(self.pid)
        return stat.state if stat is not None else ""

    def is_settled(self, now):
        """Whether its answer is here, or none is to be expected."""
        if self.can_answer and not self.is_whole and self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self.offset)
                threads = parse_stacks(file.read(MOST_BYTES).decode(errors="replace"))
            # It is written frame by frame: whole once nothing has come between two looks.
            self.is_whole, self.threads = bool(threads) and threads == self.threads, threads
        late = now - self.asked >= ANSWER
        return self.is_whole or late or not self.can_answer or self.state() == "T"

    def entry(self):
        return {"last": self.last, "state": self.state(), "threads": self.threads}


class Stacks:
    """Asks the ranks of this node, once in each silence of `ask_after` seconds. `active()` gives of
    each rank that lives its pid and when, by the monotonic clock, it was active last."""

    def __init__(self, folder, ask_after, active):
        self.folder, self.ask_after, self.active = folder, ask_after, active
        self.questions, self.recorded = {}, {}  # by rank; those of the last line

    def look(self, now, at_once=False):
        """A line for the record, where that has changed: the silent ranks, those that ended silent
        among them, and where each stands. None while an answer is to come. `at_once`: all ranks
        count as silent. Raises OSError."""
        for rank, (pid, last) in self.active().items():
            if now - last < self.ask_after and not at_once:
                self.questions.pop(rank, None)
            elif rank not in self.questions:
                self.questions[rank] = Question(stacks_file(self.folder, rank), pid, last, now)
        settled = [question.is_settled(now) for question in self.questions.values()]
        if self.questions == self.recorded or not all(settled):
            return None
        self.recorded = dict(self.questions)
        entries = {str(rank): question.entry() for rank, question in self.questions.items()}
        return {"kind": "stacks", "mono": now, "unix": round(time.time(), 3), "ranks": entries}
