"""A sum over ranks in quantised form: each rank owns a part of what is summed.

All ranks send the owner their values of its part; it adds them up and sends the sum to all, encoded
again. The quantisation error is kept where it arises, at the sender and at the owner, and is added
before the next encoding (error feedback: Seide et al., "1-bit stochastic gradient descent", 2014;
at both ends: Tang et al., "DoubleSqueeze", ICML 2019). All ranks decode the same bytes, by
operations that round alike on every machine, so their sums are equal to the bit.
"""

import dataclasses
from typing import Any, List, Tuple, Union

import torch

from ..strategies import part_of
from .carrier import Stage, gather_parts, swap_parts
from .codec import Codec, Plain
from .feedback import BucketState


@dataclasses.dataclass
class Bucket:
    """One bucket while it is exchanged."""

    buffer: torch.Tensor  # receives the result
    kept: BucketState
    coded: torch.Tensor  # what is to be sent, then what came


@dataclasses.dataclass(frozen=True)
class Parts:
    """The stages of such a sum over `ranks`, for jobs (buffer, index, BucketState). The
    state holds what was left out: from all parts by this rank (N x part), and from the sum of its
    own part."""

    codec: Union[Codec, Plain]
    ranks: Tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    def stages(self) -> List[Stage]:
        swap, gather = Stage(self._swap, sends=True), Stage(self._gather, sends=True)
        return [Stage(self._code), swap, Stage(self._own), gather, Stage(self._take)]

    def sizes(self, values: int) -> List[int]:
        """The numbers of values of the tensors to keep for a buffer of `values` numbers."""
        part = part_of(values, self.world)
        return [self.world * part, part]

    def blank(self, job: Any) -> Bucket:
        """The bucket of a rank that receives the codes of all sums from its leader."""
        buffer, _, kept = job
        size = self.codec.coded_bytes(part_of(buffer.numel(), self.world))
        return Bucket(buffer, kept, buffer.new_empty((self.world, size), dtype=torch.uint8))

    def wire(self, bucket: Bucket) -> List[torch.Tensor]:
        """The codes that the last stage decodes."""
        return [bucket.coded]

    def _code(self, job: Any) -> Bucket:
        """Encode this rank's values plus what it left out before."""
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
        """Sum the part that this rank owns, and encode the sum."""
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
        """Decode the sums of all owners."""
        values = bucket.buffer.numel()
        part = part_of(values, self.world)
        result = self.codec.decode(bucket.coded, part).view(-1)[:values]
        return bucket.buffer.copy_(result)
