"""Train with several ranks in one process: each rank is a thread, and one thread runs at a time.

The study compares hundreds of short runs, for which processes would take too long. Strategies,
optimizer, schedule, order of images, EMA and model are the trainer's own. This file replaces
torch.distributed, DDP's buckets and the threads of an exchange (tandem/sync/carrier.py). Gradients
are coded, exchanged, summed and decoded as over a network: test_one_process.py compares the sums
with those of processes over Gloo, to the bit. Read Wire first, then run_ranks and Rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

from contract.options import Options
from tandem import sync as strategies_of_ranks
from tandem.sync import allreduce, feedback
from trainer.data.batch import Normalise
from trainer.data.loader import epoch_order
from trainer.ema import Ema
from trainer.optim import build_optimizer, learning_rate

current = threading.local()  # `rank` and `wire` of the running thread


class Wire:
    """Carries tensors between the ranks. The running thread holds `turn`, and releases it only in
    `wait`, so no other state needs a lock. `backwards`: sums begin with the last rank."""

    def __init__(self, world: int, backwards: bool = False) -> None:
        self.world = world
        self.summing_order = range(world)[:: -1 if backwards else 1]
        self.turn = threading.Condition()
        self.mail: dict[tuple[int, int], list[torch.Tensor]] = {}  # by (sender, receiver)
        # The running all-reduce: the tensor of each rank, and how many ranks have the result.
        self.summands: dict[int, torch.Tensor] = {}
        self.finished_ranks = 0
        self.failed = False

    def size(self) -> int:
        """Return the number of ranks, as a process group does."""
        return self.world

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let other ranks run until `ready`. Raise RuntimeError if a rank has failed."""
        while not ready():
            if self.failed:
                raise RuntimeError("another rank has failed")
            self.turn.wait()

    def send(self, tensor: torch.Tensor, receiver: int) -> None:
        self.mail.setdefault((current.rank, receiver), []).append(tensor.clone())
        self.turn.notify_all()

    def receive(self, tensor: torch.Tensor, sender: int) -> None:
        self.wait(lambda: bool(self.mail.get((sender, current.rank))))
        tensor.copy_(self.mail[sender, current.rank].pop(0))

    def all_reduce(self, tensor: torch.Tensor, join: Callable[..., object]) -> None:
        """Reduce in place, in the tensor's own precision. `join`: torch.add or torch.maximum."""
        # A fast rank may begin its next sum before all ranks have the result of this one.
        self.wait(lambda: current.rank not in self.summands)
        self.summands[current.rank] = tensor.clone()
        self.turn.notify_all()
        self.wait(lambda: len(self.summands) == self.world)
        first, *others = self.summing_order
        tensor.copy_(self.summands[first])
        for rank in others:
            join(tensor, self.summands[rank], out=tensor)
        self.finished_ranks += 1
        if self.finished_ranks == self.world:
            self.finished_ranks = 0
            self.summands.clear()
            self.turn.notify_all()


class Done:
    """Stands in for torch.distributed.Work. The work is done in `wait`."""

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
    """Stands in for the Carrier of tandem/sync/carrier.py, whose threads work in the background.
    This one does all stages of a job at once in `start`, which does not change the result."""

    device = torch.device("cpu")

    def __init__(self, stages: list[Any], *_: object) -> None:
        self.stages = stages

    def future(self) -> torch.futures.Future:
        return torch.futures.Future()

    @torch.no_grad()
    def start(self, job: Any, result: torch.futures.Future, after: None = None) -> None:
        for stage in self.stages:
            # A stage that sends also takes a process group.
            job = stage.work(job, *((None,) if stage.sends else ()))
        result.set_result(job)


def _all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: object = None, async_op: bool = False
) -> Any:
    join = torch.maximum if op == dist.ReduceOp.MAX else torch.add
    done = Done(lambda: current.wire.all_reduce(tensor, join), [tensor])
    return done if async_op else done.wait()


def _isend(tensor: torch.Tensor, peer: int, group: object = None) -> Done:
    current.wire.send(tensor, peer)
    return Done(lambda: None)


def _irecv(tensor: torch.Tensor, peer: int, group: object = None) -> Done:
    return Done(lambda: current.wire.receive(tensor, peer))


