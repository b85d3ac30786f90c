"""Round values to a few levels, and add the errors in the next step: error feedback, `ef`.

`attach.py` calls this strategy, `codec.py` rounds, and `carrier.py` sends. Each sender keeps its
rounding errors. If several ranks share a machine, only their leader sends. Rounding errors are
parts of gradients, so they are multiplied by the loss scale and follow its changes.

After an overflow the optimizer skips the step. The strategy then discards the step's errors, and
its state stays as it was. Each rank sees an overflow in the sums that it receives: they are not
finite. `settle` undoes what sums changed in the state if no optimizer used them, such as a
discriminator's sums in its generator's step.

Per-value scales (`own`, see codec.py) have nothing to do with the loss scale. They come from a
running mean of the squares of the sums. All ranks receive the same sums, so these means are bit for
bit equal on all ranks. Ranks update the means in each finite step, also in exact steps. A
checkpoint holds the means once, by the parameters' names.
"""

import dataclasses
import functools
import hashlib
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple, cast

import torch
import torch.distributed as dist

from contract.errors import UserError
from contract.strategies import OWN, Strategy, shard_size

from .base import ALL_USED, Future, Sync, Topology, Unused, sum_over_ranks
from .carrier import Carrier, Flag, Stage, all_gather, all_to_all, to_host
from .codec import CODECS, KEPT, Operations, learn
from .entropy import TRIAL_STEPS, UNABLE, EntropyCoder, can_compress

# Warn after this number of steps in a row whose sums were not finite. A GradScaler that starts too
# high (2**16) overflows in fewer steps, because each overflow halves its scale.
LOST_STEPS = 20
SENT, OWNED = 0, 1  # the indices of a bucket's two error tensors: see `ErrorFeedback`


@dataclasses.dataclass
class BucketState:
    """The state of one bucket between steps, as fp32 tensors of one dimension.

    `current`: tensors that the last step left. `pending`: tensors that this step writes.
    `finite`: whether this step's sum is finite; None until the step sums this bucket.
    `parameters`: those of the bucket, in the order of their values. `starts`: the index in the
    bucket at which each tensor begins. `fallback`: while sums wait in .grad for an optimizer step,
    the tensors as they were before the first of these sums; otherwise None.
    """

    current: List[torch.Tensor]
    pending: List[torch.Tensor]
    finite: Optional[Flag] = None
    parameters: Sequence[torch.Tensor] = ()
    starts: Sequence[int] = (0,)
    fallback: Optional[List[torch.Tensor]] = None
    can_undo: bool = False  # `pending` holds `current` as it was before the last sum

    @classmethod
    def blank(cls, sizes: Sequence[int], device: torch.device) -> "BucketState":
        """Return a state with a tensor of zeros for each of `sizes`."""
        current = [torch.zeros(size, device=device) for size in sizes]
        return cls(current, [torch.zeros_like(tensor) for tensor in current])

    def close(self, keep: bool) -> None:
        """End a step. `keep`: `pending` becomes the state; otherwise `current` stays the state."""
        self.finite, self.can_undo = None, keep
        if keep:
            self.current, self.pending = self.pending, self.current
            return
        # In the padding behind a bucket's values, to which no step copies values, a NaN would stay.
        for tensor in self.pending:
            tensor.zero_()

    def settle(self, unused: Unused) -> None:
        """Undo in the state the sums that were zeroed. For sums that a step may still use, keep the
        earlier state as `fallback`: they may be zeroed later."""
        # After `close` has swapped the tensors, `pending` holds the state before the last sum.
        earlier = self.pending if self.fallback is None and self.can_undo else self.fallback
        self.can_undo = False
        if earlier is None:
            return
        # In `unused`, True means that the sum is still in .grad, and False that it was zeroed.
        has_waiting_sums = any(unused.get(parameter, False) for parameter in self.parameters)
        if has_waiting_sums and self.fallback is None:
            # The next sum writes to `pending`, which must not overwrite the earlier state.
            self.fallback = earlier
            self.pending = [torch.zeros_like(tensor) for tensor in earlier]
        end = 0
        for parameter in self.parameters:
            begin, end = end, end + parameter.numel()
            for start, current_tensor, earlier_tensor in zip(self.starts, self.current, earlier):
                # A shard's tensor begins within the bucket, so it may hold only a part of this
                # parameter, or nothing: then the slice is empty.
                values = slice(max(begin - start, 0), max(end - start, 0))
                if unused.get(parameter) is False:
                    current_tensor[values].copy_(earlier_tensor[values])
                elif has_waiting_sums and parameter not in unused:
                    # A step used this parameter's sum, so that nothing may undo the sum later.
                    earlier_tensor[values].copy_(current_tensor[values])
        if not has_waiting_sums:
            self.fallback = None


