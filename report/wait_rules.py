"""Decide which wait of a training step is the bottleneck, by the rules of docs/report.md.

status.py judges a running run by these rules. bottleneck.py uses them for the report, and then
looks for the cause of the wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from contract.records import COMPUTE, LOCAL, of_kind

# A wait is the bottleneck if it takes this fraction of training time: without a wait of a quarter
# the run would be a third faster.
WAIT = 0.25
# Computing is the bottleneck if it takes at least this fraction.
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
OWN_WORK = of_kind(COMPUTE, LOCAL)  # the categories of a rank's work, without its waits for ranks
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
    # The cause is the largest wait. If all waits are short, it is a slow rank, else computing.
    cause = largest
    # If the ranks take turns in being late, and are late by their images, all wait for images.
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