@contextmanager
def wired():
    """Replace torch.distributed by the running thread's Wire, within a `with` block."""
    functions: dict[str, Any] = {"all_reduce": _all_reduce, "isend": _isend, "irecv": _irecv}
    functions["get_rank"] = lambda *_: current.rank
    functions["get_world_size"] = lambda *_: current.wire.world
    with (
        mock.patch.multiple(dist, **functions),
        mock.patch.object(feedback, "Carrier", Carrier),
        # Compression loses nothing, so it would only cost time.
        mock.patch.object(feedback, "can_compress", lambda: False),
        mock.patch.object(allreduce, "_get_default_group", lambda: current.wire),
    ):
        yield


def run_ranks(world: int, function: Callable[[int], Any], backwards: bool = False) -> list[Any]:
    """Return [function(rank) for each rank], within `wired`. If ranks fail, raise the exception of
    the first of them. `backwards`: as of Wire."""
    wire, results, errors = Wire(world, backwards), [None] * world, []

    def rank_main(rank: int) -> None:
        current.rank, current.wire = rank, wire
        with wire.turn:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                wire.failed = True
            wire.turn.notify_all()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@dataclass(frozen=True)  # no tuple, for which torch's hooks have another way
class Bucket:
    """Stands in for torch.distributed.GradBucket. One bucket has all gradients, in DDP's order:
    those of the last parameter first. `flat`: all gradients in one dimension."""

    weights: list[torch.Tensor]
    flat: torch.Tensor

    @classmethod
    def of(cls, weights: list[torch.Tensor]) -> Bucket:
        return cls(weights, torch.cat([weight.grad.reshape(-1) for weight in weights]))

    def write_gradients(self) -> None:
        """Make the values of `flat` the weights' gradients."""
        for weight, gradient in zip(self.weights, self.gradients()):
            weight.grad.copy_(gradient)

    def parameters(self) -> list[torch.Tensor]:
        return self.weights

    def buffer(self) -> torch.Tensor:
        return self.flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([weight.numel() for weight in self.weights])
        return [part.view(weight.shape) for part, weight in zip(parts, self.weights)]


@dataclass
class Images:
    """Images are uint8 (n, 3, height, width), classes int64 (n)."""

    train: torch.Tensor
    train_classes: torch.Tensor
    val: torch.Tensor
    val_classes: torch.Tensor


