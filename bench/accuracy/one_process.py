"""Ranks as threads of one process, one at a time: training with the classes of tandem/sync.

A stand-in for the trainer where hundreds of short runs are compared: its strategies, optimizer,
schedule, order of images, EMA and model are the trainer's own; torch.distributed, DDP's buckets and
the threads behind an exchange (tandem/sync/carrier.py) are replaced by what stands here. What
travels is coded, swapped, summed and decoded as over a network: a test compares the sums with those
of processes over Gloo, to the bit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

from contract.options import Options
from tandem import sync as strategies_of_ranks
from tandem.sync import allreduce, feedback
from tandem.sync.codec import CODECS, Codec, Operations, learn
from trainer.data.batch import Normalise
from trainer.data.loader import epoch_order
from trainer.ema import Ema
from trainer.optim import build_optimizer, learning_rate

own = threading.local()  # `rank` and `wire` of each thread


class Wire:
    """What ranks send one another. The thread that runs holds `turn`; it lets go where it waits."""

    def __init__(self, world: int, backwards: bool = False) -> None:
        self.world = world
        self.order = range(world)[:: -1 if backwards else 1]  # of all sums
        self.turn = threading.Condition()
        self.mail: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.given: dict[int, torch.Tensor] = {}
        self.taken = 0
        self.broken = False

    def size(self) -> int:
        """As a process group has it."""
        return self.world

    def wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self.broken:
                raise RuntimeError("another rank has failed")
            self.turn.wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self.mail.setdefault((own.rank, to), []).append(tensor.clone())
        self.turn.notify_all()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        self.wait(lambda: bool(self.mail.get((source, own.rank))))
        tensor.copy_(self.mail[source, own.rank].pop(0))

    def all_reduce(self, tensor: torch.Tensor, join: Callable[..., object]) -> None:
        """In place, in the tensors' own precision."""
        self.wait(lambda: own.rank not in self.given)
        self.given[own.rank] = tensor.clone()
        self.turn.notify_all()
        self.wait(lambda: len(self.given) == self.world)
        first, *others = self.order
        tensor.copy_(self.given[first])
        for rank in others:
            join(tensor, self.given[rank], out=tensor)
        self.taken += 1
        if self.taken == self.world:
            self.taken = 0
            self.given.clear()
            self.turn.notify_all()


class Done:
    """A torch.distributed.Work, whose `wait` does it."""

    def __init__(self, work: Callable[[], None], result: list[torch.Tensor] | None = None) -> None:
        self.work, self.result = work, result

    def wait(self) -> None:
        self.work()

    def get_future(self) -> torch.futures.Future:
        self.work()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result)
        return future


class Carrier:
    """In the place of tandem/sync/carrier.py's: all stages at once, where a job is handed over.
    What an exchange brings is the same whenever it is done between there and its `wait`."""

    device = torch.device("cpu")

    def __init__(self, stages: list[Any], *_: object) -> None:
        self.stages = stages

    def future(self) -> torch.futures.Future:
        return torch.futures.Future()

    @torch.no_grad()
    def start(self, job: Any, result: torch.futures.Future, after: None = None) -> None:
        for stage in self.stages:
            job = stage.work(job, *((None,) if stage.sends else ()))
        result.set_result(job)


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: object = None, async_op: bool = False
) -> Any:
    join = torch.maximum if op == dist.ReduceOp.MAX else torch.add
    done = Done(lambda: own.wire.all_reduce(tensor, join), [tensor])
    return done if async_op else done.wait()


def _isend(tensor: torch.Tensor, peer: int, group: object = None) -> Done:
    own.wire.send(tensor, peer)
    return Done(lambda: None)


def _irecv(tensor: torch.Tensor, peer: int, group: object = None) -> Done:
    return Done(lambda: own.wire.receive(tensor, peer))


@contextmanager
def wired():
    """Within, torch.distributed is the wire of the thread that asks."""
    here: dict[str, Any] = {"all_reduce": _all_reduce, "isend": _isend, "irecv": _irecv}
    here["get_rank"] = lambda *_: own.rank
    here["get_world_size"] = lambda *_: own.wire.world
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(dist, **here))
        stack.enter_context(mock.patch.object(feedback, "Carrier", Carrier))
        # Codes arrive as they are: compressed or not, they are the same to the bit.
        stack.enter_context(mock.patch.object(feedback, "can_compress", lambda: False))
        group = mock.patch.object(allreduce, "_get_default_group", lambda: own.wire)
        stack.enter_context(group)
        yield


def run_ranks(world: int, function: Callable[[int], Any], backwards: bool = False) -> list[Any]:
    """`function(rank)` of each rank; the first one's exception. Within `wired`. `backwards`: sums
    begin with the last rank."""
    wire, results, failed = Wire(world, backwards), [None] * world, []

    def rank_main(rank: int) -> None:
        own.rank, own.wire = rank, wire
        with wire.turn:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                failed.append(error)
                wire.broken = True
            wire.turn.notify_all()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return results


