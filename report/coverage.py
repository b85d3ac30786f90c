"""State what a verdict rests on: which signals were measured for which ranks, the second largest
cause, and a cause that only a missing signal could exclude.

analysis.py calls `add_basis` after verdict.py has explained the bottleneck.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from contract.text import percent
from report import bottleneck, figures
from report.bottleneck import DECODES, LINK_BYTES, late_hosts, step_shares
from report.files import Entry
from report.hang import join_words
from report.measure import Step
from report.read import RunRecord
from report.usage import ResourceUsage
from report.verdict import Verdict
from report.wait_rules import RANK_WAITS, WORDS

STEPS, PROCESSORS, DISK, GPU = "step times", "processors", "disk", "GPU"
NETWORK, LINKS = "network", "links"  # a card's counters; the traffic to each peer
# The words for a cause in a sentence; {} is the word for samples.
NAMES = {
    **WORDS, "network": "the network", "slow_link": "the slow link of one machine",
    "data_disk": "a slow disk", "data_share": "a slow share", "data_decode": "slow loading of {}",
    "cpu_contention": "other programs on the processors of one machine", "compute": "computing",
    "cpu_oversubscribed": "too few processors",
}  # fmt: skip


class Signal(NamedTuple):
    """The ranks for which a signal was measured, and those for which it was not."""

    measured: tuple[int, ...]
    missing: tuple[int, ...]


Coverage = Mapping[str, Signal]  # by the signal's name; without signals that a run cannot have


def split(ranks: Collection[int], measured: set[int]) -> Signal:
    """Divide `ranks` into measured ranks and missing ranks."""
    present = tuple(rank for rank in ranks if rank in measured)
    return Signal(present, tuple(rank for rank in ranks if rank not in measured))


def coverage_of(run: RunRecord, step: Step, evidence: ResourceUsage) -> Coverage:
    """Return for which ranks of the measured attempt each signal was measured. `evidence`: the
    usage in that attempt."""
    # Without step times nobody knows when a rank was in the loop, so all its signals are missing.
    host_of_rank = {rank.rank: rank.host for rank in step.ranks}
    measured_hosts = {STEPS: {*host_of_rank.values()}}
    for name, figure in ((PROCESSORS, figures.WAITED), (DISK, figures.DISKS)):
        measured_hosts[name] = {use.host for use in evidence.machines if use.knows(figure)}
    # Between processes of one machine there is no network.
    if not step.one_machine:
        networks = evidence.networks
        measured_hosts[NETWORK] = {use.host for use in networks if use.knows(figures.SENT)}
        measured_hosts[LINKS] = {use.host for use in networks if use.sent_to}
    if evidence.gpus or any("cuda" in record.start.versions for record in run.ranks):
        measured_hosts[GPU] = {use.host for use in evidence.gpus}
    ranks = range(max(step.world, 1 + max(host_of_rank)))
    return {
        name: split(ranks, {rank for rank, host in host_of_rank.items() if host in hosts})
        for name, hosts in measured_hosts.items()
    }


def coverage_sentence(coverage: Coverage, used: Iterable[str]) -> str:
    """Write which signals a verdict used for which ranks, and which were not measured: `Used: step
    times of all 4 ranks; disk of rank 0. Not measured: disk of ranks 1, 2 and 3.`"""
    # Heading -> words for ranks -> names of signals.
    groups: dict[str, dict[str, list[str]]] = {"Used": {}, "Also measured": {}, "Not measured": {}}
    for name, signal in coverage.items():
        title = "Used" if name in used else "Also measured"
        for heading, ranks in ((title, signal.measured), ("Not measured", signal.missing)):
            if ranks:
                words = rank_words(ranks, len(signal.measured) + len(signal.missing))
                groups[heading].setdefault(words, []).append(name)
    return " ".join(
        f"{heading}: {'; '.join(f'{join_words(n)} of {ranks}' for ranks, n in names.items())}."
        for heading, names in groups.items()
        if names
    )


def rank_words(ranks: Sequence[int], world: int) -> str:
    """Write `all 4 ranks`, `rank 3` or `ranks 0, 2 and 3`; of many ranks only the first ones."""
    if len(ranks) == world > 1:
        return "both ranks" if world == 2 else f"all {world} ranks"
    hidden = [f"{len(ranks) - 8} more"] if len(ranks) > 8 else []
    return f"rank{'s' * (len(ranks) > 1)} {join_words([*map(str, ranks[:8]), *hidden])}"


class Candidate(NamedTuple):
    """A cause, and its fraction of training time."""

    cause: str
    fraction: float

    def sentence(self, samples: str) -> str:
        name = NAMES[self.cause].format(samples)
        return f"Runner-up: {name}, {percent(self.fraction)} of training time."


class Weights(NamedTuple):
    """The bottleneck's fraction of training time, if it takes any, and the runner-up: the largest
    wait with another cause."""

    fraction: float | None
    runner_up: Candidate | None


def weigh_causes(step: Step, evidence: ResourceUsage, cause: str) -> Weights:
    """Compare the time that the bottleneck `cause` takes with that of the other causes."""
    fractions: dict[str, float] = {}  # by cause
    for wait, share in step_shares(step).items():
        wait_cause = bottleneck.cause_of(wait, step, evidence)
        # Crowded processors within one machine make ranks wait for each other, too.
        if cause == "cpu_oversubscribed" and step.one_machine and wait in RANK_WAITS:
            wait_cause = cause
        fractions[wait_cause] = fractions.get(wait_cause, 0.0) + share
    waits = {name: share for name, share in fractions.items() if name not in ("compute", cause)}
    second = max(waits, key=waits.__getitem__, default="")
    runner_up = Candidate(second, waits[second]) if waits.get(second) else None
    return Weights(fractions.get(cause), runner_up)


class Rival(NamedTuple):
    """A cause that the records cannot tell from the bottleneck, because ranks lack a signal."""

    cause: str
    signal: str
    ranks: tuple[int, ...]
    remedy: str  # a clause on how to measure the signal


def find_rival(cause: str, step: Step, evidence: ResourceUsage, coverage: Coverage) -> Rival | None:
    """Return the rival of the bottleneck `cause`; None if no missing signal would decide it."""
    untimed, unscheduled = coverage[STEPS].missing, coverage[PROCESSORS].missing
    # A rank without step times may be the rank for which all other ranks wait.
    if cause in ("network", "slow_link") and untimed:
        remedy = "time the steps of every rank (docs/own-script.md), or copy its records here"
        return Rival("straggler", STEPS, untimed, remedy)
    if cause == "data_decode":
        late = {rank.rank for rank in step.ranks if rank.host in late_hosts(step)}
        ranks = tuple(rank for rank in coverage[DISK].missing if rank in late)
        # Busy loaders prove that decoding is the cause, whatever the disk does.
        loaders = bottleneck.busiest_loaders(evidence, late_hosts(step))
        decodes = loaders is not None and loaders.mean(figures.LOADERS_BUSY) >= DECODES
        remedy = "make /proc/diskstats readable and type `make train` again"
        return Rival("data_disk", DISK, ranks, remedy) if ranks and not decodes else None
    # Other programs may make one rank slow. A lack of processors may make all ranks slow.
    queueing, is_straggler = bottleneck.excess_queueing(step, evidence), cause == "straggler"
    is_unknown = queueing is None if is_straggler else not coverage[PROCESSORS].measured
    if unscheduled and is_unknown and cause in ("straggler", "compute"):
        remedy = "type `make train` on a kernel with CONFIG_SCHED_INFO"
        possible = "cpu_contention" if is_straggler else "cpu_oversubscribed"
        return Rival(possible, PROCESSORS, unscheduled, remedy)
    # find_slow_link judges neither two machines, which share one link, nor links with few bytes.
    has_enough_bytes = step.bytes_sent is None or step.bytes_sent * step.steps >= LINK_BYTES
    missing = coverage[LINKS].missing if LINKS in coverage and step.nodes > 2 else ()
    if cause == "network" and has_enough_bytes and missing:
        return Rival("slow_link", LINKS, missing, "`make plan MEASURE=1` measures each link")
    return None


def add_basis(
    verdict: Verdict, run: RunRecord, step: Step, evidence: ResourceUsage, cause: str
) -> tuple[Verdict, Entry]:
    """Return the verdict with sentences on what it rests on, and the fields of summary.json with
    these facts. `cause`: the bottleneck."""
    coverage = coverage_of(run, step, evidence)
    fraction, runner_up = weigh_causes(step, evidence, cause)
    headline, because = verdict.headline, verdict.because
    rival = find_rival(cause, step, evidence, coverage)
    if rival:
        names = " or ".join(NAMES[name].format(step.samples) for name in (cause, rival.cause))
        share = "" if fraction is None else f", {percent(fraction)} of training time"
        ranks = rank_words(rival.ranks, step.world)
        headline = (
            f"Either {names} is the bottleneck{share}: nobody measured the {rival.signal} of "
            f"{ranks}."
        )
        because = (f"To tell them apart, {rival.remedy}.", *because)
    # Every verdict uses these two signals, and some causes need more. No rule uses a GPU's figures.
    used = {STEPS, PROCESSORS}
    for name in (cause, runner_up.cause if runner_up else ""):
        used |= {DISK} if name.startswith("data") else set()
        used |= {NETWORK, LINKS} if name in ("network", "slow_link") else set()
    because += (runner_up.sentence(step.samples),) if runner_up else ()
    return Verdict(headline, (*because, coverage_sentence(coverage, used))), {
        "bottleneck_fraction": fraction,
        "runner_up": runner_up and runner_up._asdict(),
        "undecided": rival and rival._asdict(),
        "coverage": {
            name.lower().replace(" ", "_"): {"used": name in used, **signal._asdict()}
            for name, signal in coverage.items()
        },
    }