class StepLengths:
    """Compares Adam's steps by coded sums with those by the exact sums of the same gradients.

    A step is m / (sqrt(v) + eps), without the learning rate and the decay of weights. The norm of
    each step, times its learning rate, is added to the run's length.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        self.betas, self.eps = group["betas"], group["eps"]
        self.steps = 0
        self.moments: dict[str, list[torch.Tensor]] = {}  # m and v of "coded" and of "exact"
        # `along`: the part of the coded step in the direction of the exact step.
        self.lengths = {"coded": 0.0, "exact": 0.0, "along": 0.0}

    def add(self, lr: float, coded: torch.Tensor, exact: torch.Tensor) -> None:
        """Add the steps that Adam makes of these sums."""
        self.steps += 1
        steps: dict[str, torch.Tensor] = {}
        for name, sums in (("coded", coded), ("exact", exact)):
            first, second = self.moments.setdefault(name, [torch.zeros_like(sums) for _ in "mv"])
            first.lerp_(sums, 1 - self.betas[0])
            second.mul_(self.betas[1]).addcmul_(sums, sums, value=1 - self.betas[1])
            root = (second / (1 - self.betas[1] ** self.steps)).sqrt_().add_(self.eps)
            steps[name] = first / (1 - self.betas[0] ** self.steps) / root
            self.lengths[name] += lr * float(steps[name].norm())
        self.lengths["along"] += lr * float(steps["coded"] @ steps["exact"] / steps["exact"].norm())

    def ratios(self) -> dict[str, float]:
        """Return the lengths relative to that of the exact steps, by their name in runs.jsonl."""
        coded, exact, along = (self.lengths[name] for name in ("coded", "exact", "along"))
        return {"step_length": round(coded / exact, 5), "step_along": round(along / exact, 5)}


@dataclass
class Rank:
    """Trains one rank. `options`: the trainer's, with one rank's batch in per_node_batch_size."""

    options: Options
    images: Images
    model: torch.nn.Module
    world: int
    steps_per_epoch: int

    def __post_init__(self) -> None:
        self.model.train()
        self.batch = self.options.per_node_batch_size
        self.total_batch = self.batch * self.world
        self.optimizer = build_optimizer(self.model, self.options, self.total_batch)
        self.normalise = Normalise(torch.device("cpu"), torch.float32, torch.channels_last)
        self.parameters = list(self.model.parameters())[::-1]
        self.passes, self.order = 0, torch.zeros(0, dtype=torch.int64)
        self.sync: Any = None
        if self.world > 1:
            ranks, family = range(self.world), self.options.family
            spec = strategies_of_ranks.effective_spec(self.options.sync, ranks, family)
            self.sync = strategies_of_ranks.make(spec)
            self.sync.setup(torch.device("cpu"))
        coded = isinstance(self.sync, feedback.ErrorFeedback)
        adam = self.options.optimizer == "adamw"
        self.step_lengths = StepLengths(self.optimizer) if coded and adam else None
        has_average = current.rank == 0 and self.options.ema
        self.ema = Ema(self.model.state_dict(), self.options.ema) if has_average else None

    def take_indices(self) -> torch.Tensor:
        """Return the indices of this rank's images of the next step. A pass over all images begins
        where one has ended, also within an epoch of the options."""
        while len(self.order) < self.total_batch:
            shuffled = epoch_order(len(self.images.train), self.options.seed, self.passes)
            self.order, self.passes = torch.cat([self.order, shuffled]), self.passes + 1
        begin = current.rank * self.batch
        indices = self.order[begin : begin + self.batch]
        self.order = self.order[self.total_batch :]
        return indices

    def train(self) -> torch.Tensor:
        """Make all steps. Return the mean loss of the last tenth of them."""
        total = self.options.epochs * self.steps_per_epoch
        losses = [self.step(number) for number in range(total)]
        return torch.stack(losses[-total // 10 :]).mean()

    def step(self, number: int) -> torch.Tensor:
        """Make a step. Return the loss of this rank's images."""
        lr = learning_rate(self.options, number, self.steps_per_epoch, self.total_batch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.sync is not None:
            # As in trainer/train.py.
            exact = number < self.options.exact_epochs * self.steps_per_epoch
            self.sync.begin(1.0, exact)
        indices = self.take_indices()
        outputs = self.model(self.normalise(self.images.train[indices]))
        loss = functional.cross_entropy(outputs, self.images.train_classes[indices])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.sync is not None:
            self.sum_gradients(lr)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model.state_dict())
        return loss.detach()

    def sum_gradients(self, lr: float) -> None:
        """Replace the gradients by the mean over all ranks."""
        bucket = Bucket.of(self.parameters)
        exact = bucket.flat / self.world
        bucket.flat.copy_(self.sync.hook(bucket).wait())
        if self.step_lengths is not None:
            current.wire.all_reduce(exact, torch.add)
            if current.rank == 0:
                self.step_lengths.add(lr, bucket.flat, exact)
        bucket.write_gradients()

    @torch.no_grad()
    def hits(self) -> torch.Tensor:
        """Return for each validation image whether the model, or its EMA, is right: bool (n)."""
        self.model.eval()
        if self.ema is not None:
            self.model.load_state_dict(self.ema.average)
        hits = []
        for images, classes in zip(self.images.val.split(256), self.images.val_classes.split(256)):
            hits.append(self.model(self.normalise(images)).argmax(1) == classes)
        return torch.cat(hits)


def train(
    make_rank: Callable[[], Rank], world: int, backwards: bool = False
) -> tuple[torch.Tensor, float, dict[str, float]]:
    """Make and train each rank. Return (hits, loss, figures).

    `hits`: as Rank.hits of rank 0, whose batch statistics the trainer's evaluation has, too.
    `loss`: the mean over the ranks towards the end. `figures` of coded runs with AdamW: those of
    StepLengths.ratios."""

    def rank_main(rank: int) -> Any:
        trained = make_rank()
        loss = float(trained.train())
        return loss, trained, trained.hits() if rank == 0 else None

    with wired():
        results = run_ranks(world, rank_main, backwards)
    _, first, hits = results[0]
    figures = first.step_lengths.ratios() if first.step_lengths else {}
    return hits, sum(loss for loss, *_ in results) / world, figures
