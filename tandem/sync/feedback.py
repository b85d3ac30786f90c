"""Strategies with error feedback: what a step leaves out of the sums is kept, by each rank or,
where several share a machine, by the one of them that sends, and added in the next step.

Errors are gradients, so they are multiplied by the loss scale and follow its changes. The errors of
a step are kept only if all of its sums are finite, which every rank sees in what it receives: after
an overflow, in which the optimizer skips the step, the state is as it was before.
"""

import dataclasses
import math
from typing import Any, Callable, Dict, List, Optional, Tuple, cast

import torch

from contract.strategies import Strategy, shard_size

from .base import Sync, Topology, sum_over_ranks
from .carrier import Carrier, Flag, Stage, all_gather, all_to_all
from .codec import CODECS


@dataclasses.dataclass
class BucketState:
    """The state of one bucket: tensors as the last step left them, and those that the current step
    writes. `finite`: whether its sum is, once it has come; None where the step has not summed it.
    """

    now: List[torch.Tensor]
    coming: List[torch.Tensor]
    finite: Optional[Flag] = None


class Feedback(Sync):
    """Sums bucket by bucket in the background, by `stages`; a subclass says what is kept. Sums are
    exact before the first step, in the pass that only orders DDP's buckets, and in warm-up. The
    host must know what the loss scale is in each step."""

    follows_scale = True

    def __init__(
        self, strategy: Strategy, last_bucket: Callable[[], None], patience: float = 120.0
    ) -> None:
        super().__init__(strategy, last_bucket, patience)
        self.kept: Dict[int, BucketState] = {}
        self.scale = 1.0  # the loss scale by which all that is kept is multiplied
        self.exact = True

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        super().setup(device, topology)
        stages = self.topology.stages(self.stages(), self.blank, self.wire)
        self.carrier = Carrier(stages, device, self.patience)

    def stages(self) -> List[Stage]:
        """The stages that process (buffer, index, BucketState); the last one returns the buffer,
        and says in the state whether it is finite."""
        raise NotImplementedError

    def blank(self, job: Any) -> Any:
        """The input of the last stage, whose tensors `wire` are still to be filled."""
        raise NotImplementedError

    def wire(self, bucket: Any) -> List[torch.Tensor]:
        """The tensors, all of one dtype, from which the last stage computes the sums."""
        raise NotImplementedError

    def sizes(self, buffer: torch.Tensor, index: int) -> List[int]:
        """The number of values of each tensor kept for a bucket; all begin as zeros."""
        raise NotImplementedError

    def begin(self, scale: float, exact: bool) -> None:
        self.close()
        self.exact = exact
        if scale != self.scale:
            for kept in self.kept.values():
                torch._foreach_mul_(kept.now, scale / self.scale)
            self.scale = scale

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        if self.exact:
            return sum_over_ranks(buffer)
        summed = None
        if len(self.topology.own_ranks) > 1:
            # Started here, because all ranks hand over buckets in the same order here.
            summed = sum_over_ranks(buffer, self.topology.group)
        future = self.carrier.future()
        self.carrier.start((buffer, index, self._state_of(buffer, index)), future, summed)
        return future

    def _state_of(self, buffer: torch.Tensor, index: int) -> BucketState:
        known = self.kept.get(index)
        sizes = self.sizes(buffer, index) if self.topology.leads else []
        # Also begun anew where --bucket_mb differs from that before a resume.
        if known is None or [tensor.numel() for tensor in known.now] != sizes:
            first = [torch.zeros(size, device=buffer.device) for size in sizes]
            known = self.kept[index] = BucketState(first, [torch.zeros_like(one) for one in first])
        return known

    def close(self) -> None:
        step = [kept for kept in self.kept.values() if kept.finite is not None]
        taken = all(bool(kept.finite) for kept in step)
        for kept in step:
            kept.finite = None
            if taken:
                kept.now, kept.coming = kept.coming, kept.now

    def state_dict(self) -> Optional[Dict[str, Any]]:
        self.close()
        kept = {str(index): kept.now for index, kept in self.kept.items()}
        return {"scale": self.scale, "kept": kept}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise ValueError("no dict")
        scale = state["scale"]
        if type(scale) not in (int, float) or not 0 < scale < math.inf:
            raise ValueError("no loss scale")
        there = state["kept"]
        if not isinstance(there, dict) or not all(isinstance(one, list) for one in there.values()):
            raise ValueError("no buckets by number")
        # `_state_of` compares the sizes, once DDP has made its buckets.
        kept = {int(i): [kept_tensor(one) for one in now] for i, now in there.items()}
        self.scale = scale
        for index, tensors in kept.items():
            own = [tensor.to(self.carrier.device, copy=True) for tensor in tensors]
            self.kept[index] = BucketState(own, [torch.zeros_like(one) for one in own])


