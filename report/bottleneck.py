"""Which part of training holds it up, decided by rules on the measured step and nothing else.

GPU utilisation is no evidence: it is 100 % while NCCL waits.
"""

from __future__ import annotations

from report.disk import DiskUse, ShareUse
from report.measure import Step

# A wait is the bottleneck from a quarter of training time: without it the run would be at least a
# third faster.
WAIT = 0.25
# Computing is called the bottleneck when it takes at least half.
WORK = 0.5
# A disk with requests outstanding for this fraction of the time is what a late loader waits for.
DISK_BUSY = 60.0
# A file share that moves less than this (MB/s) is not where images come from.
SHARE_READS = 0.5


def parts(step: Step) -> dict[str, float]:
    """The fraction of training time (steps and saving) that each possible bottleneck takes."""
    total = step.seconds + step.checkpoint
    seconds = {
        "data": step.data,
        "h2d": step.h2d,
        "compute": step.compute,
        "network": step.network,
        "straggler": step.peers,
        "checkpoint": step.checkpoint,
    }
    return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}


def bottleneck(step: Step | None, disks: list[DiskUse], shares: list[ShareUse]) -> str:
    """The value of `bottleneck` in summary.json.

    It is the largest wait when that takes a quarter of training time; else `compute` when computing
    takes half; else `none`: no step was measured, or the time is spread over several causes.
    """
    if step is None:
        return "none"
    fractions = parts(step)
    compute = fractions.pop("compute")
    largest = max(fractions, key=lambda part: fractions[part])
    if fractions[largest] >= WAIT:
        return data_cause(disks, shares) if largest == "data" else largest
    return "compute" if compute >= WORK else "none"


def data_cause(disks: list[DiskUse], shares: list[ShareUse]) -> str:
    """Why the loader is late: the file share, a busy disk, else the processors that decode."""
    disk = data_disk(disks)
    read = disk.read if disk else 0.0
    if any(use.read >= SHARE_READS and use.read > read for use in shares):
        return "data_share"
    if disk and disk.util >= DISK_BUSY:
        return "data_disk"
    return "data_decode"


def data_disk(disks: list[DiskUse]) -> DiskUse | None:
    """The busiest disk that holds the data; where that is unknown, the busiest one read from."""
    known = [use for use in disks if use.holds_data]
    read = [use for use in disks if use.holds_data is None and use.read > 0]
    return max(known or read, key=lambda use: use.util, default=None)
