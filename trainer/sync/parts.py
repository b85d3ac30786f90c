"""A sum over ranks in codes: each rank owns a part of what is summed.

All ranks send the owner their values of its part; it adds them up and sends the sum to all, in
codes again. What codes leave out is kept where it was made, at the sender and at the owner, and is
added before the next coding (error feedback: Seide et al., "1-bit stochastic gradient descent",
2014; at both ends: Tang et al., "DoubleSqueeze", ICML 2019). All ranks decode the same bytes, by
operations that round alike on every machine, so their sums are equal to the bit.
"""

import dataclasses
from typing import Any, List, Tuple, Union

import torch

from ..strategies import part_of
from .carrier import Stage, gather_parts, swap_parts
from .codec import Codec, Plain
from .feedback import Kept


@dataclasses.dataclass
class Bucket:
    """One bucket while it is exchanged."""

    buffer: torch.Tensor  # takes the result
    kept: Kept
    coded: torch.Tensor  # what is to be sent, then what came


@dataclasses.dataclass(frozen=True)
class Parts:
    """The stages of such a sum over `ranks`, of jobs (buffer, index, Kept). Kept is what was left
    out: of all parts by this rank (N x part), and of its own part's sum."""

    codec: Union[Codec, Plain]
    ranks: Tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    def stages(self) -> List[Stage]:
        swap, gather = Stage(self._swap, sends=True), Stage(self._gather, sends=True)
        return [Stage(self._code), swap, Stage(self._own), gather, Stage(self._take)]

    def sizes(self, values: int) -> List[int]:
        """Values of the tensors to keep for a buffer of so many."""
        part = part_of(values, self.world)
        return [self.world * part, part]

    def blank(self, job: Any) -> Bucket:
        """The bucket of a rank that is handed the codes of all sums."""
        buffer, _, kept = job
        size = self.codec.coded_bytes(part_of(buffer.numel(), self.world))
        return Bucket(buffer, kept, buffer.new_empty((self.world, size), dtype=torch.uint8))

    def wire(self, bucket: Bucket) -> List[torch.Tensor]:
        """What the last stage decodes."""
        return [bucket.coded]

    def _code(self, job: Any) -> Bucket:
        """What this rank has and what it had left out, in codes."""
        buffer, _, kept = job
        flat = kept.coming[0].copy_(kept.now[0])
        flat[: buffer.numel()].add_(buffer)
        whole = flat.view(self.world, -1)
        coded = self.codec.encode(whole)
        whole.sub_(self.codec.decode(coded, whole.shape[1]))
        return Bucket(buffer, kept, coded)

    def _swap(self, bucket: Bucket, group: Any) -> Bucket:
        bucket.coded = swap_parts(bucket.coded, group, self.ranks)
        return bucket

    def _own(self, bucket: Bucket) -> Bucket:
        """Sum the part of which this rank is the owner."""
        whole = bucket.kept.coming[1].copy_(bucket.kept.now[1]).view(1, -1)
        part = whole.shape[1]
        whole.add_(self.codec.decode(bucket.coded, part).sum(0))
        bucket.coded = self.codec.encode(whole)
        whole.sub_(self.codec.decode(bucket.coded, part))
        return bucket

    def _gather(self, bucket: Bucket, group: Any) -> Bucket:
        bucket.coded = gather_parts(bucket.coded[0], self.world, group, self.ranks)
        return bucket

    def _take(self, bucket: Bucket) -> torch.Tensor:
        """The sums of all owners."""
        values = bucket.buffer.numel()
        part = part_of(values, self.world)
        result = self.codec.decode(bucket.coded, part).view(-1)[:values]
        return bucket.buffer.copy_(result)
