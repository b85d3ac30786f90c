"""The strategy with error feedback: what a step leaves out of the sums is kept, by each rank or,
where several share a machine, by the one of them that sends, and added in the next step.

Errors are gradients, so they are multiplied by the loss scale and follow its changes. The errors of
a step are kept only if all of its sums are finite, which every rank sees in what it receives: after
an overflow, in which the optimizer skips the step, the state is as it was before. So it is where
gradients are thrown away unused, as a discriminator's are in its generator's step: see `settle`.

Where values have scales of their own, these come of a running mean of the squares of the sums that
all ranks have received. It is one thing of the run, equal to the bit on all ranks: they learn it of
each finite step, exact ones too, and a checkpoint has it once, by the parameters' names.
"""

import dataclasses
import functools
import hashlib
import math
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, cast

import torch
import torch.distributed as dist

from contract.errors import UserError
from contract.strategies import OWN, Strategy, shard_size

from .base import ALL_USED, Future, Sync, Topology, Unused, sum_over_ranks
from .carrier import Carrier, Flag, Stage, all_gather, all_to_all, to_host
from .codec import CODECS, KEPT, Operations, learn
from .entropy import TRIAL, UNABLE, EntropyCoder, can_compress

# In a row, that were not finite. A GradScaler that begins too high overflows in fewer.
LOST_STEPS = 20


