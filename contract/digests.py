"""What guards tell of a run while it goes on: its shape, the sums that are made of it, and the
lines of nodes/<host>/digest.jsonl, in which the launcher keeps these for status, top and the report
(docs/run-directory.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract import validate
from contract.validate import NATURAL, Each, Invalid, Maybe, One, Row

NAME = "digest.jsonl"
# Of the times of a digest, which are told in this order, in ticks (launcher/node/digest.py).
CATEGORIES = (
    "data",
    "h2d",
    "forward",
    "backward",
    "sync_exposed",
    "optimizer",
    "evaluate",
    "checkpoint",
    "other",
)
TICK = 1e-4  # seconds
# The first step of a rank, which also warms up, then those of a strategy's warm-up and the others.
STEPS = ("first", "exact", "steady")
PHASES = (*STEPS, "beside")  # lines that are no steps: evaluating, saving
MOST = 1000  # steps in a row of a digest
EVALUATED = dict.fromkeys(("epoch", "top1", "top5", "loss", "train_loss"), Maybe(float))
# A rank's row of a digest, without its rank.
ROW: dict[str, object] = {
    "phase": Maybe(One(STEPS)),
    **dict.fromkeys(("step", "epoch", "samples"), Maybe(NATURAL)),
    "steps": Maybe(One(range(1, MOST + 1))),
    **dict.fromkeys(("spent", "beside", "waits"), Maybe([NATURAL])),
    **dict.fromkeys(("loss", "top1"), Maybe(float)),
    "evaluated": Maybe(EVALUATED),
}
# What a row has all of, or nothing.
OF_STEPS = ("phase", "step", "epoch", "steps", "samples", "spent", "waits")
# How a machine is. `gpus`: index, percent, bytes, degrees Celsius, watts, MHz.
GPU = Row((NATURAL, *((float, None),) * 5))
SIZE: dict[str, object] = dict.fromkeys(("cores", "memory"), Maybe(NATURAL))
LEVELS: dict[str, object] = {
    "threads": Maybe(Each(Row((float, float)))),
    **dict.fromkeys(("memory", "temperature"), Maybe(float)),
    "swap": Maybe(NATURAL),
    "gpus": Maybe([GPU]),
}
MACHINE: dict[str, object] = {
    **LEVELS,
    **{"cpu": Maybe(float), "stalled": Maybe(float), "swapped": Maybe(Row((NATURAL, NATURAL)))},
    "share": Maybe(NATURAL),
    "disk": Maybe(Row((float, NATURAL, NATURAL))),
    "card": Maybe(Row((NATURAL,) * 4)),
}
# What is summed up of machines since the attempt began: the seconds, of them those in which
# processors and the disk were busy, and what was counted.
SUMS = (
    *("seconds", "cpu", "busy", "read", "written", "share", "received", "sent", "again", "dropped"),
    *("stalled", "swapped_in", "swapped_out"),
)
PHASE = {"steps": NATURAL, "seconds": Each(float)}
RANK: dict[str, object] = {
    **dict.fromkeys(("step", "epoch", "samples"), NATURAL),
    **dict.fromkeys(("loss", "top1"), (None, float)),
    **dict.fromkeys(PHASES, PHASE),
}
LINE: dict[str, object] = {
    **{"attempt": NATURAL, "unix": float, "mono": float, "world_size": NATURAL},
    **{
        "ranks": Each(RANK),
        "machine": {**LEVELS, "disk_free": Maybe(int)},
        "sums": dict.fromkeys(SUMS, Maybe(float)),
    },
    "least": dict.fromkeys(("exact", "steady"), Row((NATURAL, float))),
    "evaluated": Maybe([{**EVALUATED, "rank": NATURAL}]),
}
WINDOW = 4096  # steps of which not all ranks have told yet


@dataclass
class Phase:
    """Sums over steps of one kind: how many, and seconds by category."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, steps: int, ticks: list[int]) -> None:
        self.steps += steps
        for name, spent in zip(CATEGORIES, ticks):
            if spent:
                self.seconds[name] = self.seconds.get(name, 0.0) + spent * TICK

    def since(self, before: Phase) -> Phase:
        left = {name: one - before.seconds.get(name, 0.0) for name, one in self.seconds.items()}
        return Phase(self.steps - before.steps, left)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass
