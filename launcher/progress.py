"""How far a run is, from what its controller keeps of the guards' digests in the run's folder: for
`make status` and `make top`. Reads files alone, and of these only what is new."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract import digests, validate
from contract.digests import RankSums, RunSums
from contract.machines import NAME
from contract.validate import Invalid, Maybe
from contract.waits import ENOUGH, MeanStep, mean_step, ruling_cause

# Seconds: what a run does now is what it did in them. A verdict needs ENOUGH of them in steps; a
# fault that began a minute ago is all that is seen in them.
RECENT = 40.0
NOW = 5.0  # of a machine
KEPT = 90  # lines of a machine
STALE = 10.0  # seconds without a line after which a machine is said to be silent
SAMPLES = Maybe(validate.NATURAL)
START: dict[str, object] = dict.fromkeys(
    ("epochs", "steps_per_epoch", "train_images", "global_batch", "resumed_samples"), SAMPLES
)
BEGUN = {"attempt": validate.NATURAL, "rank": validate.NATURAL, "start": START}


@dataclass
class Machine:
    """What was read of one machine's file: its lines of the newest attempt."""

    path: Path
    read: int = 0  # bytes
    lines: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def host(self) -> str:
        return self.path.parent.name

    def before(self, seconds: float) -> dict[str, Any] | None:
        """The newest line that is so many seconds older than the last, else the oldest."""
        last = self.lines[-1]["unix"]
        older = [line for line in self.lines if last - line["unix"] >= seconds]
        return older[-1] if older else self.lines[0] if len(self.lines) > 1 else None


@dataclass(frozen=True)
class Figures:
    """A machine in the last seconds. Parts in percent, rates in bytes a second; None: unknown."""

    host: str
    age: float  # seconds since it told of itself
    step: int | None
    cpu: float | None
    memory: float | None
    swap: float | None  # bytes
    temperature: float | None  # of the hottest processor
    disk_busy: float | None
    disk_read: float | None
    disk_free: float | None  # bytes, where the run's folder lies
    sent: float | None
    received: float | None
    again: float  # TCP segments a second that were sent again
    dropped: float  # packets a second
    gpus: list[list[Any]]  # index, percent, bytes, Celsius, watts, MHz


@dataclass(frozen=True)
class Progress:
    """A run as it stands. Times in seconds; None where nothing is known yet."""

    attempt: int
    unix: float  # of the last thing that was told
    epoch: int | None  # of the one that is under way, from 1
    epochs: int | None
    step: int | None
    steps: int | None
    images_per_second: float | None  # since the attempt began
    recent_images_per_second: float | None
    left: float | None  # until the end
    loss: float | None
    top1: float | None
    evaluated: dict[str, Any] | None  # the last one
    mean: MeanStep | None  # since the attempt began
    recent: MeanStep | None
    machines: list[Figures]

    @property
    def judged(self) -> MeanStep | None:
        """What is judged: the last steps, else all; None where neither is enough to say what holds
        the run up."""
        both = (one for one in (self.recent, self.mean) if one is not None)
        return next((one for one in both if one.seconds * one.steps >= ENOUGH), None)

    @property
    def cause(self) -> str | None:
        """What holds it up: a wait of contract/waits.py, `compute`, or None: too early to say, or
        no single one. Waiting for a rank that is late by its images is waiting for images."""
        late = self.ruling == "straggler" and self.judged and self.judged.slower_by == "data"
        return "data" if late else self.ruling

    @property
    def ruling(self) -> str | None:
        """The same, but for what is behind a slower rank."""
        step = self.judged
        return ruling_cause(step.fractions, step.slower is not None) if step else None


