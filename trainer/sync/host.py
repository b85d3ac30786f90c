"""Sums by Gloo from host memory, so that no NCCL kernel occupies a GPU during a slow transfer.

A bucket is copied to pinned memory, summed there and copied back. Each of these stages has a thread
and a stream of its own (`carrier.py`), so that one bucket is sent while its neighbours are copied.
On a CPU it is the same sum without the copies.
"""

from typing import Any, Tuple

import torch
import torch.distributed as dist

from .carrier import Carrier, Stage, to_host

Job = Tuple[torch.Tensor, torch.Tensor]  # the bucket, and its values in host memory


class HostSums:
    """Collective, as `start` is: all ranks hand over their buckets in the same order. A sum fails
    if a peer is silent for `patience` seconds."""

    def __init__(self, device: torch.device, patience: float) -> None:
        stages = [Stage(_to_host), Stage(_sum, sends=True), Stage(_back)]
        self.carrier = Carrier(stages, device, patience)

    def start(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Begin summing over all ranks; the future holds the sum, in place."""
        future = self.carrier.future()
        self.carrier.start(buffer, future)
        return future


def _to_host(buffer: torch.Tensor) -> Job:
    return buffer, to_host(buffer)


def _sum(job: Job, group: Any) -> Job:
    dist.all_reduce(job[1], group=group)
    return job


def _back(job: Job) -> torch.Tensor:
    buffer, total = job
    return buffer.copy_(total, non_blocking=True)