@dataclasses.dataclass
class Squares(BucketState):
    """Running mean squares of one bucket's sums: one tensor, padded with zeros to whole shards."""

    @property
    def means(self) -> torch.Tensor:
        """Return the mean squares that earlier steps left."""
        return self.current[0]

    @property
    def new_means(self) -> torch.Tensor:
        """Return the tensor for the mean squares after this step."""
        return self.pending[0]

    def settle(self, unused: Unused) -> None:
        # A sum that waits in .grad is contained in the next sum of the same step. The means must
        # not count it twice, so it is undone like a zeroed sum.
        super().settle(dict.fromkeys(unused, False))

    def by_parameter(self) -> Dict[torch.Tensor, torch.Tensor]:
        """Return for each parameter a view of its mean squares."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return dict(zip(self.parameters, self.means[: sum(sizes)].split(sizes)))


@dataclasses.dataclass
class Job:
    """A bucket before the first stage of `carrier.py`. `squares` is None with scale `peak`."""

    buffer: torch.Tensor  # the bucket's values, divided by the number of ranks
    errors: BucketState
    squares: Optional[Squares]


@dataclasses.dataclass
class Bucket:
    """One bucket of `ErrorFeedback` on its way through the stages of `carrier.py`. N machines send
    to each other; each owns one shard of the bucket's values."""

    buffer: torch.Tensor  # as in `Job`, later the average over all ranks
    errors: BucketState
    coded: torch.Tensor  # uint8 (N, bytes of a shard): codes to send, later the codes of all sums
    messages: Sequence[torch.Tensor] = ()  # the rows of `coded`, if an entropy coder compresses
    squares: Optional[Squares] = None  # None with scale `peak`
    scales: Optional[torch.Tensor] = None  # of all values (N x shard), as `coding.scales` made them


