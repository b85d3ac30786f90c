"""A sum over ranks in codes: each rank owns a part of what is summed.

All ranks send the owner their values of its part; it adds them up and sends the sum to all, in
codes again. What codes leave out is kept where it was made, at the sender and at the owner, and is
added before the next coding (error feedback: Seide et al., "1-bit stochastic gradient descent",
2014; at both ends: Tang et al., "DoubleSqueeze", ICML 2019). All ranks decode the same bytes, by
operations that round alike on every machine, so their sums are equal to the bit.
"""

import dataclasses
from typing import Any, List, Union

import torch

from ..strategies import part_of
from .carrier import Stage, gather_parts, swap_parts
from .codec import Codec, Plain
from .feedback import Kept


@dataclasses.dataclass
class Bucket:
    """One bucket on its way."""

    buffer: torch.Tensor  # takes the result
    kept: Kept
    coded: torch.Tensor  # the parts that came from all ranks


@dataclasses.dataclass(frozen=True)
class Parts:
    """The stages of such a sum, of jobs (buffer, index, Kept). Kept is what was left out: of all
    parts by this rank (N x part), and of its own part's sum."""

    codec: Union[Codec, Plain]
    world: int

    def stages(self) -> List[Stage]:
        return [self._send, self._own]

    def sizes(self, values: int) -> List[int]:
        """Values of the tensors to keep for a buffer of so many."""
        part = part_of(values, self.world)
        return [self.world * part, part]

    def _send(self, job: Any, group: Any) -> Bucket:
        """Code what this rank has and what it had left out; swap parts with all ranks."""
        buffer, _, kept = job
        flat = kept.coming[0].copy_(kept.now[0])
        flat[: buffer.numel()].add_(buffer)
        whole = flat.view(self.world, -1)
        coded = self.codec.encode(whole)
        whole.sub_(self.codec.decode(coded, whole.shape[1]))
        return Bucket(buffer, kept, swap_parts(coded, group))

    def _own(self, bucket: Bucket, group: Any) -> torch.Tensor:
        """Sum the part of which this rank is the owner, and take the other owners' sums."""
        whole = bucket.kept.coming[1].copy_(bucket.kept.now[1]).view(1, -1)
        part = whole.shape[1]
        whole.add_(self.codec.decode(bucket.coded, part).sum(0))
        coded = self.codec.encode(whole)
        whole.sub_(self.codec.decode(coded, part))
        gathered = gather_parts(coded[0], self.world, group)
        result = self.codec.decode(gathered, part).view(-1)[: bucket.buffer.numel()]
        return bucket.buffer.copy_(result)
