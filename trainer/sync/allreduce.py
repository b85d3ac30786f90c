"""The exact sum in the gradients' own precision."""

from typing import Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from .base import Sync, sum_over_ranks
from .host import HostSums
from .machines import Machines


class AllReduce(Sync):
    def setup(self, model: DistributedDataParallel, machines: Optional[Machines] = None) -> None:
        super().setup(model, machines)
        self.host = HostSums(model.device, self.patience) if self.strategy.by_gloo else None

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        return sum_over_ranks(buffer) if self.host is None else self.host.start(buffer)
