"""What a training step waits for, and when one wait rules: the rule by which a running run and its
report judge."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract.digests import STEPS, Phase, RunSums

# A wait rules from a quarter of training time: without it the run would be at least a third faster.
WAIT = 0.25
# Computing is called the bottleneck when it takes at least half.
WORK = 0.5
# A rank that needs so many times what the others need for a step is what they wait for.
SLOWER = 1.15
# Seconds of steps. In less, caches, clocks and connections still warm up.
ENOUGH = 30.0
# What is said of a step that waits.
WORDS = {
    "network": "network",
    "straggler": "slower ranks",
    "data": "images",
    "h2d": "copies to the device",
    "checkpoint": "checkpoints",
}
COMPUTE = ("forward", "backward", "optimizer")
OWN_WORK = ("data", "h2d", *COMPUTE, "other")  # of a rank; waiting for peers is not


@dataclass(frozen=True)
class MeanStep:
    """Seconds of a mean step, over ranks. `network`: even the last rank waited so long;
    `straggler`: how much longer the others did; `checkpoint`: saving, beside the step."""

    steps: int
    images: float
    data: float
    h2d: float
    compute: float
    network: float
    straggler: float
    other: float
    checkpoint: float
    slower: int | None = None  # a rank that the others wait for, if there is one
    slower_by: str | None = None  # which of its OWN_WORK makes it so

    @property
    def seconds(self) -> float:
        waits = self.data + self.h2d + self.network + self.straggler
        return waits + self.compute + self.other

    @property
    def fractions(self) -> dict[str, float]:
        """Of training time (steps and saving), what each wait and computing take."""
        total = self.seconds + self.checkpoint
        names = (*WORDS, "compute")
        return {name: getattr(self, name) / total if total > 0 else 0.0 for name in names}


def largest_wait(fractions: dict[str, float]) -> str | None:
    """The wait that rules; None where none does."""
    waits = {name: part for name, part in fractions.items() if name != "compute"}
    largest = max(waits, key=lambda name: waits[name])
    return largest if waits[largest] >= WAIT else None


def ruling_cause(fractions: dict[str, float], slower: bool) -> str | None:
    """What holds a run up: the wait that rules, else `straggler` where one rank is slower than the
    others, else `compute` where that takes most of the time; None where there is no single one."""
    largest = largest_wait(fractions)
    if largest is None and slower:
        return "straggler"
    if largest is None and fractions["compute"] >= WORK:
        return "compute"
    return largest


def slower_one(own: dict[int, float]) -> int | None:
    """The rank with the most own work a step, where that is SLOWER times the others' median."""
    last = max(own, key=lambda rank: own[rank])
    others = [spent for rank, spent in own.items() if rank != last]
    return last if others and own[last] > SLOWER * statistics.median(others) else None


def most_in_excess(last: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> str:
    """Of a rank's OWN_WORK, what most exceeds the mean of all ranks, itself among them."""

    def excess(name: str) -> float:
        return last.get(name, 0.0) - statistics.fmean(one.get(name, 0.0) for one in ranks)

    return max(OWN_WORK, key=excess)


def mean_step(sums: RunSums) -> MeanStep | None:
    """The mean step of all ranks without their first. Exact steps, with which some strategies
    begin, count only until all ranks have others. None before all ranks have one that counts."""
    ranks = list(sums.ranks.values())
    if len(ranks) < sums.world or not ranks:
        return None
    kind = "exact" if any(one.phases["steady"].steps < 2 for one in ranks) else "steady"
    if any(not one.phases[kind].steps for one in ranks):
        kind = "steady"
    counted = [one.phases[kind] for one in ranks]
    if not all(one.steps for one in counted):
        return None

    def mean(*names: str) -> float:
        return statistics.fmean(_mean(one, names) for one in counted)

    sync = mean("sync_exposed")
    steps, seconds = sums.least.get(kind, (0, 0.0))
    least = seconds / steps if steps else min(_mean(one, ("sync_exposed",)) for one in counted)
    network = min(least, sync)
    work = {
        rank: {name: _mean(one.phases[kind], (name,)) for name in OWN_WORK}
        for rank, one in sums.ranks.items()
    }
    slower = slower_one({rank: sum(spent.values()) for rank, spent in work.items()})
    return MeanStep(
        steps=min(one.steps for one in counted),
        images=sums.world * statistics.fmean(one.samples / max(1, one.steps) for one in ranks),
        data=mean("data"),
        h2d=mean("h2d"),
        compute=mean(*COMPUTE),
        network=network,
        straggler=sync - network,
        other=mean("other"),
        checkpoint=statistics.fmean(
            sum(one.phases[name].seconds.get("checkpoint", 0.0) for name in (*STEPS, "beside"))
            / max(1, one.steps)
            for one in ranks
        ),
        slower=slower,
        slower_by=None if slower is None else most_in_excess(work[slower], [*work.values()]),
    )


def _mean(phase: Phase, names: tuple[str, ...]) -> float:
    return sum(phase.seconds.get(name, 0.0) for name in names) / phase.steps
