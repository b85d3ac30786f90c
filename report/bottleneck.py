"""Decide what slows down training, by rules on measurements only.

analysis.py calls `find_bottleneck`; verdict.py explains its result. No rule uses the utilisation of
a GPU, which is 100 % while NCCL waits. docs/report.md explains each threshold.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from contract.records import COMPUTE, of_kind
from report import figures
from report.measure import Step, find_slowest_rank
from report.usage import DiskUsage, NetworkUsage, ResourceUsage, Usage
from report.wait_rules import find_cause, most_in_excess

# A late loader waits for a disk that has requests outstanding for this part of the time.
BUSY_PERCENT = 60.0
# Loaders that run for this fraction of the time are late because processors are too slow.
DECODES = 0.5
# At this rate of reading (bytes/s) images may come from a file share. The second rate counts if
# loaders are known to wait for something: a few small files a second are then enough.
SHARE_READS, SHARE_READS_BY_LOADERS = 0.5e6, 0.02e6
# A machine is short of memory at this rate of return from swap (bytes/s), if processes also wait
# for memory this fraction of the time. If the kernel does not record that wait, the fraction of
# memory in use (MEMORY_FULL) counts.
SWAPPED, PRESSED, MEMORY_FULL = 0.5e6, 0.03, 0.9
# Other programs make a rank slow if its longer waiting for a processor explains this fraction of
# its delay, and the other programs keep this fraction of the processors busy.
EXPLAINED_DELAY, BUSY_BY_OTHERS = 0.6, 0.2


def step_shares(step: Step) -> dict[str, float]:
    """Return the fraction of training time of each possible bottleneck. Training time has steps,
    saving and work between epochs."""
    seconds = {
        "data": step.data,
        "h2d": step.h2d,
        "compute": step.compute,
        "network": step.network,
        "straggler": step.peers,
        "checkpoint": step.checkpoint,
        "rank_work": step.rank_work,
    }
    total = step.training_seconds
    return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}


def find_bottleneck(step: Step | None, evidence: ResourceUsage) -> str:
    """Return the value of `bottleneck` in summary.json: `unknown` if no step was measured, `none`
    if several causes share the time."""
    if step is None:
        return "unknown"
    # Swapping slows down any part of a step, so this rule comes first.
    if swapping_machines(evidence):
        return "memory_pressure"
    slower = find_slowest_rank(step).is_straggler
    crowded = most_oversubscribed(evidence) is not None
    cause = find_cause(step_shares(step), slower, step.late_by, crowded, step.one_machine)
    return cause_of(cause, step, evidence) if cause else "none"


def cause_of(wait: str, step: Step, evidence: ResourceUsage) -> str:
    """Return the cause of a wait of `step_shares`, or the wait itself if no cause is known."""
    # Without one slow rank the ranks take turns, and no machine is the cause.
    if wait == "straggler" and find_slowest_rank(step).is_straggler:
        return straggler_cause(step, evidence)
    if wait == "data" or (wait == "straggler" and step.late_by == "data"):
        return data_cause(evidence, late_hosts(step))
    if wait == "network" and find_slow_link(evidence.networks):
        return "slow_link"
    return wait


class ExplainedWait(NamedTuple):
    cause: str  # as in find_bottleneck
    seconds: float  # of the mean step


def last_rank_causes(step: Step, evidence: ResourceUsage) -> dict[str, ExplainedWait]:
    """Explain each wait of the last rank of a step, and its computing, by their names."""
    spent, slow, computing = step.last_rank, find_slowest_rank(step), of_kind(COMPUTE)
    compute = sum(spent[name] for name in computing)
    # If one rank computes slowly, its delay is no computing that all ranks need.
    computes_slowly = slow.is_straggler and slow_category(step) in computing
    delay = min(compute, slow.delay) if computes_slowly else 0.0
    waits = {"data": spent["data"], "h2d": spent["h2d"], "network": spent["sync_exposed"]}
    waits |= {"straggler": delay, "rank_work": spent["other"], "compute": compute - delay}
    causes = {wait: cause_of(wait, step, evidence) for wait in waits}
    if most_oversubscribed(evidence):
        causes["compute"] = "cpu_oversubscribed"
    return {wait: ExplainedWait(causes[wait], seconds) for wait, seconds in waits.items()}


def most_oversubscribed(evidence: ResourceUsage) -> Usage | None:
    """Return the machine whose processors are most oversubscribed, if any is."""
    full = [use for use in evidence.machines if use.is_oversubscribed]
    return max(full, key=lambda use: use.mean(figures.QUEUED), default=None)


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
    """Return why the loader is late on `hosts`: `data_decode`, `data_share` or `data_disk`."""
    loaders = busiest_loaders(evidence, hosts)
    if loaders and loaders.mean(figures.LOADERS_BUSY) >= DECODES:
        return "data_decode"
    # Without records of loader processes, only many bytes show that images come from a share.
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
    """Return the busiest disk of `hosts` that holds the data; None if there is none."""
    local = [use for use in disks if use.host in hosts]
    # Disks that do not hold the data are busy for other reasons.
    holding = [use for use in local if use.holds_data]
    # If no record says which disk holds the data, any disk that was read may be that disk.
    possible = [use for use in local if use.holds_data is None and use.mean(figures.DISK_READ) > 0]
    return max(holding or possible, key=lambda use: use.mean(figures.DISK_BUSY), default=None)


def straggler_cause(step: Step, evidence: ResourceUsage) -> str:
    """Return why one rank is slower than the others: other programs, its data, or itself."""
    slow = find_slowest_rank(step)
    waits, use = excess_queueing(step, evidence), evidence.machine(slow.rank.host)
    # Records without the processor time of ranks do not say who used the processors. Then the
    # longer waiting is enough.
    contended = use is not None and (use.others_busy is None or use.others_busy >= BUSY_BY_OTHERS)
    if contended and waits is not None and waits >= EXPLAINED_DELAY * slow.delay:
        return "cpu_contention"
    category = slow_category(step)
    if category == "data":
        return data_cause(evidence, {slow.rank.host})
    # `other` is what a rank does between two steps.
    return "rank_work" if category == "other" else "straggler"


def excess_queueing(step: Step, evidence: ResourceUsage) -> float | None:
    """Return how many seconds per step the slowest machine's threads wait longer for a processor
    than the median of the other machines. Return None if the waits were not recorded."""
    host = find_slowest_rank(step).rank.host
    waited = {
        use.host: use.mean(figures.WAITED) for use in evidence.machines if use.knows(figures.WAITED)
    }
    rates = [value for name, value in waited.items() if name != host]
    if host not in waited or not rates:
        return None
    return (waited[host] - statistics.median(rates)) * step.seconds


def slow_category(step: Step) -> str:
    """Return the category of work in which the slowest rank most exceeds the mean of all."""
    slowest_rank = find_slowest_rank(step).rank
    return most_in_excess(slowest_rank.seconds, [rank.seconds for rank in step.ranks])


class SlowLink(NamedTuple):
    """A machine whose cable or network card is slow. Rates in bytes per second."""

    host: str
    rate: float
    others_rate: float  # the median of the other machines' best links


LINK_BYTES = 4e6  # a link that carried less is not judged
SLOW_LINK = 0.5  # a slower link reaches less than this fraction of the other machines' rate


def find_slow_link(networks: Sequence[NetworkUsage]) -> SlowLink | None:
    """Find a machine that neither sends nor receives fast while the other machines do."""
    # A machine records its peers by their addresses, and its own address as `source`.
    hosts = {traffic.source: use.host for use in networks for traffic in use.sent_to.values()}
    best_rates: dict[str, float] = {}
    for sender in networks:
        for address, traffic in sender.sent_to.items():
            receiver = hosts.get(address, sender.host)
            if receiver != sender.host and traffic.sent >= LINK_BYTES and traffic.busy > 0:
                for host in (sender.host, receiver):
                    rate = max(best_rates.get(host, 0.0), traffic.sent / traffic.busy)
                    best_rates[host] = rate
    # If two machines share one link, nobody can say which end of the link is slow.
    if len(best_rates) < 3:
        return None
    host = min(best_rates, key=lambda name: best_rates[name])
    others_rate = statistics.median(rate for name, rate in best_rates.items() if name != host)
    # A slow cable slows down all links of its machine, so even the best of these links is slow.
    is_slow = best_rates[host] < SLOW_LINK * others_rate
    return SlowLink(host, best_rates[host], others_rate) if is_slow else None