@dataclasses.dataclass
class Bucket:
    """One bucket of `ErrorFeedback` while it is exchanged."""

    buffer: torch.Tensor  # receives the result
    kept: BucketState
    coded: torch.Tensor  # what is to be sent, then what came


class ErrorFeedback(Feedback):
    """A few bits per value in each step: each machine owns a shard of what is summed.

    All send the owner their codes of its shard; it adds them up and sends the sum to all, encoded
    again. The quantisation error is kept where it arises, at the sender and at the owner (Seide et
    al., "1-bit stochastic gradient descent", 2014; at both ends: Tang et al., "DoubleSqueeze", ICML
    2019). All ranks decode the same bytes, by operations that round alike on every machine, so
    their sums are equal to the bit.

    What is kept of a bucket: what this machine left out of all shards (N x shard), and what was
    left out of the sum of its own.
    """

    def __init__(
        self, strategy: Strategy, last_bucket: Callable[[], None], patience: float = 120.0
    ) -> None:
        super().__init__(strategy, last_bucket, patience)
        self.codec = CODECS[strategy.arguments[0]]

    @property
    def owners(self) -> Tuple[int, ...]:
        """The ranks that send, of which each owns a shard."""
        return self.topology.leaders

    def stages(self) -> List[Stage]:
        return [Stage(self._code), Stage(self._exchange, sends=True), Stage(self._take)]

    def sizes(self, buffer: torch.Tensor, index: int) -> List[int]:
        shard = shard_size(buffer.numel(), len(self.owners))
        return [len(self.owners) * shard, shard]

    def blank(self, job: Any) -> Bucket:
        buffer, _, kept = job
        size = self.codec.coded_bytes(shard_size(buffer.numel(), len(self.owners)))
        return Bucket(buffer, kept, buffer.new_empty((len(self.owners), size), dtype=torch.uint8))

    def wire(self, bucket: Bucket) -> List[torch.Tensor]:
        return [bucket.coded]

    def _code(self, job: Any) -> Bucket:
        """Encode this rank's values plus what it left out before."""
        buffer, _, kept = job
        flat, values = kept.coming[0], buffer.numel()
        torch.add(kept.now[0][:values], buffer, out=flat[:values])
        flat[values:].zero_()  # after an overflow, NaN was left there
        return Bucket(buffer, kept, self.codec.encode(flat.view(len(self.owners), -1)))

    def _exchange(self, bucket: Bucket, group: Any) -> Bucket:
        """Bring the shards to their owners, and the sums of the owners to all.

        Both are sent by this one stage: if another sent the sums of one bucket while this one sends
        the shards of the next, two ranks would send to the same one at a time (see `all_to_all`).
        """
        came = all_to_all(bucket.coded, group, self.owners)
        total = self._sum(came, bucket.kept)
        bucket.coded = all_gather(total, len(self.owners), group, self.owners)
        return bucket

    def _sum(self, coded: torch.Tensor, kept: BucketState) -> torch.Tensor:
        """The codes of the sum of the shard that this rank owns."""
        whole = kept.coming[1]
        torch.add(kept.now[1], self.codec.decode(coded, len(whole)).sum(0), out=whole)
        return self.codec.encode(whole.view(1, -1))[0]

    def _take(self, bucket: Bucket) -> torch.Tensor:
        """Decode the sums of all owners."""
        values = bucket.buffer.numel()
        shard = shard_size(values, len(self.owners))
        peaks = self.codec.peaks(bucket.coded, shard)
        result = self.codec.decode(bucket.coded, shard, peaks).view(-1)[:values]
        most = min(torch.finfo(kind).max for kind in (bucket.buffer.dtype, torch.float32))
        bucket.kept.finite = Flag(peaks.max(), most)
        return bucket.buffer.copy_(result)


def kept_tensor(value: Any) -> torch.Tensor:
    """Finite fp32 numbers in one dimension, as a file gave them. Raises ValueError for others."""
    fits = (
        isinstance(value, torch.Tensor)
        and (value.layout, value.dtype) == (torch.strided, torch.float32)
        and value.device.type == "cpu"
        and value.dim() == 1
        # A file of some bytes may describe a view of any size, which a copy would make.
        and value.is_contiguous()
    )
    if not fits or not bool(torch.isfinite(value).all()):
        raise ValueError("a tensor of another kind or size, or not finite")
    return cast(torch.Tensor, value)
