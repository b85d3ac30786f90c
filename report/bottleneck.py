"""Which part of training holds it up, decided by rules on what was measured and nothing else.

GPU utilisation is no evidence: it is 100 % while NCCL waits. Each threshold is explained in
docs/report.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from report.figures import (
    DISK_BUSY,
    DISK_READ,
    LOADERS_BUSY,
    MEMORY,
    MEMORY_PRESSURE,
    QUEUED,
    SHARE_READ,
    SWAPPED_IN,
    WAITED,
)
from report.measure import RankWork, Step, slowest
from report.usage import DiskUsage, NetworkUsage, ResourceUsage, Usage
from report.wait_rules import most_in_excess, ruling_cause, slower_rank

# A disk with requests outstanding for this fraction of the time is what a late loader waits for.
BUSY_PERCENT = 60.0
# Loaders that run for this part of the time are late for want of processors.
DECODES = 0.5
# A file share that moves less than this (bytes/s) is not where images come from; where loaders are
# known to wait for something, it is from a few small files a second on.
SHARE_READS, SHARE_READS_BY_LOADERS = 0.5e6, 0.02e6
# Bytes a second that come back from swap, and the share of the time in which processes wait for
# memory; of a kernel that does not say that, the share of memory that is taken.
SWAPPED, PRESSED, MEMORY_FULL = 0.5e6, 0.03, 0.9
# Other programs make a rank slow where its longer waiting for a processor is at least this part of
# what it is slower by, and they keep this share of the processors busy.
EXPLAINED, OTHERS = 0.6, 0.2


def parts(step: Step) -> dict[str, float]:
    """The fraction of training time (steps and saving) that each possible bottleneck takes."""
    seconds = {
        "data": step.data,
        "h2d": step.h2d,
        "compute": step.compute,
        "network": step.network,
        "straggler": step.peers,
        "checkpoint": step.checkpoint,
        "rank_work": step.rank_work,
    }
    total = step.training
    return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}


def bottleneck(step: Step | None, evidence: ResourceUsage) -> str:
    """The value of `bottleneck` in summary.json.

    A machine that swaps is it whatever else there is, for swapping slows any part of a step. Else
    it is the largest wait when that takes a quarter of training time; else a rank that is slower
    than the others; else `compute` when computing takes half; else `none`: no step was measured, or
    the time is spread over several causes. What is behind a wait, where it is known, stands for it.
    """
    if step is None:
        return "none"
    if swapping(evidence):
        return "memory_pressure"
    slower = has_straggler(step)
    crowded = fullest(evidence) is not None
    cause = ruling_cause(parts(step), slower, step.late_by, crowded, step.one_machine)
    if cause == "data":
        return data_cause(evidence, late_hosts(step))
    if cause == "straggler" and slower:
        return straggler_cause(step, evidence)
    if cause == "network" and slow_link(evidence.networks):
        return "slow_link"
    return cause or "none"


def fullest(evidence: ResourceUsage) -> Usage | None:
    """The machine whose processors are most oversubscribed."""
    full = [use for use in evidence.machines if use.is_oversubscribed]
    return max(full, key=lambda use: use.mean(QUEUED), default=None)


def has_straggler(step: Step) -> bool:
    """Whether the slowest rank needs that much more for a step than the others."""
    return slower_rank({place: rank.own for place, rank in enumerate(step.ranks)}) is not None


def swapping(evidence: ResourceUsage) -> list[Usage]:
    """The machines that are short of memory, the worst first."""

    def short(use: Usage) -> bool:
        if not use.knows(MEMORY_PRESSURE):
            return use.most(MEMORY) >= MEMORY_FULL
        return use.mean(MEMORY_PRESSURE) >= PRESSED

    uses = [use for use in evidence.machines if use.mean(SWAPPED_IN) >= SWAPPED and short(use)]
    return sorted(uses, key=lambda use: -use.mean(SWAPPED_IN))


def late_hosts(step: Step) -> set[str]:
    """The machines of the ranks that wait longest for images, or half as long as these."""
    most = max((rank.seconds.get("data", 0.0) for rank in step.ranks), default=0.0)
    return {rank.host for rank in step.ranks if rank.seconds.get("data", 0.0) >= most / 2}


def data_cause(evidence: ResourceUsage, hosts: set[str]) -> str:
    """Why the loader is late on these machines: the processors that decode, where the loaders keep
    them busy; else the file share, else a busy disk. A run without loaders of its own, or recorded
    before they were, is judged by what was read alone."""
    loaders = busiest_loaders(evidence, hosts)
    if loaders and loaders.mean(LOADERS_BUSY) >= DECODES:
        return "data_decode"
    least = SHARE_READS_BY_LOADERS if loaders else SHARE_READS
    disk = data_disk(evidence.disks, hosts)
    read = disk.mean(DISK_READ) if disk else 0.0
    shares = [use for use in evidence.shares if use.host in hosts]
    moved = max((use.mean(SHARE_READ) for use in shares), default=0.0)
    if moved >= least and moved > read:
        return "data_share"
    if disk and disk.mean(DISK_BUSY) >= BUSY_PERCENT:
        return "data_disk"
    return "data_decode"


def busiest_loaders(evidence: ResourceUsage, hosts: set[str]) -> Usage | None:
    """The machine, of these, whose loaders run most; None where that is not known."""
    known = [use for use in evidence.machines if use.host in hosts and use.knows(LOADERS_BUSY)]
    return max(known, key=lambda use: use.mean(LOADERS_BUSY), default=None)


def data_disk(disks: Sequence[DiskUsage], hosts: set[str] | None = None) -> DiskUsage | None:
    """The busiest disk (of `hosts`) that holds the data; where that is unknown, the busiest one
    read from."""
    some = [use for use in disks if hosts is None or use.host in hosts]
    holding = [use for use in some if use.holds_data]
    read = [use for use in some if use.holds_data is None and use.mean(DISK_READ) > 0]
    return max(holding or read, key=lambda use: use.mean(DISK_BUSY), default=None)


def straggler_cause(step: Step, evidence: ResourceUsage) -> str:
    """Why one rank is slower than the others: other programs, its data, what it does on this
    rank alone between two steps, or else itself."""
    last, others = slowest(step)
    waits, use = excess_queueing(step, evidence), evidence.machine(last.host)
    contended = use is not None and (use.others_busy is None or use.others_busy >= OTHERS)
    if contended and waits is not None and waits >= EXPLAINED * (last.own - others):
        return "cpu_contention"
    slow_at = slowest_by(step, last)
    if slow_at == "data":
        return data_cause(evidence, {last.host})
    return "rank_work" if slow_at == "other" else "straggler"


def excess_queueing(step: Step, evidence: ResourceUsage) -> float | None:
    """Seconds a step that the threads of the slowest rank's machine wait longer for a processor
    than those of the others (the median); None where that was not recorded."""
    last, _ = slowest(step)
    waited = {use.host: use.mean(WAITED) for use in evidence.machines if use.knows(WAITED)}
    others = [value for host, value in waited.items() if host != last.host]
    if last.host not in waited or not others:
        return None
    return (waited[last.host] - statistics.median(others)) * step.seconds


def slowest_by(step: Step, last: RankWork) -> str:
    """The category by which a rank most exceeds the mean of all; waiting for peers never counts."""
    return most_in_excess(last.seconds, [rank.seconds for rank in step.ranks])


@dataclass(frozen=True)
class Link:
    """What one machine sent to another during the loop, and how fast: bytes per second while there
    was something to send and the receiver had room for it."""

    sender: str
    receiver: str
    sent: float
    rate: float


LINK_BYTES = 4e6  # a link that carried less is not judged
SLOW_LINK = 0.5  # of the other machines' rate


def links(networks: Sequence[NetworkUsage]) -> list[Link]:
    """Links between machines that recorded their peers, by the addresses that they send from."""
    hosts = {own: use.host for use in networks for own, _, _ in use.sent_to.values()}
    return [
        Link(use.host, hosts[peer], sent, sent / busy)
        for use in networks
        for peer, (_, sent, busy) in use.sent_to.items()
        if peer in hosts and hosts[peer] != use.host and sent >= LINK_BYTES and busy > 0
    ]


def slow_link(networks: Sequence[NetworkUsage]) -> tuple[str, float, float] | None:
    """(machine, bytes per second, those of the others) where one machine's cable or card is slow:
    nothing that it sends or gets is fast, and the others are fast among themselves."""
    best: dict[str, float] = {}
    for link in links(networks):
        for host in (link.sender, link.receiver):
            best[host] = max(best.get(host, 0.0), link.rate)
    if len(best) < 3:
        return None
    host = min(best, key=lambda name: best[name])
    others = statistics.median(rate for name, rate in best.items() if name != host)
    return (host, best[host], others) if best[host] < SLOW_LINK * others else None