class Follower:
    """Reads a run's folder again and again."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._machines: dict[str, Machine] = {}
        self._start: dict[str, Any] = {}
        self._scores: dict[str, Any] | None = None
        self._attempt = 0

    def look(self) -> Progress | None:
        """None where no machine has told anything."""
        for path in sorted(self._folder.glob(f"nodes/*/{digests.NAME}")):
            host = path.parent.name
            if NAME.fullmatch(host):
                machine = self._machines.setdefault(host, Machine(path))
                for end, line in digests.read(path, machine.read):
                    machine.read = end
                    self._take(machine, line)
        told = [machine for machine in self._machines.values() if machine.lines]
        return self._progress(told) if told else None

    def _take(self, machine: Machine, line: dict[str, Any]) -> None:
        begun = _checked(line, BEGUN) if "start" in line else None
        if begun is not None and begun["attempt"] >= self._attempt:
            self._newer(begun["attempt"])
            self._start = begun["start"]
        sums = digests.checked(line) if begun is None else None
        if sums is None or sums["attempt"] < self._attempt:
            return
        self._newer(sums["attempt"])
        machine.lines.append(sums)
        for one in sums["evaluated"] or []:
            self._scores = one

    def _newer(self, attempt: int) -> None:
        """Forget what was of an attempt before."""
        if attempt > self._attempt:
            self._attempt = attempt
            for machine in self._machines.values():
                machine.lines.clear()

    def _progress(self, told: list[Machine]) -> Progress:
        world = max(machine.lines[-1]["world_size"] for machine in told)
        sums = self._sums([machine.lines[-1] for machine in told], world)
        earlier = [machine.before(RECENT) for machine in told]
        then = self._sums([line for line in earlier if line], world)
        recent = sums.since(then)
        ranks = [one for one in sums.ranks.values() if one.steps]
        step = max((one.step for one in ranks), default=None)
        per_epoch, epochs = self._start.get("steps_per_epoch"), self._start.get("epochs")
        steps = per_epoch * epochs if per_epoch and epochs else None
        return Progress(
            attempt=self._attempt,
            unix=max(machine.lines[-1]["unix"] for machine in told),
            epoch=max((one.epoch for one in ranks), default=-1) + 1 or None,
            epochs=epochs,
            step=step,
            steps=steps,
            images_per_second=sums.images_per_second,
            recent_images_per_second=recent.images_per_second,
            left=_left(ranks, step, steps),
            loss=_mean([one.loss for one in ranks]),
            top1=_mean([one.top1 for one in ranks]),
            evaluated=self._scores,
            mean=mean_step(sums),
            recent=mean_step(recent),
            machines=[_figures(machine) for machine in told],
        )

    def _sums(self, lines: list[dict[str, Any]], world: int) -> RunSums:
        ranks = {
            int(rank): RankSums.of(one)
            for line in lines
            for rank, one in line["ranks"].items()
            if rank.isdecimal()
        }
        told: list[dict[str, Any]] = [line["least"] for line in lines]
        newest = max(told, key=lambda one: one["steady"], default={})
        least = {name: (one[0], one[1]) for name, one in newest.items()}
        return RunSums(self._attempt, world, ranks, least)


def _checked(value: object, shape: dict[str, object]) -> dict[str, Any] | None:
    with contextlib.suppress(Invalid):
        found: dict[str, Any] = validate.check(value, shape, "line")
        return found
    return None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _left(ranks: list[RankSums], step: int | None, steps: int | None) -> float | None:
    """The steps that are left, each as long as those so far with what was beside them."""
    if step is None or steps is None:
        return None
    each = max(one.seconds / one.steps for one in ranks)
    return max(0, steps - step) * each


def _figures(machine: Machine) -> Figures:
    last, then = machine.lines[-1], machine.before(NOW)
    levels, sums = last["machine"], last["sums"]
    before = then["sums"] if then else dict.fromkeys(sums)
    passed = (sums["seconds"] or 0.0) - (before["seconds"] or 0.0)

    def rate(name: str) -> float | None:
        if sums[name] is None or passed <= 0:
            return None
        return float(sums[name] - (before[name] or 0.0)) / passed

    def part(name: str) -> float | None:
        value = rate(name)
        return None if value is None else 100 * value

    steps = [one["step"] for one in last["ranks"].values()]
    return Figures(
        host=machine.host,
        age=max(0.0, time.time() - last["unix"]),
        step=max(steps, default=None),
        cpu=part("cpu"),
        memory=levels["memory"],
        swap=levels["swap"],
        temperature=levels["temperature"],
        disk_busy=part("busy"),
        disk_read=rate("read"),
        disk_free=levels["disk_free"],
        sent=rate("sent"),
        received=rate("received"),
        again=rate("again") or 0.0,
        dropped=rate("dropped") or 0.0,
        gpus=levels["gpus"] or [],
    )
