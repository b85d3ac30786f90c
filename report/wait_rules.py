"""What a training step waits for, and when one wait rules: the rule by which a running run and its
report judge."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from contract.records import COMPUTE, LOCAL, of_kind

# A wait rules from a quarter of training time: without it the run would be at least a third faster.
WAIT = 0.25
# Computing is called the bottleneck when it takes at least half.
WORK = 0.5
# A rank that needs so many times what the others need for a step is what they wait for.
SLOWER = 1.15
# Words for the waits; {} is the word for samples.
WORDS = {
    "network": "network",
    "straggler": "slower ranks",
    "data": "{}",
    "h2d": "copies to the device",
    "checkpoint": "checkpoints",
    "rank_work": "work of one rank between epochs",
}
OWN_WORK = of_kind(COMPUTE, LOCAL)  # of a rank in a step; waiting for peers is not


def largest_wait(fractions: dict[str, float]) -> str | None:
    """The wait that rules; None where none does."""
    waits = {name: part for name, part in fractions.items() if name != "compute"}
    largest = max(waits, key=lambda name: waits[name])
    return largest if waits[largest] >= WAIT else None


def ruling_cause(
    fractions: dict[str, float],
    slower: bool,
    late_by: str = "",
    crowded: bool = False,
    one_machine: bool = False,
) -> str | None:
    """What holds a run up: the wait that rules, else `straggler` where one rank is slower than the
    others, else `compute` where that takes most of the time; None where there is no single one.
    `late_by`: what the last rank of a step is late by, whichever that is. `crowded`: processors are
    oversubscribed, which makes computing slow, and within one machine the sums, too."""
    largest = largest_wait(fractions)
    cause = largest
    if largest == "straggler" and not slower and late_by == "data":
        cause = "data"
    elif largest is None and slower:
        cause = "straggler"
    elif largest is None and fractions["compute"] >= WORK:
        cause = "compute"
    if crowded and (cause in ("compute", None) or (one_machine and cause in SUMS)):
        return "cpu_oversubscribed"
    return cause


SUMS = ("network", "straggler")  # waits of ranks for each other


def slower_rank(own: dict[int, float]) -> int | None:
    """The rank with the most own work a step, where that is SLOWER times the others' median."""
    last = max(own, key=lambda rank: own[rank])
    others = [spent for rank, spent in own.items() if rank != last]
    return last if others and own[last] > SLOWER * statistics.median(others) else None


def most_in_excess(last: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> str:
    """The part of a rank's OWN_WORK that most exceeds the mean of all ranks, this one included."""

    def excess(name: str) -> float:
        return last.get(name, 0.0) - statistics.fmean(seconds.get(name, 0.0) for seconds in ranks)

    return max(OWN_WORK, key=excess)
