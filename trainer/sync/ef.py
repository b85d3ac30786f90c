"""Few bits a value in each step, and nothing lost: errors are kept, and sent with the next step.

Each rank owns a part of every bucket. All ranks send the owner their values of that part in codes;
it adds them up and sends the sum to all, in codes again. What the codes leave out stays where it
was made, at the sender and at the owner, and is added before the next coding (error feedback:
Seide et al., "1-bit stochastic gradient descent", 2014; at both ends: Tang et al., "DoubleSqueeze",
ICML 2019). All ranks decode the same bytes, so they stay equal to the bit.
"""

import dataclasses
from typing import Any, Callable, Dict, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..strategies import Strategy, part_of
from .base import Moment, Sync, sum_over_ranks
from .carrier import Carrier, gather_parts, swap_parts
from .codec import CODECS


@dataclasses.dataclass
class Errors:
    """What was left out of one bucket: `sent` (N, part) by this rank, `owned` (1, part) of the
    sum of its own part. The new ones count only once the step has: an overflow is no gradient."""

    sent: torch.Tensor
    owned: torch.Tensor
    new_sent: torch.Tensor
    new_owned: torch.Tensor

    def keep(self) -> None:
        self.sent, self.new_sent = self.new_sent, self.sent
        self.owned, self.new_owned = self.new_owned, self.owned


@dataclasses.dataclass
class Bucket:
    """One bucket on its way."""

    buffer: torch.Tensor  # DDP's; takes the result
    errors: Errors
    coded: torch.Tensor  # the parts that came from all ranks


class ErrorFeedback(Sync):
    def __init__(self, strategy: Strategy, last_bucket: Callable[[], None]) -> None:
        super().__init__(strategy, last_bucket)
        self.codec = CODECS[strategy.arguments[0]]
        self.errors: Dict[int, Errors] = {}
        self.scale = 1.0  # by which the errors are multiplied, as the loss was
        self.exact = True  # before the first step, and in warm-up

    def setup(self, model: DistributedDataParallel) -> None:
        self.world = dist.get_world_size()
        self.carrier = Carrier([self._send, self._own], model.device)
        super().setup(model)

    def before_step(self, moment: Moment) -> None:
        self.exact = moment.exact
        if moment.scale != self.scale:
            for errors in self.errors.values():
                errors.sent.mul_(moment.scale / self.scale)
                errors.owned.mul_(moment.scale / self.scale)
            self.scale = moment.scale

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        if self.exact:
            return sum_over_ranks(buffer)
        future = self.carrier.future()
        self.carrier.start((buffer, self._errors_of(buffer, index)), future)
        return future

    def _errors_of(self, buffer: torch.Tensor, index: int) -> Errors:
        part = part_of(buffer.numel(), self.world)
        known = self.errors.get(index)
        if known is None or known.sent.shape != (self.world, part):
            blank = torch.zeros(self.world, part, device=buffer.device)
            own = blank[:1].clone()
            known = Errors(blank, own, blank.clone(), own.clone())
            self.errors[index] = known
        return known

    def _send(self, job: Any, group: Any) -> Bucket:
        """Code what this rank has and what it had left out; swap parts with all ranks."""
        buffer, errors = job
        whole = errors.new_sent.copy_(errors.sent)
        whole.view(-1)[: buffer.numel()].add_(buffer)
        coded = self.codec.encode(whole)
        whole.sub_(self.codec.decode(coded, whole.shape[1]))
        return Bucket(buffer, errors, swap_parts(coded, group))

    def _own(self, bucket: Bucket, group: Any) -> torch.Tensor:
        """Sum the part of which this rank is the owner, and take the other owners' sums."""
        errors = bucket.errors
        part = errors.owned.shape[1]
        whole = errors.new_owned.copy_(errors.owned)
        whole.add_(self.codec.decode(bucket.coded, part).sum(0))
        coded = self.codec.encode(whole)
        whole.sub_(self.codec.decode(coded, part))
        gathered = gather_parts(coded[0], self.world, group)
        result = self.codec.decode(gathered, part).view(-1)[: bucket.buffer.numel()]
        return bucket.buffer.copy_(result)

    def after_step(self, skipped: bool) -> None:
        if not (skipped or self.exact):
            for errors in self.errors.values():
                errors.keep()

    def state_dict(self) -> Optional[Dict[str, Any]]:
        """Errors are a rank's own. Without them another number of ranks begins with none left."""
        errors = {str(index): [kept.sent, kept.owned] for index, kept in self.errors.items()}
        return {"scale": self.scale, "errors": errors}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        self.scale = state["scale"]
        for index, (sent, owned) in state["errors"].items():
            device = self.carrier.device
            both = sent.to(device), owned.to(device)
            self.errors[int(index)] = Errors(*both, *(torch.zeros_like(one) for one in both))
