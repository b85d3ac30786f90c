"""The exact sum in the gradients' own precision."""

import torch

from .base import Sync, sum_over_ranks


class AllReduce(Sync):
    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        return sum_over_ranks(buffer)
