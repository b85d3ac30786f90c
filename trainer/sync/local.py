"""Ranks that train by themselves and meet every H steps to average their parameters.

`z` holds the parameters that all ranks agreed on when they last met. When they meet, each rank
sends how far its parameters have moved from z, weighted by the samples that it trained on; the sum
moves z (McMahan et al., "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017; Stich, "Local SGD converges fast and communicates little", ICLR 2019). What is
quantised is that difference, which is small; the quantisation error is sent at the next meeting.

Where several ranks share a machine, the machines train by themselves: the ranks of each sum their
gradients in each step and hold the same weights.

Rounds end with an epoch: the last one is shorter, and no exchange is in flight at an epoch's end.

Tensors as large as the model are made once and used again in each round. On a CPU, where the system
hands out such memory page by page, a new one took five times as long as filling it.
"""

import contextlib
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contract.strategies import Strategy, chunks_of, round_length

from .base import State, StepInfo, Sync, kept_count, kept_tensor, sum_over_ranks
from .carrier import Carrier
from .codec import WIRES
from .feedback import BucketState
from .machines import Machines
from .parts import Parts


class LocalSGD(Sync):
    """Averages at once: after each meeting, all ranks have the same weights."""

    def __init__(
        self, strategy: Strategy, last_bucket: Callable[[], None], patience: float = 120.0
    ) -> None:
        super().__init__(strategy, last_bucket, patience)
        self.exact = True  # before the first step, and in warm-up
        self.done = 0  # steps of this round
        self.length = strategy.every
        self.samples: List[int] = []  # of this round, by machine
        self.waiting: List[torch.futures.Future[torch.Tensor]] = []
        self.kept: List[BucketState] = []

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        return not self.exact

    def start_sum(self, buffer: torch.Tensor, index: int) -> torch.futures.Future[torch.Tensor]:
        return sum_over_ranks(buffer, self.machines.group if self.keeps else None)

    def setup(self, model: DistributedDataParallel, machines: Optional[Machines] = None) -> None:
        super().setup(model, machines)
        self.names = [name for name, p in model.module.named_parameters() if p.requires_grad]
        self.weights = [p for p in model.module.parameters() if p.requires_grad]
        self.masters: Dict[nn.Parameter, nn.Parameter] = {}
        self.parts = Parts(WIRES[self.strategy.wire], self.machines.leaders)
        stages = self.machines.stages(self.parts.stages(), self.parts.blank, self.parts.wire)
        self.carrier = Carrier(stages, model.device, self.patience)

    def use_masters(self, masters: List[Tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.masters = dict(masters)

    @property
    def trained(self) -> List[torch.Tensor]:
        """What the optimizer updates: master weights in place of half-precision ones."""
        return [self.masters.get(weight, weight).data for weight in self.weights]

    def before_step(self, info: StepInfo) -> None:
        was, self.exact = self.exact, info.exact
        if self.exact:
            return
        if was:
            self.begin_anew()
        if self.done == 0:
            self.length = min(round_length(self.strategy, info.lr, info.warm), info.left)
            self.samples = [0] * self.machines.count
        now = self.machines.totals(info.rank_samples)
        self.samples = [sum(pair) for pair in zip(self.samples, now)]

    def begin_anew(self) -> None:
        """All ranks have the same weights here: these become z."""
        self._hold(flat(self.trained))
        self.done, self.kept = 0, []

    def _hold(self, z: torch.Tensor) -> None:
        # `moved`: what an exchange carries, first a machine's movement from z, then the average.
        self.z, self.moved = z, torch.empty_like(z)

    def after_step(self, skipped: Union[bool, torch.Tensor]) -> None:
        if self.exact:
            return
        self.done += 1
        self.meets = self.done >= self.length
        if self.meets:
            self.covered = self.done
            self._last_bucket()
            flat(self.trained, into=self.moved).sub_(self.z)
            self.start()
            self.finish()
            self.z.add_(self.outer())
            self.write(self.z)
            self.done = 0

    def outer(self) -> torch.Tensor:
        """How far to move z, given in `moved` how far the ranks have moved on average."""
        return self.moved

    def start(self) -> None:
        """Begin to average, in `moved`, how far the machines have moved."""
        total, machines = sum(self.samples), self.machines
        self.moved.mul_(self.samples[machines.own] / total if total else 1 / machines.count)
        chunks = self.moved.split(chunks_of(len(self.moved)))
        if not self.kept:
            self.kept = [
                self._blank(self.parts.sizes(len(chunk)) if machines.leads else [])
                for chunk in chunks
            ]
        for index, (chunk, kept) in enumerate(zip(chunks, self.kept)):
            self.waiting.append(self.carrier.future())
            self.carrier.start((chunk, index, kept), self.waiting[-1])

    def _blank(self, sizes: List[int]) -> BucketState:
        first = [torch.zeros(size, device=self.z.device) for size in sizes]
        return BucketState(first, [torch.zeros_like(one) for one in first])

    def finish(self) -> None:
        """Wait until `moved` is the average over all machines."""
        for future in self.waiting:
            future.wait()
        self.waiting = []
        for kept in self.kept:
            kept.now, kept.coming = kept.coming, kept.now

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Write `values` into the weights and into the masters that the optimizer updates."""
        for tensor, part in zip(self.trained, views(values, self.trained)):
            tensor.copy_(part)
        for weight, master in self.masters.items():
            weight.data.copy_(master)

    def common(self, state: State) -> State:
        values = views(self.z, self.trained) if self.keeps else []
        return {**state, **dict(zip(self.names, values))}

    def state_dict(self) -> Optional[Dict[str, Any]]:
        if self.exact:
            return {"own": {}}
        kept = [one.now for one in self.kept]
        return {"own": {"z": self.z, "weights": flat(self.trained), "kept": kept}}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        own = state["own"]
        if own == {}:
            return
        count = sum(tensor.numel() for tensor in self.trained)
        z, weights = kept_tensor(own["z"], count), kept_tensor(own["weights"], count)
        sizes = [self.parts.sizes(chunk) for chunk in chunks_of(count)]
        every = own["kept"]
        if not isinstance(every, list) or len(every) not in (0, len(sizes)):
            raise ValueError("other chunks")
        for kept, wanted in zip(every, sizes):
            if len(kept) != len(wanted):
                raise ValueError("other parts")
            for one, size in zip(kept, wanted):
                kept_tensor(one, size)
        device = self.carrier.device
        self.exact = False
        self._hold(z.to(device, copy=True))
        self.write(weights.to(device))
        mine = [kept if self.machines.leads else [] for kept in every]
        there = [[one.to(device, copy=True) for one in kept] for kept in mine]
        self.kept = [BucketState(now, [torch.zeros_like(one) for one in now]) for now in there]


class DiLoCo(LocalSGD):
    """Takes an outer step along the average movement, with Nesterov momentum (Douillard et al.,
    "DiLoCo", 2023: learning rate 0.7, momentum 0.9)."""

    RATE, MOMENTUM = 0.7, 0.9

    def begin_anew(self) -> None:
        super().begin_anew()
        self.momentum = torch.zeros_like(self.z)

    def outer(self) -> torch.Tensor:
        self.momentum.mul_(self.MOMENTUM).add_(self.moved)
        return self.moved.add_(self.momentum, alpha=self.MOMENTUM).mul_(self.RATE)

    def state_dict(self) -> Optional[Dict[str, Any]]:
        state = super().state_dict() or {}
        return {**state, "momentum": None if self.exact else self.momentum}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        begun = state["own"] != {}
        count = sum(tensor.numel() for tensor in self.trained)
        momentum = kept_tensor(state["momentum"], count) if begun else None
        super().load_state_dict(state)
        if momentum is not None:
            self.momentum = momentum.to(self.carrier.device, copy=True)


class Overlap(LocalSGD):
    """Averages while the next steps compute. A rank keeps what it has learned in the meantime: its
    weights become the average as of the start of the exchange plus its own movement since (Wang et
    al., "Overlap local SGD", ICASSP 2020, and CoCoD-SGD, Shen et al., IJCAI 2019)."""

    COUNTED = ("done", "length", "owed", "samples", "since")  # the position within a round

    def __init__(
        self, strategy: Strategy, last_bucket: Callable[[], None], patience: float = 120.0
    ) -> None:
        super().__init__(strategy, last_bucket, patience)
        self.in_flight = False
        self.owed: List[int] = []  # samples of the round that is to be exchanged, by machine
        self.since = 0  # steps since all ranks met

    def begin_anew(self) -> None:
        super().begin_anew()
        self.owed, self.since = [], 0

    def _hold(self, z: torch.Tensor) -> None:
        super()._hold(z)
        self.before = torch.empty_like(z)  # the weights when the exchange began

    def before_step(self, info: StepInfo) -> None:
        starts = self.done == 0
        super().before_step(info)
        self.last = info.left == 1
        if not self.exact and starts and self.owed:
            torch.sub(flat(self.trained, into=self.before), self.z, out=self.moved)
            samples, self.samples = self.samples, self.owed
            self.start()
            self.samples, self.owed, self.in_flight = samples, [], True

    def after_step(self, skipped: Union[bool, torch.Tensor]) -> None:
        if self.exact:
            return
        self.done, self.since = self.done + 1, self.since + 1
        due = self.done >= min(self.delay, self.length) or self.last
        self.meets = due and self.in_flight
        if self.meets:
            self._last_bucket()
            self.covered, self.since = self.since, 0
            self.finish()
            self.z.add_(self.moved)
            own = flat(self.trained, into=self.moved).sub_(self.before)
            self.in_flight = False
            self.write(own.add_(self.z))
        if self.done >= self.length:
            self.done, self.owed = 0, self.samples

    @property
    def delay(self) -> int:
        return self.strategy.delay

    @contextlib.contextmanager
    def _agreed(self) -> Any:
        own = flat(self.trained)
        average = own / (self.machines.count * len(self.machines.here))
        dist.all_reduce(average)
        self.write(average)
        try:
            yield
        finally:
            self.write(own)

    def agreed(self) -> ContextManager[None]:
        return contextlib.nullcontext() if self.exact else self._agreed()

    def state_dict(self) -> Optional[Dict[str, Any]]:
        state = super().state_dict() or {}
        return {**state, **{name: getattr(self, name) for name in self.COUNTED}}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        counted = {name: state[name] for name in self.COUNTED}
        for name in ("done", "length", "since"):
            kept_count(counted[name])
        if counted["done"] >= counted["length"]:
            raise ValueError("a round that should have ended")
        for name, none in (("owed", True), ("samples", counted["done"] == 0)):
            sums = counted[name]
            if not isinstance(sums, list) or not (
                len(sums) == self.machines.count or (none and sums == [])
            ):
                raise ValueError("samples of other machines")
            for one in sums:
                kept_count(one)
        super().load_state_dict(state)
        for name, value in counted.items():
            setattr(self, name, value)


@torch.no_grad()
def flat(tensors: List[torch.Tensor], into: Optional[torch.Tensor] = None) -> torch.Tensor:
    """All values in fp32, one after the other, written into `into` or into a new tensor."""
    if into is None:
        count = sum(tensor.numel() for tensor in tensors)
        into = torch.empty(count, dtype=torch.float32, device=tensors[0].device)
    for part, tensor in zip(views(into, tensors), tensors):
        part.copy_(tensor)
    return into


def views(values: torch.Tensor, like: List[torch.Tensor]) -> List[torch.Tensor]:
    parts = values.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like)]
