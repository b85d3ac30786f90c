"""The digests of an attempt's guards: summed up, kept in the run's folder, and looked through for a
wait that rules."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract import digests, validate
from contract.digests import Least, RankSums, RunSums
from contract.text import seconds
from contract.validate import Invalid
from contract.waits import WORDS, MeanStep, largest_wait, mean_step
from launcher.background import Spool
from launcher.folders import write_whole
from launcher.node.digest import shallow
from launcher.plan.plan import Plan

# Lines of a file: beyond the first number the newest stay, and the others are thinned evenly.
MOST, NEWEST, OLDER = 3000, 1000, 500
EVALUATIONS = 500  # of an attempt, whose lines stay whatever their age
START = {"kind": validate.One(("start",)), "attempt": validate.NATURAL}


class Kept:
    """nodes/<host>/digest.jsonl, written from the thread of a spool. A disk that takes nothing
    loses lines, never the run."""

    def __init__(self, path: Path, spool: Spool):
        self._path, self._spool = path, spool
        self._lines: int | None = None
        self._most = MOST

    def add(self, line: dict[str, Any]) -> None:
        text = digests.dump(line) + "\n"
        self._spool.add(lambda: self._write(text), len(text))

    def _write(self, text: str) -> None:
        try:
            if self._lines is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._lines = sum(1 for _ in digests.read(self._path))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o644)
            try:
                whole = os.fstat(descriptor).st_size
                data = text.encode()
                if os.write(descriptor, data) < len(data):
                    os.ftruncate(descriptor, whole)  # no half line
                self._lines += 1
            finally:
                os.close(descriptor)
            if self._lines > self._most:
                left = thinned([line for _, line in digests.read(self._path)])
                write_whole(self._path, "".join(digests.dump(line) + "\n" for line in left))
                self._lines, self._most = len(left), max(MOST, len(left) + NEWEST)
        except OSError:
            return


def thinned(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest lines, and of the others those that stay for what they hold, and OLDER at even
    distances. Sums go on over what is left out."""
    older, newest = lines[:-NEWEST], lines[-NEWEST:]
    held = [line for line in older if "start" in line or "evaluated" in line]
    timed = [line for line in older if isinstance(line.get("unix"), (int, float))]
    times = [line["unix"] for line in timed]
    distance = (max(times) - min(times)) / OLDER if times else 0.0
    even, last = [], float("-inf")
    for line in timed:
        if abs(line["unix"] - last) >= distance:  # a clock may be put back
            even.append(line)
            last = line["unix"]
    kept = {id(line) for line in (*held, *even[:: 1 + len(even) // (2 * OLDER)])}
    return [line for line in older if id(line) in kept] + newest


class Machine:
    """One machine of the attempt."""

    def __init__(self, file: Kept):
        self.file = file
        self.ranks: set[int] = set()
        self.levels: dict[str, Any] = {}
        self.sums: dict[str, float] = {}
        self.disk_free: int | None = None
        self.mono: float | None = None
        self.evaluated: list[dict[str, Any]] = []
        self.changed = False


class Digests:
    """All that was told of an attempt. Nothing here waits for a disk."""

    def __init__(self, plan: Plan, folder: Path, spool: Spool):
        self.sums = RunSums(plan.attempt, plan.world_size)
        self._least = Least(plan.world_size)
        self._machines = {
            node.host: Machine(Kept(folder / "nodes" / node.host / digests.NAME, spool))
            for node in plan.nodes
        }
        self._evaluations = 0

    def begun(self, host: str, frame: dict[str, Any], payload: bytes) -> None:
        """A rank's start line. Raises Invalid."""
        line = validate.parse(payload)
        checked = validate.check(line, START, "start line")
        if checked["attempt"] != self.sums.attempt:
            raise Invalid(f"a start line of attempt {checked['attempt']}")
        if not shallow(line):
            raise Invalid("a start line of lists in lists in lists")
        size = {name: frame[name] for name in digests.SIZE}
        head = {"attempt": self.sums.attempt, "rank": frame["rank"], "unix": time.time()}
        self._machines[host].file.add({**head, "start": line, "machine": size})

    def take(self, host: str, frame: dict[str, Any]) -> None:
        """A digest: sums are made of each, however many come. Raises Invalid."""
        machine = self._machines[host]
        for row in digests.checked_rows(frame["ranks"]):
            machine.ranks.add(row["rank"])
            self.sums.ranks.setdefault(row["rank"], RankSums()).add(row)
            self._least.add(row)
            if row["evaluated"] is not None and self._evaluations < EVALUATIONS:
                self._evaluations += 1
                machine.evaluated.append({"rank": row["rank"], **row["evaluated"]})
        self.sums.least = self._least.sums
        passed = frame["mono"] - machine.mono if machine.mono is not None else 0.0
        if passed >= 0:
            machine.sums = digests.machine_sums(machine.sums, frame["machine"], passed)
            machine.mono = frame["mono"]
        machine.levels = {name: frame["machine"][name] for name in digests.LEVELS}
        machine.changed = True

    def free(self, host: str, disk: int | None) -> None:
        """Bytes that may still be written on a machine, as its guard's beat says."""
        self._machines[host].disk_free = disk

    def write(self, host: str) -> None:
        """Keep what is new of a machine in a line: to be called once a second, however many digests
        it sends."""
        machine = self._machines[host]
        if machine.changed:
            machine.changed = False
            machine.file.add(self._line(machine))
            machine.evaluated = []

    def _line(self, machine: Machine) -> dict[str, Any]:
        ranks = {str(rank): self.sums.ranks[rank].document() for rank in sorted(machine.ranks)}
        known = {**machine.levels, "disk_free": machine.disk_free}
        levels = {name: one for name, one in known.items() if one is not None}
        sums = {name: round(one, 4) for name, one in machine.sums.items()}
        line = {
            **{"attempt": self.sums.attempt, "unix": round(time.time(), 3), "mono": machine.mono},
            **{"world_size": self.sums.world, "ranks": ranks, "machine": levels, "sums": sums},
            "least": {name: [n, round(s, 4)] for name, (n, s) in self._least.sums.items()},
        }
        return {**line, "evaluated": machine.evaluated} if machine.evaluated else line


# A wait is named that ruled so many seconds, and so many steps.
LEAST_SECONDS, LEAST_STEPS = 60.0, 30
STEADY = 0.1  # by so much of its share a wait may differ between the halves of that time
KEPT = 720  # looks at the sums; of steps that take longer than 2 min nothing is said
LOOK_EVERY = 5.0  # seconds


class Ruling:
    """Looks through the sums of an attempt for a wait that rules. Each kind is said once."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._said: set[str] = set()
        self._looks: deque[tuple[float, RunSums]] = deque(maxlen=KEPT)
        self._next = float("-inf")

    def look(self, now: float, sums: RunSums) -> None:
        """To be called now and then; `now` is monotonic."""
        if now < self._next:
            return
        self._next = now + LOOK_EVERY
        while len(self._looks) > 1 and self._enough(now, sums, *self._looks[1]):
            self._looks.popleft()
        if self._looks and self._enough(now, sums, *self._looks[0]):
            self._judge(sums)
        # A look before all ranks are there is never enough, and would keep its place for an hour.
        if len(sums.ranks) == sums.world:
            self._looks.append((now, sums.copy()))

    def _judge(self, sums: RunSums) -> None:
        """Say what rules since the oldest look, if both halves of that time agree."""
        begin, middle = self._looks[0][1], self._looks[len(self._looks) // 2][1]
        parts = (sums.since(begin), middle.since(begin), sums.since(middle))
        steps = [step for step in map(mean_step, parts) if step is not None]
        kind, *others = {largest_wait(step.fractions) for step in steps} or {None}
        if len(steps) < len(parts) or others or kind is None or kind in self._said:
            return
        shares = [step.fractions[kind] for step in steps]
        if max(shares) - min(shares) <= STEADY * shares[0]:
            self._said.add(kind)
            self._say(f"{told(kind, steps[0])}; `make report` says what to do")

    @staticmethod
    def _enough(now: float, sums: RunSums, then: float, before: RunSums) -> bool:
        """Whether enough was done after a look."""
        if now - then < LEAST_SECONDS or not len(before.ranks) == len(sums.ranks) == sums.world:
            return False
        steps = [one.steps - before.ranks[rank].steps for rank, one in sums.ranks.items()]
        return min(steps) >= LEAST_STEPS


def told(kind: str, step: MeanStep) -> str:
    """`network: 1.2 of 1.4 s a step`"""
    wait, whole = getattr(step, kind), step.seconds + step.checkpoint
    return f"{WORDS[kind]}: {seconds(wait)} of {seconds(whole)} a step"
