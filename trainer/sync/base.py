"""How ranks become one run: one small class for each strategy, behind this interface.

All ranks meet in each step: a communication hook of DDP sums their gradients while backward runs.

    before_step(scale, exact)
    forward, backward        the hook sums here
    optimizer
    after_step(skipped)
"""

from typing import Any, Callable, Dict, Optional, Union, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from contract.strategies import Strategy

from .machines import Machines


class Sync:
    """A subclass only has to implement `start_sum`; one that keeps state overrides the rest.

    The loss is divided by the global number of samples, so gradients are summed, never averaged:
    ranks may have different numbers of samples.
    """

    # Whether the strategy needs the loss scale; reading it may wait for the device.
    follows_scale = False

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

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = self.start_sum(bucket.buffer(), bucket.index())
        if bucket.is_last():
            self._last_bucket()
        return future

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        """Begin summing one bucket over all ranks; the future holds a tensor like `buffer`."""
        raise NotImplementedError

    def before_step(self, scale: float, exact: bool) -> None:
        """Called before the first forward of a step. `scale`: by which the loss is multiplied;
        `exact`: in warm-up, for strategies that begin with exact sums."""

    def after_step(self, skipped: Union[bool, torch.Tensor]) -> None:
        """Called after the optimizer. `skipped`: the gradients overflowed and no weight changed.
        Reading it as a bool may wait for the device."""

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """This machine's own state; None where there is none. It fits only a run with the same
        ranks on each machine: any other run begins without it."""
        return None

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Restore what `state_dict` returned, as a file gave it: everything is checked before
        anything is changed. Raises ValueError, LookupError, TypeError or OverflowError where it
        does not fit."""


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


def sum_over_ranks(tensor: torch.Tensor, group: Any = None) -> torch.futures.Future[torch.Tensor]:
    """Begin an all-reduce, over all ranks by default; the future holds the sum, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
