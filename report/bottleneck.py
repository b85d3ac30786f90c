"""Decide what slows down training, by rules on measurements only.

GPU utilisation is not used: it is 100 % while NCCL waits. docs/report.md explains each threshold.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from contract.records import COMPUTE, of_kind
from report import figures
from report.measure import Step, slowest
from report.usage import DiskUsage, NetworkUsage, ResourceUsage, Usage
from report.wait_rules import find_cause, most_in_excess

# A late loader waits for a disk that has requests outstanding for this part of the time.
BUSY_PERCENT = 60.0
# Loaders that run for this fraction of the time are late because processors are too slow.
DECODES = 0.5
# Bytes/s of a file share from which images may come from it. If loaders are known to wait for
# something, a few small files a second are enough.
SHARE_READS, SHARE_READS_BY_LOADERS = 0.5e6, 0.02e6
# Bytes/s that return from swap, and the fraction of time that processes wait for memory. If the
# kernel does not record that wait, the fraction of memory in use.
SWAPPED, PRESSED, MEMORY_FULL = 0.5e6, 0.03, 0.9
# Other programs make a rank slow if its longer waiting for a processor explains this fraction of
# its delay, and they keep this fraction of the processors busy.
EXPLAINED, OTHERS = 0.6, 0.2


def step_shares(step: Step) -> dict[str, float]:
    """Return the fraction of training time (steps and saving) of each possible bottleneck."""
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


def find_bottleneck(step: Step | None, evidence: ResourceUsage) -> str:
    """Return the value of `bottleneck` in summary.json."""
    # `unknown` means that no step was measured, `none` that several causes share the time.
    if step is None:
        return "unknown"
    # Swapping slows down any part of a step, so it comes first.
    if swapping_machines(evidence):
        return "memory_pressure"
    slower = has_straggler(step)
    crowded = most_oversubscribed(evidence) is not None
    cause = find_cause(step_shares(step), slower, step.late_by, crowded, step.one_machine)
    return cause_of(cause, step, evidence) if cause else "none"


def cause_of(wait: str, step: Step, evidence: ResourceUsage) -> str:
    """Return the cause of a wait of `step_shares`, if it is known, else the wait."""
    slower = has_straggler(step)
    # Without one slow rank the ranks take turns, and no machine is the cause.
    if wait == "straggler" and slower:
        return straggler_cause(step, evidence)
    if wait == "data" or (wait == "straggler" and step.late_by == "data"):
        return data_cause(evidence, late_hosts(step))
    if wait == "network" and find_slow_link(evidence.networks):
        return "slow_link"
    return wait


def last_rank_causes(step: Step, evidence: ResourceUsage) -> dict[str, tuple[str, float]]:
    """Return the waits, and the computing, of the last rank of a step: their cause and seconds. The
    delay of one slow rank is separate from the computing of all."""
    spent, slow, computing = step.last_rank, slowest(step), of_kind(COMPUTE)
    compute = sum(spent[name] for name in computing)
    late = slow.is_straggler and slow_category(step) in computing
    delay = min(compute, slow.delay) if late else 0.0
    parts = {"data": spent["data"], "h2d": spent["h2d"], "network": spent["sync_exposed"]}
    parts |= {"straggler": delay, "rank_work": spent["other"], "compute": compute - delay}
    causes = {wait: cause_of(wait, step, evidence) for wait in parts}
    if most_oversubscribed(evidence):
        causes["compute"] = "cpu_oversubscribed"
    return {wait: (causes[wait], value) for wait, value in parts.items()}


def most_oversubscribed(evidence: ResourceUsage) -> Usage | None:
    """Return the machine whose processors are most oversubscribed, if any is."""
    full = [use for use in evidence.machines if use.is_oversubscribed]
    return max(full, key=lambda use: use.mean(figures.QUEUED), default=None)


def has_straggler(step: Step) -> bool:
    """Return True if the slowest rank needs much longer for a step than the others."""
    return slowest(step).is_straggler


def swapping_machines(evidence: ResourceUsage) -> list[Usage]:
    """Return the machines that are short of memory, the worst first."""

    def is_short(use: Usage) -> bool:
        # Kernels before 4.20 do not record the waiting for memory.
        if not use.knows(figures.MEMORY_PRESSURE):
            return use.maximum(figures.MEMORY) >= MEMORY_FULL
        return use.mean(figures.MEMORY_PRESSURE) >= PRESSED

    uses = [
        use
        for use in evidence.machines
        if use.mean(figures.SWAPPED_IN) >= SWAPPED and is_short(use)
    ]
    return sorted(uses, key=lambda use: -use.mean(figures.SWAPPED_IN))


def late_hosts(step: Step) -> set[str]:
    """Return the hosts of the ranks that wait longest for images, or at least half as long."""
    waits = [(rank.host, rank.seconds.get("data", 0.0)) for rank in step.ranks]
    longest = max((seconds for _, seconds in waits), default=0.0)
    return {host for host, seconds in waits if seconds >= longest / 2}


def data_cause(evidence: ResourceUsage, hosts: set[str]) -> str:
    """Return why the loader is late on these machines."""
    loaders = busiest_loaders(evidence, hosts)
    if loaders and loaders.mean(figures.LOADERS_BUSY) >= DECODES:
        return "data_decode"
    # A run without loader processes, or one recorded before they were, shows only what was read.
    least = SHARE_READS_BY_LOADERS if loaders else SHARE_READS
    disk = data_disk(evidence.disks, hosts)
    disk_rate = disk.mean(figures.DISK_READ) if disk else 0.0
    shares = [use for use in evidence.shares if use.host in hosts]
    share_rate = max((use.mean(figures.SHARE_READ) for use in shares), default=0.0)
    # Images come from where most bytes are read.
    if share_rate >= least and share_rate > disk_rate:
        return "data_share"
    if disk and disk.mean(figures.DISK_BUSY) >= BUSY_PERCENT:
        return "data_disk"
    return "data_decode"


def busiest_loaders(evidence: ResourceUsage, hosts: set[str]) -> Usage | None:
    """Return the machine among `hosts` whose loaders run most; None if that was not recorded."""
    busy = figures.LOADERS_BUSY
    uses = [use for use in evidence.machines if use.host in hosts and use.knows(busy)]
    return max(uses, key=lambda use: use.mean(busy), default=None)


def data_disk(disks: Sequence[DiskUsage], hosts: set[str]) -> DiskUsage | None:
    """Return the busiest disk of `hosts` that holds the data."""
    # If no record says which disk holds the data, that is the busiest disk that was read.
    local = [use for use in disks if use.host in hosts]
    # Disks that do not hold the data are busy for other reasons.
    holding = [use for use in local if use.holds_data]
    used = [use for use in local if use.holds_data is None and use.mean(figures.DISK_READ) > 0]
    return max(holding or used, key=lambda use: use.mean(figures.DISK_BUSY), default=None)


def straggler_cause(step: Step, evidence: ResourceUsage) -> str:
    """Return why one rank is slower than the others: other programs, its data, or itself."""
    slow = slowest(step)
    waits, use = excess_queueing(step, evidence), evidence.machine(slow.rank.host)
    # Older records do not say who used the processors: then the longer waiting is enough.
    contended = use is not None and (use.others_busy is None or use.others_busy >= OTHERS)
    if contended and waits is not None and waits >= EXPLAINED * slow.delay:
        return "cpu_contention"
    category = slow_category(step)
    if category == "data":
        return data_cause(evidence, {slow.rank.host})
    # `other` is what a rank does between two steps.
    return "rank_work" if category == "other" else "straggler"


def excess_queueing(step: Step, evidence: ResourceUsage) -> float | None:
    """Return the seconds per step that the slowest machine's threads wait longer for a processor.
    Compared with the median of the other machines; None if that was not recorded."""
    host = slowest(step).rank.host
    waited = {
        use.host: use.mean(figures.WAITED) for use in evidence.machines if use.knows(figures.WAITED)
    }
    rates = [value for name, value in waited.items() if name != host]
    if host not in waited or not rates:
        return None
    return (waited[host] - statistics.median(rates)) * step.seconds


def slow_category(step: Step) -> str:
    """Return the category by which the slowest rank most exceeds the mean of all."""
    return most_in_excess(slowest(step).rank.seconds, [rank.seconds for rank in step.ranks])


@dataclass(frozen=True)
class PeerLink:
    """The traffic from one machine to another during the loop. `rate`: bytes per second while the
    sender had data and the receiver had room for it."""

    sender: str
    receiver: str
    sent: float
    rate: float


class SlowLink(NamedTuple):
    """A machine whose cable or network card is slow. Rates in bytes per second."""

    host: str
    rate: float
    others_rate: float


LINK_BYTES = 4e6  # a link that carried less is not judged
SLOW_LINK = 0.5  # of the other machines' rate


def peer_links(networks: Sequence[NetworkUsage]) -> list[PeerLink]:
    """Return the links between machines that recorded their peers."""
    hosts = {traffic.source: use.host for use in networks for traffic in use.sent_to.values()}
    return [
        PeerLink(use.host, hosts[peer], traffic.sent, traffic.sent / traffic.busy)
        for use in networks
        for peer, traffic in use.sent_to.items()
        if hosts.get(peer, use.host) != use.host and traffic.sent >= LINK_BYTES and traffic.busy > 0
    ]


def find_slow_link(networks: Sequence[NetworkUsage]) -> SlowLink | None:
    """Find a machine that neither sends nor receives fast while the others do. Needs three."""
    best: dict[str, float] = {}
    for link in peer_links(networks):
        for host in (link.sender, link.receiver):
            best[host] = max(best.get(host, 0.0), link.rate)
    # Of two machines that share one link nobody can say whose end is slow.
    if len(best) < 3:
        return None
    host = min(best, key=lambda name: best[name])
    others_rate = statistics.median(rate for name, rate in best.items() if name != host)
    # A slow cable slows down all links of its machine, so even its best one is slow.
    slow = best[host] < SLOW_LINK * others_rate
    return SlowLink(host, best[host], others_rate) if slow else None
