"""Exchange values between ranks, in addition to gradients."""

import io
import json
from datetime import timedelta
from typing import Any, List

import torch
import torch.distributed as dist

from contract.errors import RankError

from .compat import end_group, make_patient_group
from .pickles import load_tensors

SLOW_PHASE = timedelta(minutes=30)  # ranks wait at least so long for the slowest one
MAX_JSON_BYTES = 2**24  # from one rank


class Exchange:
    """Exchanges JSON, tensors and bytes. All ranks of the run must call each method, in the same
    order. Ranks never exchange Python objects: one rank's pickle could run code on all ranks.

    The exchange makes its own Gloo group, because NCCL would need GPU memory. The group's timeout
    is longer than a step's: a compilation, a scan of a slow share, or a slow disk may take longer
    on one rank. The exchange notices a peer's death at once, because the connection breaks.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self._group: Any = make_patient_group(timeout, max(timeout, SLOW_PHASE))

    def json(self, value: Any) -> List[Any]:
        """Return the values of all ranks, in rank order; tuples become lists. Raises RankError if
        a rank sends too many bytes, or bytes that are not JSON."""
        contents = self._gather_bytes(json.dumps(value).encode(), MAX_JSON_BYTES)
        try:
            return [json.loads(content) for content in contents]
        except (ValueError, RecursionError) as error:
            raise RankError(f"a rank sent bytes that are not JSON: {error}.") from error

    def state(self, value: Any) -> List[Any]:
        """Return all ranks' values, in rank order: tensors on the CPU, in plain containers."""
        file = io.BytesIO()
        torch.save(value, file)  # read by `load_tensors`, which executes no code
        contents = self._gather_bytes(file.getvalue())
        return [load_tensors(io.BytesIO(content)) for content in contents]

    def bytes_from(self, source: int, content: bytes) -> bytes:
        """Return the `content` of rank `source` on all ranks; other ranks' content is ignored."""
        # The other ranks need the length first, to allocate memory for the content.
        length = torch.tensor([len(content)])
        dist.broadcast(length, source, group=self._group)
        tensor = _make_tensor(content if self.rank == source else bytes(int(length)))
        dist.broadcast(tensor, source, group=self._group)
        return bytes(tensor.numpy())

    def meet(self) -> None:
        """Wait until all ranks have called this."""
        dist.all_reduce(torch.zeros(1), group=self._group)

    def end(self) -> None:
        """End the connections."""
        end_group(self._group)

    def _gather_bytes(self, content: bytes, limit: int = 2**40) -> List[bytes]:
        """Return all ranks' contents. Raises RankError for a content of more than `limit` bytes."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self._group)
        # Checked before memory for the contents is allocated.
        sizes = [int(length) for length in lengths]
        if max(sizes) > limit:
            raise RankError(
                f"rank {sizes.index(max(sizes))} sent {max(sizes)} bytes of JSON, and at most "
                f"{limit} are allowed."
            )
        # A collective needs tensors of one size, so shorter contents are padded.
        padded = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(padded, _make_tensor(content.ljust(max(sizes))), group=self._group)
        return [bytes(tensor[:size].numpy()) for tensor, size in zip(padded, sizes)]


def _make_tensor(content: bytes) -> torch.Tensor:
    """Return a copy of the bytes: uint8 (length)."""
    # torch.frombuffer rejects an empty buffer.
    return torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)[: len(content)]
