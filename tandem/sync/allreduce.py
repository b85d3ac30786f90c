"""The sum of gradients by an all-reduce: in their own precision, or in 16 bits.

Half the bytes: fp16 has 11 significant bits and overflows above 65,504; bf16 has 8 and the range of
float32. With BACKEND gloo sums are made from host memory, so that no NCCL kernel occupies a GPU
during a slow transfer.
"""

from typing import Any, Optional, Tuple

import torch
import torch.distributed as dist

from contract.errors import UserError

from .base import Sync, Topology, sum_over_ranks
from .carrier import Carrier, Stage, to_host

Job = Tuple[torch.Tensor, torch.Tensor]  # the bucket, and its values in host memory


class AllReduce(Sync):
    carrier: Optional[Carrier] = None  # with BACKEND gloo

    def end(self) -> None:
        super().end()
        if self.carrier is not None:
            self.carrier.end()

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        super().setup(device, topology)
        if self.strategy.uses_gloo:
            self.carrier = host_sums(device, self.patience)

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        if self.carrier is None:
            return sum_over_ranks(buffer)
        future = self.carrier.future()
        self.carrier.start(buffer, future)
        return future


class Compressed(AllReduce):
    dtype: torch.dtype

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        total = super().start_sum(buffer.to(self.dtype), index)
        return total.then(lambda done: buffer.copy_(done.value()))


class FP16(Compressed):
    dtype = torch.float16


class BF16(Compressed):
    dtype = torch.bfloat16

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        """Raises UserError where the backend cannot sum bf16, as with Gloo in torch 1.12."""
        super().setup(device, topology)
        try:
            self.start_sum(torch.zeros(1, device=device), 0).wait()
        except RuntimeError as error:
            backend = "gloo" if self.strategy.uses_gloo else dist.get_backend()
            raise UserError(
                f"--sync {self.strategy.spec}: {backend} of torch {torch.__version__} cannot sum "
                "bf16: use --sync fp16, or a newer torch."
            ) from error


def host_sums(device: torch.device, patience: float) -> Carrier:
    """Sums by Gloo. A bucket is copied to pinned memory, summed there and copied back. Each of
    these stages has a thread and a stream of its own, so that one bucket is sent while its
    neighbours are copied. On a CPU it is the same sum without the copies.

    Collective, as its `start` is: all ranks hand over their buckets in the same order. A sum fails
    if a peer is silent for `patience` seconds.
    """
    return Carrier([Stage(_to_host), Stage(_sum, sends=True), Stage(_back)], device, patience)


def _to_host(buffer: torch.Tensor) -> Job:
    return buffer, to_host(buffer)


def _sum(job: Job, group: Any) -> Job:
    dist.all_reduce(job[1], group=group)
    return job


def _back(job: Job) -> torch.Tensor:
    buffer, total = job
    return buffer.copy_(total, non_blocking=True)
