"""What ranks tell one another besides gradients."""

import io
import json
from datetime import timedelta
from typing import Any, List

import torch
import torch.distributed as dist

from contract.errors import RankError

from .compat import end_group, patient_group
from .pickles import load_tensors

PHASE = timedelta(minutes=30)  # the least time that ranks wait for the slowest one
LARGEST = 2**24  # bytes of JSON from one rank


class Exchange:
    """What ranks exchange is JSON, tensors and bytes, never Python objects, since one rank's pickle
    could run as code on all others. Each method is called by all ranks of the
    run, in the same order.

    It uses a Gloo group of its own. NCCL would take GPU memory for it, and the timeout of a step
    would be too short for phases that may take longer on one rank than on another: a compilation, a
    scan of a cold share, or a slow disk at the end. A peer's death is noticed at once: its
    connection breaks.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self._group: Any = patient_group(timeout, max(timeout, PHASE))

    def json(self, own: Any) -> List[Any]:
        """One value from each rank, in rank order; tuples become lists. Raises RankError for bytes
        that are not JSON, or too many."""
        received = self._bytes(json.dumps(own).encode(), LARGEST)
        try:
            return [json.loads(one) for one in received]
        except (ValueError, RecursionError) as error:
            raise RankError(f"a rank sent something that is not JSON: {error}.") from error

    def state(self, own: Any) -> List[Any]:
        """One value of tensors and plain containers from each rank, in rank order, on the CPU."""
        file = io.BytesIO()
        torch.save(own, file)
        return [load_tensors(io.BytesIO(one)) for one in self._bytes(file.getvalue())]

    def bytes_from(self, source: int, own: bytes) -> bytes:
        """The bytes of rank `source`, on all ranks; what the others pass as `own` is ignored."""
        length = torch.tensor([len(own)])
        dist.broadcast(length, source, group=self._group)
        content = _tensor(own) if self.rank == source else _tensor(bytes(int(length)))
        dist.broadcast(content, source, group=self._group)
        return bytes(content.numpy())

    def meet(self) -> None:
        """Wait until all ranks are here."""
        dist.all_reduce(torch.zeros(1), group=self._group)

    def end(self) -> None:
        """Give back its connections."""
        end_group(self._group)

    def _bytes(self, own: bytes, limit: int = 2**40) -> List[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(own)]), group=self._group)
        sizes = [int(length) for length in lengths]
        if max(sizes) > limit:
            raise RankError(f"rank {sizes.index(max(sizes))} sent {max(sizes)} bytes of JSON.")
        padded = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(padded, _tensor(own.ljust(max(sizes))), group=self._group)
        return [bytes(one[:size].numpy()) for one, size in zip(padded, sizes)]


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)[: len(content)]