class RankSums:
    """What a rank has done in an attempt, and where it stands."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    top1: float | None = None
    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})

    def add(self, row: dict[str, Any]) -> None:
        """A row of a digest."""
        self.phases["beside"].add(0, row["beside"] or [])
        for name in ("loss", "top1"):
            if row[name] is not None:
                setattr(self, name, row[name])
        if row["phase"] is not None:
            self.phases[row["phase"]].add(row["steps"], row["spent"])
            self.samples += row["samples"]
            self.step, self.epoch = row["step"], row["epoch"]

    @property
    def steps(self) -> int:
        return sum(self.phases[name].steps for name in STEPS)

    @property
    def step_seconds(self) -> float:
        return sum(self.phases[name].total for name in STEPS)

    @property
    def seconds(self) -> float:
        return self.step_seconds + self.phases["beside"].total

    def since(self, before: RankSums) -> RankSums:
        """What was done after `before`."""
        phases = {name: one.since(before.phases[name]) for name, one in self.phases.items()}
        done = self.samples - before.samples
        return RankSums(self.step, self.epoch, done, self.loss, self.top1, phases)

    def document(self) -> dict[str, Any]:
        told: dict[str, Any] = {name: getattr(self, name) for name in RANK if name not in PHASES}
        for name, one in self.phases.items():
            seconds = {category: round(spent, 4) for category, spent in one.seconds.items()}
            told[name] = {"steps": one.steps, "seconds": seconds}
        return told

    @classmethod
    def of(cls, told: dict[str, Any]) -> RankSums:
        """From what `document` made of it, checked."""
        phases = {name: Phase(**told[name]) for name in PHASES}
        return cls(**{name: told[name] for name in RANK if name not in PHASES}, phases=phases)


@dataclass
class Least:
    """How long even the last rank waited for peers: of each step that all ranks have told of, the
    least wait among them, summed up by phase."""

    world: int
    sums: dict[str, tuple[int, float]] = field(
        default_factory=lambda: {"exact": (0, 0.0), "steady": (0, 0.0)}
    )
    _open: dict[int, tuple[int, int]] = field(default_factory=dict)  # step: ranks, least ticks

    def add(self, row: dict[str, Any]) -> None:
        phase, steps, waits = row["phase"], row["steps"], row["waits"]
        if phase not in self.sums or not waits:
            return
        size = -(-steps // len(waits))  # each of the waits is the mean of so many steps
        begin = row["step"] - steps + 1
        for place in range(steps):
            self._step(phase, begin + place, waits[min(place // size, len(waits) - 1)])
        while len(self._open) > WINDOW:  # of steps that some rank never tells of
            del self._open[next(iter(self._open))]

    def _step(self, phase: str, step: int, wait: int) -> None:
        ranks, least = self._open.pop(step, (0, wait))
        ranks, least = ranks + 1, min(least, wait)
        if ranks < self.world:
            self._open[step] = ranks, least
            return
        steps, seconds = self.sums[phase]
        self.sums[phase] = steps + 1, seconds + least * TICK


@dataclass
class RunSums:
    """All ranks of an attempt, of `world` in all: what was told of them so far."""

    attempt: int
    world: int
    ranks: dict[int, RankSums] = field(default_factory=dict)
    least: dict[str, tuple[int, float]] = field(default_factory=dict)

    def copy(self) -> RunSums:
        """The same, whatever is added to this one."""
        return self.since(RunSums(self.attempt, self.world))

    def since(self, before: RunSums) -> RunSums:
        """What all ranks did after `before`; a rank that was not there then did all of it."""
        ranks = {
            rank: one.since(before.ranks.get(rank, RankSums())) for rank, one in self.ranks.items()
        }
        least = {
            name: (steps - before.least[name][0], seconds - before.least[name][1])
            if name in before.least
            else (steps, seconds)
            for name, (steps, seconds) in self.least.items()
        }
        return RunSums(self.attempt, self.world, ranks, least)

    @property
    def images_per_second(self) -> float | None:
        """Of all ranks, over the time of the steps; None before the first."""
        known = [one for one in self.ranks.values() if one.steps]
        seconds = sum(one.step_seconds for one in known)
        if seconds <= 0:
            return None
        return self.world * sum(one.samples for one in known) / seconds


def checked_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a digest, of which each fits ROW: one a rank, with all of its steps or none.
    Raises Invalid."""
    if len({row["rank"] for row in rows}) < len(rows):
        raise Invalid("a digest with two rows of a rank")
    for row in rows:
        if len({row[name] is None for name in OF_STEPS}) > 1:
            raise Invalid("a digest with half of what is told of steps")
    return rows


def machine_sums(before: dict[str, float], told: dict[str, Any], passed: float) -> dict[str, float]:
    """The sums of a machine, with what a digest told of the seconds that have passed since."""
    found = {"seconds": passed}
    if told["cpu"] is not None:
        found["cpu"] = told["cpu"] / 100 * passed
    if told["disk"] is not None:
        busy, found["read"], found["written"] = told["disk"]
        found["busy"] = busy / 100 * passed
    for name in ("share", "stalled"):
        if told[name] is not None:
            found[name] = told[name]
    if told["swapped"] is not None:
        found.update(zip(("swapped_in", "swapped_out"), told["swapped"]))
    if told["card"] is not None:
        found.update(zip(("received", "sent", "again", "dropped"), told["card"]))
    return {**before, **{name: before.get(name, 0) + one for name, one in found.items()}}


def read(path: Path, begin: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a digest.jsonl from byte `begin` on, each with the byte at which the next
    begins. What they hold is not checked; a last line that is not whole is not read."""
    try:
        file = path.open("rb") if path.is_file() and not path.is_symlink() else None
    except OSError:
        return
    if file is None:
        return
    with file:
        if begin > os.fstat(file.fileno()).st_size:
            begin = 0
        file.seek(begin)
        for line in file:
            begin += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                found = validate.parse(line)
            except Invalid:
                continue
            if isinstance(found, dict):
                yield begin, found


def checked(line: dict[str, Any]) -> dict[str, Any] | None:
    """A line of sums, as LINE says; None where it is none."""
    try:
        found: dict[str, Any] = validate.check(line, LINE, "line")
    except Invalid:
        return None
    return found


def dump(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":"))