@dataclass(frozen=True)  # no tuple, for which torch's hooks have another way
class Bucket:
    """A torch.distributed.GradBucket that holds all there is, in DDP's order: the last first."""

    weights: list[torch.Tensor]
    flat: torch.Tensor

    def parameters(self) -> list[torch.Tensor]:
        return self.weights

    def buffer(self) -> torch.Tensor:
        return self.flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([one.numel() for one in self.weights])
        return [part.view(one.shape) for part, one in zip(parts, self.weights)]


@dataclass
class Images:
    """uint8 (n, 3, h, w) and classes (n)."""

    train: torch.Tensor
    train_classes: torch.Tensor
    val: torch.Tensor
    val_classes: torch.Tensor


class StepLengths:
    """How far Adam moves by coded sums, compared with the exact sums of the same gradients.

    A step is m / (sqrt(v) + eps), before it is multiplied by the learning rate and without the
    decay of weights. Lengths are added up over the run, times the learning rate of their step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        self.betas, self.eps = group["betas"], group["eps"]
        self.steps = 0
        self.moments: dict[str, list[torch.Tensor]] = {}
        # `along`: of the coded step, its part in the direction of the exact one.
        self.lengths = {"coded": 0.0, "exact": 0.0, "along": 0.0}

    def add(self, lr: float, coded: torch.Tensor, exact: torch.Tensor) -> None:
        """Count a step that has these sums."""
        self.steps += 1
        steps = {}
        for name, sums in (("coded", coded), ("exact", exact)):
            first, second = self.moments.setdefault(name, [torch.zeros_like(sums) for _ in "mv"])
            first.lerp_(sums, 1 - self.betas[0])
            second.mul_(self.betas[1]).addcmul_(sums, sums, value=1 - self.betas[1])
            root = (second / (1 - self.betas[1] ** self.steps)).sqrt_().add_(self.eps)
            steps[name] = first / (1 - self.betas[0] ** self.steps) / root
            self.lengths[name] += lr * float(steps[name].norm())
        self.lengths["along"] += lr * float(steps["coded"] @ steps["exact"] / steps["exact"].norm())

    def ratios(self) -> dict[str, float]:
        """Lengths relative to those of the exact steps."""
        exact = self.lengths["exact"]
        names = {"step_length": "coded", "step_along": "along"}
        return {key: round(self.lengths[name] / exact, 5) for key, name in names.items()}


@dataclass
class Rank:
    """One rank's training. `options` are the trainer's, with per_node_batch_size of one rank."""

    options: Options
    images: Images
    model: torch.nn.Module
    world: int
    steps_per_epoch: int
    start_levels: int | None = None  # of ef's codec while the learning rate rises
    level_step: float = 0.0  # of ef's codec, unless 0
    matches_variance: bool = False  # exact steps adjust the distance of ef's levels

    def __post_init__(self) -> None:
        self.model.train()
        self.batch = self.options.per_node_batch_size
        self.whole = self.batch * self.world
        self.optimizer = build_optimizer(self.model, self.options, self.whole)
        self.normalise = Normalise(torch.device("cpu"), torch.float32, torch.channels_last)
        self.parameters = list(self.model.parameters())[::-1]
        self.passes, self.order = 0, torch.zeros(0, dtype=torch.int64)
        self.sync = self._set_up() if self.world > 1 else None
        coded = isinstance(self.sync, feedback.ErrorFeedback)
        adam = self.options.optimizer == "adamw"
        self.step_lengths = StepLengths(self.optimizer) if coded and adam else None
        self.compared_steps = 0  # exact steps that compared coded with exact sums
        average = own.rank == 0 and self.options.ema
        self.ema = Ema(self.model.state_dict(), self.options.ema) if average else None

    def _set_up(self) -> Any:
        nodes = range(self.world)
        family = self.options.family
        effective_spec = strategies_of_ranks.effective_spec(self.options.sync, nodes, family)
        sync = strategies_of_ranks.make(effective_spec)
        sync.setup(torch.device("cpu"))
        if self.level_step:
            self._code_by(sync, replace(sync.codec, step=self.level_step))
        return sync

    @staticmethod
    def _code_by(sync: Any, codec: Codec) -> None:
        sync.codec, sync.coding = codec, Operations(codec)

    def take(self) -> torch.Tensor:
        """Indices of this rank's images of the next step; a pass over all begins anew where one
        has ended, whatever the trainer's epochs are here."""
        while len(self.order) < self.whole:
            count = len(self.images.train)
            more = epoch_order(count, self.options.seed, self.passes)
            self.order, self.passes = torch.cat([self.order, more]), self.passes + 1
        begin = own.rank * self.batch
        mine = self.order[begin : begin + self.batch]
        self.order = self.order[self.whole :]
        return mine

    def train(self) -> torch.Tensor:
        """Mean loss of the last tenth of the steps."""
        total, losses = self.options.epochs * self.steps_per_epoch, []
        for step in range(total):
            losses.append(self.step(step))
        return torch.stack(losses[-total // 10 :]).mean()

    def step(self, step: int) -> torch.Tensor:
        lr = learning_rate(self.options, step, self.steps_per_epoch, self.whole)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.sync is not None:
            # As in trainer/train.py.
            exact = step < self.options.exact_epochs * self.steps_per_epoch
            # Steps 1, 2, 4, 8, ... check the distance of the levels again.
            compares = self.matches_variance and (exact or (step + 1) & step == 0)
            self.sync.begin(1.0, exact and not compares)
            if self.start_levels is not None:
                rising = step < self.options.warmup_epochs * self.steps_per_epoch
                levels = self.start_levels if rising else self.sync.strategy.arguments[0]
                # What was left out stays: it is a gradient, whatever the levels.
                self._code_by(self.sync, CODECS[int(levels)])
        taken = self.take()
        outputs = self.model(self.normalise(self.images.train[taken]))
        loss = functional.cross_entropy(outputs, self.images.train_classes[taken])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.sync is not None:
            self.sum_gradients(lr, compares)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model.state_dict())
        return loss.detach()

    def sum_gradients(self, lr: float, compares: bool) -> None:
        flat = torch.cat([one.grad.reshape(-1) for one in self.parameters])
        exact = flat / self.world
        bucket = Bucket(self.parameters, flat)
        flat.copy_(self.sync.hook(bucket).wait())
        if self.step_lengths is not None or compares:
            own.wire.all_reduce(exact, torch.add)
        if compares:
            self.match_variance(flat, exact)
            flat.copy_(exact)
        if self.step_lengths is not None and own.rank == 0:
            self.step_lengths.add(lr, flat, exact)
        for one, gradient in zip(self.parameters, bucket.gradients()):
            one.grad.copy_(gradient)

    def match_variance(self, coded: torch.Tensor, exact: torch.Tensor) -> None:
        """Adjust the distance of the levels until coded sums have the mean square of exact sums.

        All ranks have these sums to the bit, so they choose the same distance."""
        state = self.sync._squares[0]
        values = slice(exact.numel())
        # The running means learn the sums that the optimizer uses. They include this step's, so a
        # value that was zero for long does not decide alone.
        learn(state.current[0][values], exact, state.pending[0][values])
        means = state.pending[0][values].clamp(min=torch.finfo(torch.float32).tiny)
        ratio = float((coded.square() / means).sum() / (exact.square() / means).sum())
        self.compared_steps += 1
        # The first steps compare gradients of which the running means know next to nothing.
        if self.compared_steps > 16:
            distance = self.sync.codec.step * ratio**-0.4
            self._code_by(self.sync, replace(self.sync.codec, step=distance))

    @torch.no_grad()
    def hits(self) -> torch.Tensor:
        """Of this rank, which of the validation images the model, or its average, gets right."""
        self.model.eval()
        if self.ema is not None:
            self.model.load_state_dict(self.ema.average)
        found = []
        for part, classes in zip(self.images.val.split(256), self.images.val_classes.split(256)):
            found.append(self.model(self.normalise(part)).argmax(1) == classes)
        return torch.cat(found)


def train(
    options: Options,
    images: Images,
    model: torch.nn.Module,
    world: int,
    steps_per_epoch: int,
    backwards: bool = False,
    start_levels: int | None = None,
    level_step: float = 0.0,
    matches_variance: bool = False,
) -> tuple[torch.Tensor, float, dict[str, float]]:
    """Which validation images rank 0's model gets right in the end, with rank 0's batch
    statistics as the trainer's evaluation has them, its mean loss towards the end, and, of coded
    runs with AdamW, the ratios of StepLengths and the matched distance of the levels."""

    def rank_main(rank: int) -> Any:
        own_model = copy.deepcopy(model)
        mine = Rank(options, images, own_model, world, steps_per_epoch, start_levels, level_step)
        mine.matches_variance = matches_variance
        loss = mine.train()
        if rank > 0:
            return None, loss, {}
        measured = mine.step_lengths.ratios() if mine.step_lengths else {}
        if matches_variance:
            measured["distance"] = round(mine.sync.codec.step, 4)
        return mine.hits(), loss, measured

    with wired():
        results = run_ranks(world, rank_main, backwards)
    losses = [float(loss) for _, loss, _ in results]
    return results[0][0], sum(losses) / world, results[0][2]