class ErrorFeedback(Sync):
    """Averages gradients in a few levels per value; each machine owns one shard of the sum.

    All machines send their codes of a shard to its owner. The owner adds them up, encodes the sum,
    and sends the sum to all. The sender and the owner each keep the rounding errors that they make
    (Seide et al., "1-bit stochastic gradient descent", 2014; at both ends: Tang et al.,
    "DoubleSqueeze", ICML 2019). All ranks decode the same bytes with operations that round alike on
    every machine, so the sums, and the scales made from them, are bit for bit equal.

    The errors of a bucket are two fp32 tensors. SENT: the errors of all values that this machine
    sent (N x shard). OWNED: the errors of the sum that this machine owns (shard). Sums are exact
    before the first step, when DDP orders its buckets, and in warm-up.
    """

    follows_scale = True

    def __init__(self, strategy: Strategy, patience: float = 120.0) -> None:
        super().__init__(strategy, patience)
        self.errors: Dict[int, BucketState] = {}  # by bucket number
        self.scale = 1.0  # the loss scale by which all states are multiplied
        self.exact = True  # whether this step sums exactly
        self.has_begun = False  # earlier sums only ordered DDP's buckets
        self.codec = CODECS[strategy.levels]
        self.coding: Any = Operations(self.codec)  # or kernels.Kernels, on a GPU
        # Per-value scales are learned from the sums. With `for_family(None)`, `auto` means `own`.
        self.learns = strategy.for_family(None).scale == OWN
        self._squares: Dict[int, Squares] = {}  # by bucket number
        # Mean squares of parameters whose bucket is not known yet, or has been remade by DDP.
        self._unplaced_squares: Dict[torch.Tensor, torch.Tensor] = {}
        self._digest = 0  # of the mean squares that were loaded
        self.coder: Optional[EntropyCoder] = None  # on all ranks or on none
        self._coded_steps = 0
        self._lost_steps = 0  # steps in a row whose sums were not finite

    def setup(self, device: torch.device, topology: Optional[Topology] = None) -> None:
        super().setup(device, topology)
        # While one bucket is sent, the other stages encode or decode the next buckets.
        exchange = Stage(self._exchange, sends=True)
        stages = [Stage(self._code), Stage(self._compress), exchange, Stage(self._take)]
        # A rank that is no leader runs only `_make_blank`, and `_take` on its leader's broadcast.
        stages = self.topology.arrange_stages(
            stages, self._make_blank, lambda bucket: [bucket.coded]
        )
        self.carrier = Carrier(stages, device, self.patience)
        if device.type == "cuda":
            self.try_kernels(device)
        # A rank without zstandard could not read compressed messages, so then no rank compresses.
        ready_ranks = sum_over_ranks(torch.tensor(float(can_compress()), device=device)).wait()
        if ready_ranks == self.topology.rank_count:
            self.coder = EntropyCoder()
        else:
            self.note = f"{self.strategy.spec}: {UNABLE}"

    def try_kernels(self, device: torch.device) -> None:
        """Use Triton's kernels if they work on this device; otherwise print why not."""
        try:
            from .kernels import try_out  # imports Triton

            self.coding = try_out(self.codec, self.learns, device)
        except ImportError:  # old torches contain no Triton, and nobody can change that
            return
        except Exception as error:  # Triton raises many kinds: no compiler, an old GPU
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(
                f"{self.strategy.spec}: Triton's kernels do not work on this GPU, so torch encodes "
                f"the gradients, which is slower ({reason})"
            )

    def end(self) -> None:
        super().end()
        self.carrier.end()
        self._end_coder()

    def _end_coder(self) -> None:
        if self.coder is not None:
            self.coder.end()
            self.coder = None

    def begin(self, scale: float, exact: bool, unused: Unused = ALL_USED) -> None:
        # Ranks may have loaded different mean squares, and would then decode the same bytes to
        # different sums. If the mean squares are equal now, they stay equal.
        if self.learns and not self.has_begun:
            limits = torch.tensor([self._digest, -self._digest], device=self.carrier.device)
            dist.all_reduce(limits, dist.ReduceOp.MAX)
            # Now the largest digest and minus the smallest: their sum is 0 if all are equal.
            if int(limits.sum()):
                raise UserError(
                    f"{self.strategy.spec}: the ranks resume with different mean squares of the "
                    "gradients: load checkpoints that all ranks saved after the same step."
                )
        self.settle(unused)
        # `self.exact` still belongs to the last step.
        if self.has_begun and not self.exact:
            self._coded_steps += 1
            if self._coded_steps == TRIAL_STEPS and self.coder is not None:
                # All ranks must decide alike, so they add up the seconds that their coders gained.
                gain = torch.tensor(self.coder.gain, device=self.carrier.device)
                pays = bool(sum_over_ranks(gain).wait() > 0)
                self.note = f"{self.strategy.spec}: {self.coder.describe(TRIAL_STEPS, pays)}"
                if not pays:
                    self._end_coder()
        self.exact, self.has_begun = exact, True
        if scale != self.scale:
            ratio = scale / self.scale
            # `pending` keeps the old scale: nobody reads it before the next step overwrites it.
            errors = [[*state.current, *(state.fallback or ())] for state in self.errors.values()]
            multiply_all([tensor for tensors in errors for tensor in tensors], ratio)
            squares = [state.means for state in self._squares.values()]
            # Squares of gradients grow with the square of the loss scale.
            multiply_all([*squares, *self._unplaced_squares.values()], ratio**2)
            self.scale = scale

    def hook(self, bucket: dist.GradBucket) -> Future:
        # Divided before the sum, as DDP does: a sum in fp16 could overflow.
        buffer = bucket.buffer().div_(self.topology.rank_count)
        if self.exact:
            if self.has_begun and bucket.index() not in self.errors:
                # Allocates the errors in warm-up: a rank with too little memory fails early.
                self._find_errors(bucket)
            total = sum_over_ranks(buffer)
            # The sums before the first step only order DDP's buckets, which it then remakes.
            if not (self.learns and self.has_begun):
                return total
            return total.then(functools.partial(self._learn_exact, self._find_squares(bucket)))
        local_sum = None
        if len(self.topology.local_ranks) > 1:
            # This sum is not in a stage: the ranks of a machine must begin their sums in the same
            # order of buckets, which only DDP guarantees.
            local_sum = sum_over_ranks(buffer, self.topology.group)
        result = self.carrier.future()
        squares = self._find_squares(bucket) if self.learns else None
        job = Job(buffer, self._find_errors(bucket), squares)
        # The first stage waits for `local_sum`.
        self.carrier.start(job, result, local_sum)
        return result

    def _find_errors(self, bucket: dist.GradBucket) -> BucketState:
        """Return the errors of a bucket; zeros if it is new, or if its size has changed since a
        checkpoint (--bucket_mb)."""
        buffer, index = bucket.buffer(), bucket.index()
        state = self.errors.get(index)
        # Only the leader of a machine sends, so the other ranks make no rounding errors.
        sizes = self.error_sizes(buffer) if self.topology.is_leader else []
        if state is None or [tensor.numel() for tensor in state.current] != sizes:
            state = self.errors[index] = BucketState.blank(sizes, buffer.device)
        state.parameters = bucket.parameters()
        if self.topology.is_leader:
            # The sent values begin with the bucket, the sum with the shard that this rank owns.
            state.starts = 0, self._owned_shard * sizes[OWNED]
        return state

    def states(self) -> List[BucketState]:
        """Return the errors and mean squares of all buckets."""
        return [*self.errors.values(), *self._squares.values()]

    def close(self) -> None:
        # In an exact step the errors have no flag: they do not change.
        states = [state for state in self.states() if state.finite is not None]
        is_finite = all(bool(state.finite) for state in states)
        if states:
            self._lost_steps = 0 if is_finite else self._lost_steps + 1
        if self._lost_steps == LOST_STEPS:
            self.note = (
                f"{self.strategy.spec}: the gradients of {LOST_STEPS} steps in a row were not "
                "finite, so the model learns nothing; probably the loss is NaN. Load an earlier "
                "checkpoint, and lower the learning rate or clip the gradients."
            )
        # If one bucket overflowed, the optimizer skipped the step for all.
        for state in states:
            state.close(is_finite)

    def settle(self, unused: Unused) -> None:
        self.close()
        for state in self.states():
            state.settle(unused)

    def state_dict(self) -> Optional[Dict[str, Any]]:
        self.close()
        # Gradients are not saved. So the errors of sums that are still in .grad are not saved.
        errors = {
            str(index): state.fallback or state.current for index, state in self.errors.items()
        }
        return {"scale": self.scale, "kept": errors}  # "kept": the errors that are kept, by bucket

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if not isinstance(state, dict):
            raise ValueError("not a dict")
        scale = check_scale(state["scale"])
        buckets = state["kept"]
        if not isinstance(buckets, dict) or not all(isinstance(b, list) for b in buckets.values()):
            raise ValueError("'kept' does not map bucket numbers to lists")
        # Each tensor is copied below, so a small file that refers to one tensor many times could
        # fill the memory. (`_find_errors` compares sizes, once DDP has made its buckets.)
        tensors = [t for bucket in buckets.values() for t in bucket if isinstance(t, torch.Tensor)]
        addresses = [t.data_ptr() for t in tensors if t.layout is torch.strided and t.numel()]
        if len(set(addresses)) < len(addresses):
            raise ValueError("the same tensor twice")
        # Check all tensors before changing anything. A damaged file may hold a bucket number of a
        # million digits, which Python would convert for minutes: nine digits are enough.
        checked = {
            int(str(index)[:9]): [check_tensor(tensor) for tensor in bucket]
            for index, bucket in buckets.items()
        }
        self.scale = scale
        for index, bucket in checked.items():
            errors = [tensor.to(self.carrier.device, copy=True) for tensor in bucket]
            self.errors[index] = BucketState(errors, [torch.zeros_like(error) for error in errors])

    @property
    def owners(self) -> Tuple[int, ...]:
        """Return the ranks that send, one for each machine: each owns a shard of the sum."""
        return self.topology.leaders

    @property
    def state_copies(self) -> float:
        # Errors and mean squares have two tensors each: `current` and `pending`.
        error_copies = 2 * (1 + 1 / len(self.owners)) if self.topology.is_leader else 0
        return error_copies + 2 * self.learns

    @property
    def _owned_shard(self) -> int:
        """Return the number of the shard that this rank owns: its position among the owners."""
        return self.owners.index(self.topology.rank)

    def _shard_size(self, buffer: torch.Tensor) -> int:
        """Return the number of values of a bucket's shards."""
        return shard_size(buffer.numel(), len(self.owners))

    def error_sizes(self, buffer: torch.Tensor) -> List[int]:
        """Return the number of values in each of a bucket's two error tensors: SENT, OWNED."""
        shard = self._shard_size(buffer)
        return [len(self.owners) * shard, shard]

    def _learn_exact(self, state: Squares, done: torch.futures.Future[Any]) -> torch.Tensor:
        """Update mean squares with an exact sum, and return the sum."""
        total: torch.Tensor = done.value()
        # The mean squares are padded to whole shards, and the sum is not.
        values = total.numel()
        largest_square = learn(state.means[:values], total, state.new_means[:values])
        state.finite = _flag_finite(largest_square, total.dtype)
        return total

    def _find_squares(self, bucket: dist.GradBucket) -> Squares:
        """Return the mean squares of a bucket, in its parameters' order."""
        buffer, index, parameters = bucket.buffer(), bucket.index(), bucket.parameters()
        state = self._squares.get(index)
        if state is not None:
            # Compared by identity: == of tensors compares values.
            if len(parameters) == len(state.parameters) and all(
                current is earlier for current, earlier in zip(parameters, state.parameters)
            ):
                return state
            # DDP has remade all of its buckets between two steps.
            self._unplaced_squares, self._squares = self._collect_squares(), {}
        blank = BucketState.blank([self.error_sizes(buffer)[SENT]], buffer.device)
        state = Squares(blank.current, blank.pending, parameters=parameters)
        self._squares[index] = state
        # A view of each parameter's values: copying into it fills the bucket's tensor.
        for parameter, values in state.by_parameter().items():
            if parameter in self._unplaced_squares:
                values.copy_(self._unplaced_squares.pop(parameter))
        return state

    def _collect_squares(self) -> Dict[torch.Tensor, torch.Tensor]:
        """Return the mean squares of all parameters that have any, by parameter."""
        squares = dict(self._unplaced_squares)
        for state in self._squares.values():
            squares.update(state.by_parameter())
        return squares

    def common_state(self, model: torch.nn.Module) -> Optional[Dict[str, Any]]:
        if not self.learns:
            return None
        self.close()
        squares = self._collect_squares()
        named = {name: squares[p] for name, p in model.named_parameters() if p in squares}
        return {"scale": self.scale, "squares": named}

    def load_common_state(self, model: torch.nn.Module, state: Dict[str, Any]) -> None:
        if not isinstance(state, dict) or not isinstance(state["squares"], dict):
            raise ValueError("'squares' does not map names to mean squares")
        scale, digest = check_scale(state["scale"]), hashlib.sha256()
        parameters = dict(model.named_parameters())
        squares: Dict[torch.Tensor, torch.Tensor] = {}
        for name, values in state["squares"].items():
            parameter = parameters[name]
            if check_tensor(values).numel() != parameter.numel() or bool((values < 0).any()):
                raise ValueError("mean squares of another size, or below zero")
            digest.update(f"{scale} {name}".encode() + values.numpy().tobytes())
            squares[parameter] = values.to(self.carrier.device, copy=True)
        self.scale, self._squares, self._unplaced_squares = scale, {}, squares
        self._digest = int(digest.hexdigest()[:15], 16)  # fits into an int64

    # The stages of an exchange, in the order in which a leader runs them. `_make_blank` replaces
    # the first on other ranks.

    def _make_blank(self, job: Job) -> Bucket:
        """Return a bucket that receives the leader's bytes, on a rank that is no leader."""
        row_bytes = self.codec.coded_bytes(self._shard_size(job.buffer))
        coded = job.buffer.new_empty((len(self.owners), row_bytes), dtype=torch.uint8)
        # This rank decodes the sums itself, so it needs the scales, too.
        scales = self._make_scales(job.squares)
        return Bucket(job.buffer, job.errors, coded, squares=job.squares, scales=scales)

    def _make_scales(self, squares: Optional[Squares]) -> Optional[torch.Tensor]:
        """Return the scales of all values of a bucket, or None with scale `peak`. The scales come
        from the means of earlier steps, which all ranks have, so that all can decode."""
        return None if squares is None else self.coding.scales(squares.means)

    def _code(self, job: Job) -> Bucket:
        """Encode this machine's values plus its errors, and write the new errors."""
        errors, new_errors = job.errors.current[SENT], job.errors.pending[SENT]
        scales = self._make_scales(job.squares)
        coded = self.coding.code(job.buffer, errors, new_errors, scales, len(self.owners))
        return Bucket(job.buffer, job.errors, coded, squares=job.squares, scales=scales)

    def _compress(self, bucket: Bucket) -> Bucket:
        """Compress the rows that this rank sends, if there is an entropy coder."""
        if self.coder is not None:
            rows, owned_shard = to_host(bucket.coded), self._owned_shard
            # This rank never sends the row of the shard that it owns.
            bucket.messages = [
                row if number == owned_shard else self.coder.compress(row)
                for number, row in enumerate(rows)
            ]
        return bucket

    def _exchange(self, bucket: Bucket, group: Any) -> Bucket:
        """Send each shard to its owner, and each owner's sum to all.

        One stage sends both. With two stages, one bucket's sums and the next bucket's shards could
        travel at the same time. Two ranks would then send to the same rank, which halves the use of
        the links (see `all_to_all`).
        """
        # Row k of `received` is machine k's codes of the shard that this rank owns.
        received = all_to_all(bucket.coded, group, self.owners, bucket.messages, self.coder)
        total = self._sum(received, bucket)
        # Row k of the result is the sum of the shard that machine k owns.
        bucket.coded = all_gather(total, len(self.owners), group, self.owners, self.coder)
        return bucket

    def _sum(self, coded: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """Add up the codes (N, bytes) of this rank's shard. Return the codes (bytes) of the sum."""
        errors, new_errors = bucket.errors.current[OWNED], bucket.errors.pending[OWNED]
        scales = bucket.scales
        if scales is not None:
            scales = scales.view(len(self.owners), -1)[self._owned_shard]
        total: torch.Tensor = self.coding.sum(coded, errors, new_errors, scales)
        return total

    def _take(self, bucket: Bucket) -> torch.Tensor:
        """Decode all owners' sums into the bucket's buffer, and note whether they are finite."""
        buffer, squares = bucket.buffer, bucket.squares
        shard = self._shard_size(buffer)
        means = (None, None) if squares is None else (squares.means, squares.new_means)
        # `largest`: the largest square of a sum; without mean squares, the largest size of a block.
        largest = self.coding.take(bucket.coded, shard, buffer, bucket.scales, *means)
        if squares is None:
            bucket.errors.finite = Flag(largest, largest_number(buffer.dtype))
        else:
            bucket.errors.finite = squares.finite = _flag_finite(largest, buffer.dtype)
        return buffer


def _flag_finite(largest_square: torch.Tensor, dtype: torch.dtype) -> Flag:
    """Return whether sums are finite in `dtype`, by the largest square of a sum. (With per-value
    scales a block's size is the norm of scaled values, which cannot be compared with `dtype`.)"""
    # An infinite mean square would stay infinite. `learn` stores at most square / (1 - KEPT), and
    # the division by 2 is a margin.
    limit = min(largest_number(dtype) ** 2, largest_number(torch.float32) * (1 - KEPT) / 2)
    return Flag(largest_square, limit)


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest number that is finite in this type and in fp32, the type of decoding."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def multiply_all(tensors: List[torch.Tensor], factor: float) -> None:
    """Multiply tensors in place."""
    if tensors:  # torch rejects an empty list, and a rank that does not send has no tensors
        torch._foreach_mul_(tensors, factor)


def check_scale(scale: Any) -> float:
    """Return a file's loss scale, or raise ValueError."""
    if type(scale) not in (int, float) or not 0 < scale < math.inf:
        raise ValueError("no valid loss scale")
    return float(scale)


def check_tensor(value: Any) -> torch.Tensor:
    """Return a file's tensor of finite fp32 numbers in one dimension, or raise ValueError."""
    fits = (
        isinstance(value, torch.Tensor)
        and (value.layout, value.dtype) == (torch.strided, torch.float32)
        and value.device.type == "cpu"
        and value.dim() == 1
        # A file of few bytes may describe a view of any size, and a copy would allocate that size.
        and value.is_contiguous()
    )
    if not fits or not bool(torch.isfinite(value).all()):
        raise ValueError("a tensor is not finite, or of another kind or size")
    return cast(torch.Tensor, value)
