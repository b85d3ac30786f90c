"""How ranks become one run: one small class for each strategy, behind this interface.

The strategies form two families. In the first, all ranks meet in each step: a communication hook of
DDP sums their gradients while backward runs. In the second, ranks train by themselves and meet
every H steps, after the optimizer. The training loop is the same for both:

    before_step(info)      begin what is due; `keeps` says whether gradients stay on this rank
    forward, backward        hooks of the first family sum here
    optimizer
    after_step(skipped)      exchanges of the second family end here
    meets                    whether all ranks have met at the end of this step

A run may be saved, stopped or evaluated only where the ranks have met: no exchange is in flight
there, and `agreed()` gives the model what the ranks have in common.
"""

import contextlib
import dataclasses
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple, Union, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contract.strategies import Strategy

from .machines import Machines

State = Dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a strategy may know about the step that begins; equal on all ranks except for `scale`.
    `left`: steps to the epoch's end, including this one."""

    step: int
    left: int
    lr: float
    rank_samples: Tuple[int, ...]  # samples of each rank
    scale: float = 1.0  # by which the loss is multiplied
    exact: bool = False  # in warm-up, for strategies that begin with exact sums
    warm: bool = False  # the learning rate is still warming up


class Sync:
    """The first family's behaviour: such a subclass only has to implement `start_sum`.

    The loss is divided by the global number of samples, so gradients are summed, never averaged:
    ranks may have different numbers of samples. A subclass that keeps state, or meets less often,
    overrides the rest.
    """

    # Whether the step's gradients stay on this machine: the loss is then divided by its samples.
    keeps = False
    # Whether all ranks have met when the step ends; in the second family, only after some steps.
    meets = True
    # Whether the strategy needs `StepInfo.scale`; reading it may wait for the device.
    follows_scale = False
    # Steps between the last two meetings.
    covered = 1

    def __init__(
        self, strategy: Strategy, last_bucket: Callable[[], None], patience: float = 120.0
    ) -> None:
        self.strategy, self.patience = strategy, patience  # seconds to wait for a silent peer
        # Called when the last bucket is handed over: communication is exposed from then on.
        self._last_bucket = last_bucket

    def setup(self, model: DistributedDataParallel, machines: Optional[Machines] = None) -> None:
        """`machines`: by default, each rank counts as a machine of its own. Collective."""
        alone = Machines(tuple(range(dist.get_world_size())), dist.get_rank())
        self.machines = machines or alone
        model.register_comm_hook(None, self.hook)

    @property
    def summed(self) -> Sequence[int]:
        """The ranks whose gradients are summed in this step."""
        return self.machines.here if self.keeps else range(len(self.machines.nodes))

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = self.start_sum(bucket.buffer(), bucket.index())
        if bucket.is_last():
            self._last_bucket()
        return future

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        """Begin summing one bucket over all ranks; the future holds a tensor like `buffer`."""
        raise NotImplementedError

    def before_step(self, info: StepInfo) -> None:
        """Called before the first forward of a step."""

    def after_step(self, skipped: Union[bool, torch.Tensor]) -> None:
        """Called after the optimizer. `skipped`: the gradients overflowed and no weight changed.
        Reading it as a bool may wait for the device."""

    def use_masters(self, masters: List[Tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Takes half-precision weights, each with the fp32 copy that the optimizer updates."""

    def common(self, state: State) -> State:
        """A model's state dict with the weights that all ranks agreed on when they last met; --ema
        averages it."""
        return state

    def agreed(self) -> ContextManager[None]:
        """Within, the model has the weights that all ranks have in common, which are evaluated and
        can be resumed on another number of ranks; afterwards it has its own again, to the bit.
        Collective; only where all ranks have met."""
        return contextlib.nullcontext()

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """This machine's own state; None where there is none. It fits only a run with the same
        ranks on each machine: any other run begins without it."""
        return None

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned, as a file gave it: everything is checked before
        anything is changed. Raises ValueError, LookupError, TypeError or OverflowError where it
        does not fit."""


def kept_tensor(value: Any, size: Optional[int] = None) -> torch.Tensor:
    """Finite fp32 numbers, (size,), as a file gave them. Raises ValueError for anything else."""
    fits = (
        isinstance(value, torch.Tensor)
        and (value.layout, value.dtype) == (torch.strided, torch.float32)
        and value.dim() == 1
        # A file of some bytes may describe a view of any size, which a copy would make.
        and value.is_contiguous()
        and size in (None, value.numel())
    )
    if not fits or not bool(torch.isfinite(value).all()):
        raise ValueError("a tensor of another kind or size, or not finite")
    return cast(torch.Tensor, value)


def kept_count(value: Any) -> int:
    """The same for a whole number of 0 or more."""
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("no count")
    return value


def sum_over_ranks(tensor: torch.Tensor, group: Any = None) -> torch.futures.Future[torch.Tensor]:
    """Begin an all-reduce, over all ranks by default; the future holds the sum, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
