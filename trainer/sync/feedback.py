"""What strategies with error feedback have in common: state that is kept from step to step, by each
rank or, where several share a machine, by the one of them that sends.

Errors are gradients, so they are multiplied by the loss scale and follow its changes. The errors of
a step are kept only if the step is taken: after an overflow, the state is as it was before.
"""

import dataclasses
import math
from typing import Any, Callable, Dict, List, Optional, Union

import torch
from torch.nn.parallel import DistributedDataParallel

from contract.strategies import Strategy

from .base import Sync, kept_tensor, sum_over_ranks
from .carrier import Carrier, Stage
from .machines import Machines


@dataclasses.dataclass
class BucketState:
    """The state of one bucket: tensors as the last step left them, and those that the current step
    writes."""

    now: List[torch.Tensor]
    coming: List[torch.Tensor]


class Feedback(Sync):
    """Sums bucket by bucket in the background, by `stages`; a subclass says what is kept. Sums are
    exact before the first step, in the pass that only orders DDP's buckets, and in warm-up. The
    host must know for each step whether it overflowed and what the loss scale was."""

    follows_scale = True

    def __init__(
        self, strategy: Strategy, last_bucket: Callable[[], None], patience: float = 120.0
    ) -> None:
        super().__init__(strategy, last_bucket, patience)
        self.kept: Dict[int, BucketState] = {}
        self.scale = 1.0  # the loss scale by which all that is kept is multiplied
        self.exact = True

    def setup(self, model: DistributedDataParallel, machines: Optional[Machines] = None) -> None:
        super().setup(model, machines)
        stages = self.machines.stages(self.stages(), self.blank, self.wire)
        self.carrier = Carrier(stages, model.device, self.patience)

    def stages(self) -> List[Stage]:
        """The stages that process (buffer, index, BucketState); the last one returns the buffer."""
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

    def before_step(self, scale: float, exact: bool) -> None:
        self.exact = exact
        if scale != self.scale:
            for kept in self.kept.values():
                torch._foreach_mul_(kept.now, scale / self.scale)
            self.scale = scale

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        if self.exact:
            return sum_over_ranks(buffer)
        summed = None
        if len(self.machines.here) > 1:
            # Started here, because all ranks hand over buckets in the same order here.
            summed = sum_over_ranks(buffer, self.machines.group)
        future = self.carrier.future()
        self.carrier.start((buffer, index, self._state_of(buffer, index)), future, summed)
        return future

    def _state_of(self, buffer: torch.Tensor, index: int) -> BucketState:
        known = self.kept.get(index)
        sizes = self.sizes(buffer, index) if self.machines.leads else []
        # Also begun anew where --bucket_mb differs from that before a resume.
        if known is None or [tensor.numel() for tensor in known.now] != sizes:
            first = [torch.zeros(size, device=buffer.device) for size in sizes]
            known = self.kept[index] = BucketState(first, [torch.zeros_like(one) for one in first])
        return known

    def after_step(self, skipped: Union[bool, torch.Tensor]) -> None:
        if not (skipped or self.exact):
            for kept in self.kept.values():
                kept.now, kept.coming = kept.coming, kept.now

    def state_dict(self) -> Optional[Dict[str, Any]]:
        kept = {str(index): kept.now for index, kept in self.kept.items()}
        return {"scale": self.scale, "kept": kept}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        scale = state["scale"]
        if type(scale) not in (int, float) or not 0 < scale < math.inf:
            raise ValueError("no loss scale")
        if not isinstance(state["kept"], dict):
            raise ValueError("no buckets by number")
        # `_state_of` compares the sizes, once DDP has made its buckets.
        kept = {int(i): [kept_tensor(one) for one in now] for i, now in state["kept"].items()}
        self.scale = scale
        for index, tensors in kept.items():
            there = [tensor.to(self.carrier.device, copy=True) for tensor in tensors]
            self.kept[index] = BucketState(there, [torch.zeros_like(one) for one in there])
