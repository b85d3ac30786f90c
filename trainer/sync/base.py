"""How gradients become the same on all ranks: one small class each behind this interface."""

from typing import Any, Callable, Dict, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Sync:
    """Sums gradients over ranks as a DDP communication hook.

    The loss is divided by the global number of samples, so gradients are summed, never averaged:
    ranks may have different numbers of samples. Subclasses give `start_sum`, and override the
    rest where they keep state.
    """

    def __init__(self, last_bucket: Callable[[], None]) -> None:
        # Called when the last bucket has been handed over: from here on communication is exposed.
        self._last_bucket = last_bucket

    def setup(self, model: DistributedDataParallel) -> None:
        model.register_comm_hook(None, self.hook)

    def hook(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = self.start_sum(bucket.buffer(), bucket.index())
        if bucket.is_last():
            self._last_bucket()
        return future

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        """Begin summing one bucket over all ranks; the future holds a tensor like `buffer`."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Before the first forward of a step."""

    def after_step(self, skipped: bool) -> None:
        """After the optimizer; `skipped` when the loss scale overflowed and nothing changed."""

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """This rank's own state; None where there is none."""
        return None

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


def sum_over_ranks(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Begin an all-reduce; the future holds the sum, in place."""
    work = dist.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
