"""Decide which wait of a training step is the bottleneck: the rules of a running run and of its
report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from contract.records import COMPUTE, LOCAL, of_kind

# A wait is the bottleneck from a quarter of training time: without it the run would be at least a
# third faster.
WAIT = 0.25
# Computing is called the bottleneck if it takes at least half.
WORK = 0.5
# The others wait for a rank whose work takes so many times as long as theirs.
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
OWN_WORK = of_kind(COMPUTE, LOCAL)  # of a rank in a step; waiting for other ranks is not
RANK_WAITS = ("network", "straggler")  # waits of ranks for each other


def find_cause(
    fractions: dict[str, float],
    slower: bool,
    late_by: str = "",
    crowded: bool = False,
    one_machine: bool = False,
) -> str | None:
    """Return the name of the bottleneck, or None if there is no single one. `slower`: one rank is
    slower than the others. `late_by`: the category by which the last rank of a step is late,
    whichever rank that is. `crowded`: processors are oversubscribed."""
    waits = {name: fraction for name, fraction in fractions.items() if name != "compute"}
    name = max(waits, key=lambda name: waits[name])
    largest = name if waits[name] >= WAIT else None
    # The largest wait, else a slow rank though its waits are short, else computing.
    cause = largest
    # If ranks are late in turn by their images, all of them wait for images.
    if largest == "straggler" and not slower and late_by == "data":
        cause = "data"
    elif largest is None and slower:
        cause = "straggler"
    elif largest is None and fractions["compute"] >= WORK:
        cause = "compute"
    # Crowded processors slow down computing, and, within one machine, the sums of gradients too.
    if crowded and (cause in ("compute", None) or (one_machine and cause in RANK_WAITS)):
        return "cpu_oversubscribed"
    return cause


def most_in_excess(rank: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> str:
    """Return the category of OWN_WORK in which a rank most exceeds the mean of all `ranks`."""

    def excess(name: str) -> float:
        return rank.get(name, 0.0) - statistics.fmean(seconds.get(name, 0.0) for seconds in ranks)

    return max(OWN_WORK, key=excess)