@dataclasses.dataclass
class BucketState:
    """The state of one bucket: tensors as the last step left them, and those that the current step
    writes. `finite`: whether its sum is, once it has come; None where the step has not summed it.
    `parameters`: of the bucket, in its order; `starts`: where each tensor begins in the bucket.
    `held`: the tensors before the first of several sums that no optimizer has used yet.
    """

    current: List[torch.Tensor]
    pending: List[torch.Tensor]
    finite: Optional[Flag] = None
    parameters: Sequence[torch.Tensor] = ()
    starts: Sequence[int] = (0,)
    held: Optional[List[torch.Tensor]] = None
    undoable = False  # whether `pending` is what `current` was before the last sum

    @classmethod
    def blank(cls, sizes: Sequence[int], device: torch.device) -> "BucketState":
        first = [torch.zeros(size, device=device) for size in sizes]
        return cls(first, [torch.zeros_like(one) for one in first])

    def close(self, taken: bool) -> None:
        """Keep what the last sum left, where `taken`."""
        self.finite, self.undoable = None, taken
        if taken:
            self.current, self.pending = self.pending, self.current
            return
        for one in self.pending:
            one.zero_()  # NaN is left there, even where no gradient comes

    def settle(self, unused: Unused) -> None:
        """Take back what sums left that were thrown away, and hold what was before those that
        may still be."""
        before = self.pending if self.held is None and self.undoable else self.held
        self.undoable = False
        if before is None:
            return
        waiting = any(unused.get(one, False) for one in self.parameters)
        if waiting and self.held is None:
            self.held = before
            self.pending = [torch.zeros_like(one) for one in before]
        for one, part, old in self._parts(before):
            if unused.get(one) is False:
                part.copy_(old)
            elif waiting and one not in unused:
                old.copy_(part)
        if not waiting:
            self.held = None

    def _parts(
        self, before: List[torch.Tensor]
    ) -> Iterator[Tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each parameter with its values in `current` and `before`."""
        end = 0
        for one in self.parameters:
            begin, end = end, end + one.numel()
            for start, now, old in zip(self.starts, self.current, before):
                part = slice(max(begin - start, 0), max(end - start, 0))
                yield one, now[part], old[part]


@dataclasses.dataclass
class Squares(BucketState):
    """Running mean squares of one bucket, filled up to whole parts with zeros."""

    def settle(self, unused: Unused) -> None:
        """They learn of a step's last sum alone, which has in it those that it was added to."""
        super().settle(dict.fromkeys(unused, False))

    def by_parameter(self) -> Dict[torch.Tensor, torch.Tensor]:
        """By parameter."""
        sizes = [one.numel() for one in self.parameters]
        return dict(zip(self.parameters, self.current[0][: sum(sizes)].split(sizes)))


@dataclasses.dataclass
class Bucket:
    """One bucket of `ErrorFeedback` while it is exchanged."""

    buffer: torch.Tensor  # receives the result
    kept: BucketState
    coded: torch.Tensor  # what is to be sent, then what came
    messages: Sequence[torch.Tensor] = ()  # what is sent instead, through the entropy coder
    squares: Optional[Squares] = None
    own: Optional[torch.Tensor] = None  # what the scales of all values are made of (N x shard)


class ErrorFeedback(Sync):
    """A few levels per value in each step: each machine owns a shard of what is summed.

    All send the owner their codes of its shard; it adds them up and sends the sum to all, encoded
    again. The quantisation error is kept where it arises, at the sender and at the owner (Seide et
    al., "1-bit stochastic gradient descent", 2014; at both ends: Tang et al., "DoubleSqueeze", ICML
    2019). All ranks decode the same bytes, by operations that round alike on every machine, so
    their sums are equal to the bit, and so are the scales that they make of them.

    What is kept of a bucket: what this machine left out of all shards (N x shard), and what was
    left out of the sum of its own. Sums are exact before the first step, in the pass that only
    orders DDP's buckets, and in warm-up. The host must know what the loss scale is in each step.
    """

    follows_scale = True

    def __init__(self, strategy: Strategy, patience: float = 120.0) -> None:
        super().__init__(strategy, patience)
        self.kept: Dict[int, BucketState] = {}
        self.scale = 1.0  # the loss scale by which all that is kept is multiplied
        self.exact = True
        self.begun = False  # whether a step has: what was summed before only ordered buckets
        self.codec = CODECS[int(strategy.arguments[0])]
        self.coding: Any = Operations(self.codec)
        self.learns = strategy.of(None).arguments[1] == OWN
        self._squares: Dict[int, Squares] = {}
        # Of parameters that no bucket has brought yet, or whose buckets DDP has made anew.
        self._loose: Dict[torch.Tensor, torch.Tensor] = {}
        self._digest = 0  # of what was loaded
        self.coder: Optional[EntropyCoder] = None  # where all ranks have one
        self._coded_steps = self._lost_steps = 0

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        super().setup(device, topology)
        stages = self.topology.arrange_stages(self.stages(), self.blank, self.tensors_to_broadcast)
        self.carrier = Carrier(stages, device, self.patience)
        if device.type == "cuda":
            self.take_kernels(device)
        able = sum_over_ranks(torch.tensor(float(can_compress()), device=device)).wait()
        if able == len(self.topology.nodes):
            self.coder = EntropyCoder()
        else:
            self.note = f"{self.strategy.spec}: {UNABLE}"

    def take_kernels(self, device: torch.device) -> None:
        """Code by Triton's kernels, where it can make them for this device; else say why not."""
        try:
            from .kernels import try_out  # which imports Triton

            self.coding = try_out(self.codec, self.learns, device)
        except ImportError:  # an older torch brings none, and nobody can help it
            return
        except Exception as error:  # Triton's are of many kinds: no compiler, an old card
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(
                f"{self.strategy.spec}: coded by torch's operations, in more time than by Triton, "
                f"which cannot on this card ({reason})"
            )

    def end(self) -> None:
        super().end()
        self.carrier.end()
        self._end_coder()

    def _end_coder(self) -> None:
        if self.coder is not None:
            self.coder.end()
            self.coder = None

    def _judge_coder(self, coder: EntropyCoder) -> None:
        """All ranks go on with it, or none, by what it gained all of them. Collective."""
        gain = sum_over_ranks(torch.tensor(coder.gain, device=self.carrier.device)).wait()
        self.note = f"{self.strategy.spec}: {coder.describe(TRIAL, bool(gain > 0))}"
        if gain <= 0:
            self._end_coder()

    def begin(self, scale: float, exact: bool, unused: Unused = ALL_USED) -> None:
        if self.learns and not self.begun:
            self._compare_digests()
        self.settle(unused)
        if self.begun and not self.exact:
            self._coded_steps += 1
            if self._coded_steps == TRIAL and self.coder is not None:
                self._judge_coder(self.coder)
        self.exact, self.begun = exact, True
        if scale != self.scale:
            self.rescale(scale / self.scale)
            self.scale = scale

    def rescale(self, ratio: float) -> None:
        """The loss scale has changed."""
        kept = [[*one.current, *(one.held or ())] for one in self.kept.values()]
        multiply([one for tensors in kept for one in tensors], ratio)
        squares = [state.current[0] for state in self._squares.values()]
        multiply([*squares, *self._loose.values()], ratio**2)

    def hook(self, bucket: dist.GradBucket) -> Future:
        buffer = bucket.buffer().div_(len(self.topology.nodes))
        if self.exact:
            if self.begun and bucket.index() not in self.kept:
                self._state_of(bucket)  # so that memory is short now, or never
            total = sum_over_ranks(buffer)
            if not (self.learns and self.begun):
                return total
            state = self._squares_of(bucket)
            return total.then(functools.partial(self._learn_exact, state))
        summed = None
        if len(self.topology.local_ranks) > 1:
            # Started here, because all ranks hand over buckets in the same order here.
            summed = sum_over_ranks(buffer, self.topology.group)
        future = self.carrier.future()
        squares = self._squares_of(bucket) if self.learns else None
        self.carrier.start((buffer, (self._state_of(bucket), squares)), future, summed)
        return future

    def _state_of(self, bucket: dist.GradBucket) -> BucketState:
        buffer, index = bucket.buffer(), bucket.index()
        known = self.kept.get(index)
        sizes = self.sizes(buffer) if self.topology.is_leader else []
        # Also begun anew where --bucket_mb differs from that before a resume.
        if known is None or [tensor.numel() for tensor in known.current] != sizes:
            known = self.kept[index] = BucketState.blank(sizes, buffer.device)
        known.parameters = bucket.parameters()
        if self.topology.is_leader:
            known.starts = 0, self.owners.index(self.topology.rank) * sizes[1]
        return known

    def states(self) -> List[BucketState]:
        """Of all buckets."""
        return [*self.kept.values(), *self._squares.values()]

    def close(self) -> None:
        step = [kept for kept in self.states() if kept.finite is not None]
        taken = all(bool(kept.finite) for kept in step)
        if step:
            self._lost_steps = 0 if taken else self._lost_steps + 1
        if self._lost_steps == LOST_STEPS:
            self.note = (
                f"{self.strategy.spec}: the gradients of {LOST_STEPS} steps in a row were not "
                "finite, as of a loss that is NaN: nothing is learned any more. Go on from a "
                "checkpoint before that, with a lower learning rate or clipped gradients."
            )
        for kept in step:
            kept.close(taken)

    def settle(self, unused: Unused) -> None:
        self.close()
        for kept in self.states():
            kept.settle(unused)

    def state_dict(self) -> Optional[Dict[str, Any]]:
        self.close()
        # Gradients are not saved, so what a sum left that is still in them is not, either.
        kept = {str(index): kept.held or kept.current for index, kept in self.kept.items()}
        return {"scale": self.scale, "kept": kept}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise ValueError("no dict")
        scale = checked_scale(state["scale"])
        buckets = state["kept"]
        if not isinstance(buckets, dict) or not all(isinstance(b, list) for b in buckets.values()):
            raise ValueError("no buckets by number")
        # Each place is copied below, so a small file that names one tensor often would take any
        # memory. `_state_of` compares the sizes, once DDP has made its buckets.
        tensors = [t for bucket in buckets.values() for t in bucket if isinstance(t, torch.Tensor)]
        addresses = [t.data_ptr() for t in tensors if t.layout is torch.strided and t.numel()]
        if len(set(addresses)) < len(addresses):
            raise ValueError("one tensor in several places")
        kept = {
            int(str(index)[:9]): [kept_tensor(tensor) for tensor in bucket]
            for index, bucket in buckets.items()
        }
        self.scale = scale
        for index, bucket in kept.items():
            errors = [tensor.to(self.carrier.device, copy=True) for tensor in bucket]
            self.kept[index] = BucketState(errors, [torch.zeros_like(error) for error in errors])

    @property
    def owners(self) -> Tuple[int, ...]:
        """The ranks that send, of which each owns a shard."""
        return self.topology.leaders

    @property
    def state_copies(self) -> float:
        size = 2 * (1 + 1 / len(self.owners)) if self.topology.is_leader else 0
        return size + 2 * self.learns

    def stages(self) -> List[Stage]:
        exchange = Stage(self._exchange, sends=True)
        return [Stage(self._code), Stage(self._compress), exchange, Stage(self._take)]

    def sizes(self, buffer: torch.Tensor) -> List[int]:
        """The number of values of each tensor kept for a bucket; all begin as zeros."""
        shard = shard_size(buffer.numel(), len(self.owners))
        return [len(self.owners) * shard, shard]

    def _learn_exact(self, state: Squares, done: torch.futures.Future[Any]) -> torch.Tensor:
        total: torch.Tensor = done.value()
        part = slice(total.numel())
        square = learn(state.current[0][part], total, state.pending[0][part])
        state.finite = _finite(square, total.dtype)
        return total

    def _squares_of(self, bucket: dist.GradBucket) -> Squares:
        """Those of a bucket, in its own order."""
        buffer, index, parameters = bucket.buffer(), bucket.index(), bucket.parameters()
        known = self._squares.get(index)
        if known is not None:
            same = len(parameters) == len(known.parameters)
            if same and all(one is two for one, two in zip(parameters, known.parameters)):
                return known
            # DDP has made its buckets anew, all at once, between two steps.
            self._loose, self._squares = self._all_squares(), {}
        size = len(self.owners) * shard_size(buffer.numel(), len(self.owners))
        made = BucketState.blank([size], buffer.device)
        found = self._squares[index] = Squares(made.current, made.pending, None, parameters)
        for one, part in found.by_parameter().items():
            if one in self._loose:
                part.copy_(self._loose.pop(one))
        return found

    def _all_squares(self) -> Dict[torch.Tensor, torch.Tensor]:
        found = dict(self._loose)
        for state in self._squares.values():
            found.update(state.by_parameter())
        return found

    def common_state(self, model: torch.nn.Module) -> Optional[Dict[str, Any]]:
        if not self.learns:
            return None
        self.close()
        found = self._all_squares()
        named = {name: found[one] for name, one in model.named_parameters() if one in found}
        return {"scale": self.scale, "squares": named}

    def load_common_state(self, model: torch.nn.Module, state: Dict[str, Any]) -> None:
        if not isinstance(state, dict) or not isinstance(state["squares"], dict):
            raise ValueError("no mean squares by name")
        scale, told = checked_scale(state["scale"]), hashlib.sha256()
        ours = dict(model.named_parameters())
        found: Dict[torch.Tensor, torch.Tensor] = {}
        for name, value in state["squares"].items():
            if kept_tensor(value).numel() != ours[name].numel() or bool((value < 0).any()):
                raise ValueError("mean squares of another size, or below zero")
            told.update(f"{scale} {name}".encode() + value.numpy().tobytes())
            found[ours[name]] = value.to(self.carrier.device, copy=True)
        self.scale, self._squares, self._loose = scale, {}, found
        self._digest = int(told.hexdigest()[:15], 16)

    def _compare_digests(self) -> None:
        """All ranks must go on with the same scales. Collective. Raises UserError."""
        ends = torch.tensor([self._digest, -self._digest], device=self.carrier.device)
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        if int(ends.sum()):
            raise UserError(
                f"{self.strategy.spec}: the ranks go on with different mean squares of their sums: "
                "load what all of them saved after the same step."
            )

    def blank(self, job: Any) -> Bucket:
        buffer, (kept, squares) = job
        size = self.codec.coded_bytes(shard_size(buffer.numel(), len(self.owners)))
        coded = buffer.new_empty((len(self.owners), size), dtype=torch.uint8)
        return Bucket(buffer, kept, coded, squares=squares, own=self._scales(squares))

    def tensors_to_broadcast(self, bucket: Bucket) -> List[torch.Tensor]:
        return [bucket.coded]

    def _scales(self, squares: Optional[Squares]) -> Optional[torch.Tensor]:
        return None if squares is None else self.coding.scales(squares.current[0])

    def _code(self, job: Any) -> Bucket:
        """Encode this rank's values plus what it left out before."""
        buffer, (kept, squares) = job
        own, known, left = self._scales(squares), kept.current[0], kept.pending[0]
        coded = self.coding.code(buffer, known, left, own, len(self.owners))
        return Bucket(buffer, kept, coded, squares=squares, own=own)

    def _compress(self, bucket: Bucket) -> Bucket:
        if self.coder is not None:
            rows, own = to_host(bucket.coded), self.owners.index(self.topology.rank)
            # The own one stays here.
            bucket.messages = [
                row if number == own else self.coder.compress(row)
                for number, row in enumerate(rows)
            ]
        return bucket

    def _exchange(self, bucket: Bucket, group: Any) -> Bucket:
        """Bring the shards to their owners, and the sums of the owners to all.

        Both are sent by this one stage: if another sent the sums of one bucket while this one sends
        the shards of the next, two ranks would send to the same one at a time (see `all_to_all`).
        """
        came = all_to_all(bucket.coded, group, self.owners, bucket.messages, self.coder)
        total = self._sum(came, bucket)
        bucket.coded = all_gather(total, len(self.owners), group, self.owners, self.coder)
        return bucket

    def _sum(self, coded: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """The codes of the sum of the shard that this rank owns."""
        shard, own, kept = self.owners.index(self.topology.rank), bucket.own, bucket.kept
        if own is not None:
            own = own.view(len(self.owners), -1)[shard]
        total: torch.Tensor = self.coding.sum(coded, kept.current[1], kept.pending[1], own)
        return total

    def _take(self, bucket: Bucket) -> torch.Tensor:
        """Decode the sums of all owners."""
        buffer, squares = bucket.buffer, bucket.squares
        shard = shard_size(buffer.numel(), len(self.owners))
        means = (None, None) if squares is None else (squares.current[0], squares.pending[0])
        most = self.coding.take(bucket.coded, shard, buffer, bucket.own, *means)
        if squares is None:
            bucket.kept.finite = Flag(most, largest(buffer.dtype))
        else:
            bucket.kept.finite = squares.finite = _finite(most, buffer.dtype)
        return buffer


def _finite(square: torch.Tensor, dtype: torch.dtype) -> Flag:
    """Whether the sums, of which this is the largest square, are finite in `dtype`: the sizes of
    blocks with own scales do not say."""
    # No mean square must become infinite: it would remain so.
    return Flag(square, min(largest(dtype) ** 2, largest(torch.float32) * (1 - KEPT) / 2))


def largest(dtype: torch.dtype) -> float:
    """The largest number of this type that is one in fp32, too."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def multiply(tensors: List[torch.Tensor], factor: float) -> None:
    """In place. (torch refuses an empty list, as a rank has it that does not send.)"""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def checked_scale(scale: Any) -> float:
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise ValueError("no loss scale")
    return float(scale)


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
