"""A sum over ranks in quantised form: each rank owns a part of what is summed.

All ranks send the owner their values of its part; it adds them up and sends the sum to all, encoded
again. The quantisation error is kept where it arises, at the sender and at the owner, and is added
before the next encoding (error feedback: Seide et al., "1-bit stochastic gradient descent", 2014;
at both ends: Tang et al., "DoubleSqueeze", ICML 2019). All ranks decode the same bytes, by
operations that round alike on every machine, so their sums are equal to the bit.
"""

import dataclasses
from typing import Any, List, Tuple

import torch

from contract.strategies import part_of

from .carrier import Stage, gather_parts, swap_parts
from .codec import Codec
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

    codec: Codec
    ranks: Tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    def stages(self) -> List[Stage]:
        return [Stage(self._code), Stage(self._exchange, sends=True), Stage(self._take)]

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
        flat, values = kept.coming[0], buffer.numel()
        torch.add(kept.now[0][:values], buffer, out=flat[:values])
        flat[values:].zero_()  # after an overflow, NaN was left there
        return Bucket(buffer, kept, self.codec.encode(flat.view(self.world, -1)))

    def _exchange(self, bucket: Bucket, group: Any) -> Bucket:
        """Bring the parts to their owners, and the sums of the owners to all.

        Both are sent by this one stage: if another sent the sums of one bucket while this one sends
        the parts of the next, two ranks would send to the same one at a time (see `swap_parts`).
        """
        came = swap_parts(bucket.coded, group, self.ranks)
        total = self._sum(came, bucket.kept)
        bucket.coded = gather_parts(total, self.world, group, self.ranks)
        return bucket

    def _sum(self, coded: torch.Tensor, kept: BucketState) -> torch.Tensor:
        """The codes of the sum of the part that this rank owns."""
        whole = kept.coming[1]
        torch.add(kept.now[1], self.codec.decode(coded, len(whole)).sum(0), out=whole)
        return self.codec.encode(whole.view(1, -1))[0]

    def _take(self, bucket: Bucket) -> torch.Tensor:
        """Decode the sums of all owners."""
        values = bucket.buffer.numel()
        part = part_of(values, self.world)
        result = self.codec.decode(bucket.coded, part).view(-1)[:values]
        return bucket.buffer.copy_(result)
