"""How the ranks of a script share the samples of each step: `batch_size`, `sampler` and `weigh`.

A fast machine gets more samples than a slow one, so that both finish a step together. Each rank
computes the parts of all ranks from what the launcher sends (contract/decisions.py), so no rank
waits for another. Gradients are then weighted, because DDP counts all ranks alike.
"""

import os
import sys
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from contract.decisions import OFF, Balance, choose_balance, read_measurements
from contract.errors import UserError
from contract.split import SMALLEST, rank_weights, share, split_batch

from .coordinates import read_coordinates

Sizes = Tuple[int, ...]  # samples of each rank


class State:
    """The parts of a batch that the ranks of this process' run get, and the batches that its loop
    has received."""

    def __init__(self) -> None:
        self.measured = read_measurements(os.environ)
        self.balance: Optional[Balance] = None  # until the script asks for its part
        self.rank, self._weights = 0, [1]  # of all ranks
        self.is_unequal = False  # some batch has parts that are not equal
        self.is_weighing = False  # `weigh` was called
        self.is_dealing = False  # a sampler was iterated
        self.received: Optional[List[int]] = None  # samples of each rank, over all batches

    def divide(self, total: int, name: str) -> Sizes:
        """Return the parts of `total` samples. Raises UserError for less than one for each rank."""
        if self.balance is None:
            self._decide()
        world = len(self._weights)
        if type(total) is not int or total < world:
            raise UserError(
                f"{name}: {total!r} samples cannot be divided among {world} ranks: give the whole "
                "number of samples that all ranks train on in a step."
            )
        # BatchNorm cannot train on one sample.
        parts = tuple(share(total, self._weights, [min(SMALLEST, total // world)] * world))
        self.is_unequal = self.is_unequal or len(set(parts)) > 1
        return parts

    def _decide(self) -> None:
        """Choose the ranks' weights, once, so that all batches of a run are divided alike."""
        place, ranks = read_coordinates(os.environ), self.measured.ranks
        self.rank, world = place.rank, place.size
        if dist.is_available() and dist.is_initialized():
            self.rank, world = dist.get_rank(), dist.get_world_size()
        self.balance, self._weights = Balance(), [1] * world
        # A script may start processes of its own, of which the launcher knows nothing.
        if sum(ranks.values()) != world:
            return
        self.balance = choose_balance(self.measured)
        by_host = self.balance.weights
        if by_host:
            self._weights = rank_weights([by_host[host] for host in ranks], list(ranks.values()))
        if len(ranks) > 1 and self.rank == 0:
            parts = ":".join(map(str, by_host.values())) or "equal"
            print(f"tandem: parts of a batch: {parts}: {self.balance.reason}", file=sys.stderr)

    def record(self) -> Dict[str, Any]:
        """Return what the ranks decided, for the first line of a rank's record; {} for nothing."""
        if self.balance is None or not self.measured.ranks:
            return {}
        weights = {host: self.balance.weights.get(host, 1) for host in self.measured.ranks}
        return {"balance": weights, "balance_why": self.balance.reason}

    def warning(self, is_attached: bool) -> Optional[str]:
        """Return what a user should know after the first step, if there is something."""
        if self.balance is None and self.measured.is_typed and self.measured.balance != OFF:
            return (
                "tandem: BALANCE= has no effect: this script never asks for its part of a batch, "
                "by tandem.sampler or tandem.batch_size (docs/own-script.md)."
            )
        is_weighted = self.is_weighing or (is_attached and self.received is not None)
        if self.is_unequal and not is_weighted:
            return (
                "tandem: the ranks have batches of different sizes, and DDP counts all ranks "
                "alike: call tandem.sync.attach and use tandem.sampler, or write "
                "loss = tandem.weigh(loss, samples) (docs/own-script.md)."
            )
        return None


_state: Optional[State] = None


def state() -> State:
    global _state
    if _state is None:
        _state = State()
    return _state


def batch_size(total: int) -> int:
    """Return this rank's part of a step's `total` samples; the parts of all ranks add up to it.
    Raises UserError."""
    return state().divide(total, "tandem.batch_size")[state().rank]


class BalancedSampler(Sampler):  # type: ignore[type-arg]
    """Yields this rank's indices of each batch, for `DataLoader(dataset, batch_sampler=...)`. All
    ranks get equally many batches. Call `set_epoch` before each epoch.

    `batch_size`: samples of a step of all ranks together. `accumulate`: micro-batches of a step, of
    equal size. The last step of an epoch has the remaining samples; it is left out if they are
    fewer than two for each rank and micro-batch, or with `drop_last`. With micro-batches up to
    accumulate - 1 of these samples are left out. Raises UserError.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        accumulate: int = 1,
    ) -> None:
        try:
            self.length = len(dataset)
        except TypeError:
            raise UserError(
                "tandem.sampler: this dataset has no length: divide the stream by rank, and give "
                "the DataLoader batch_size=tandem.batch_size(total)."
            ) from None
        if accumulate < 1 or batch_size % accumulate:
            raise UserError(
                f"tandem.sampler: batch_size={batch_size} cannot be divided by "
                f"accumulate={accumulate}."
            )
        self.batch_size, self.shuffle, self.seed = batch_size, shuffle, seed
        self.accumulate, self.epoch = accumulate, 0
        self._sizes = state().divide(batch_size // accumulate, "tandem.sampler")
        # In the last step of an epoch each rank gets samples, or there is none.
        least = min(SMALLEST, *self._sizes) if len(self._sizes) > 1 else 1
        rest = self.length % batch_size // accumulate
        self._last: Optional[Sizes] = None
        if not drop_last and rest >= least * len(self._sizes):
            self._last = tuple(split_batch(rest, self._sizes, least))
            state().is_unequal = state().is_unequal or len(set(self._last)) > 1

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch's number from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        steps = self.length // self.batch_size + (self._last is not None)
        return steps * self.accumulate

    def sizes(self) -> Iterator[Sizes]:
        """Yield the samples of each rank in each batch of an epoch."""
        for _ in range(self.length // self.batch_size * self.accumulate):
            yield self._sizes
        if self._last is not None:
            for _ in range(self.accumulate):
                yield self._last

    def __iter__(self) -> Iterator[List[int]]:
        state().is_dealing = True
        order: Sequence[int] = range(self.length)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        begin, rank = 0, state().rank
        for sizes in self.sizes():
            own = begin + sum(sizes[:rank])
            yield list(order[own : own + sizes[rank]])
            begin += sum(sizes)


sampler = BalancedSampler  # what a script calls


def weigh(loss: torch.Tensor, samples: Any) -> torch.Tensor:
    """Return the loss with a factor by which DDP's mean over the ranks becomes the mean over the
    samples of all ranks. `loss`: the mean over this rank's `samples` (a number) of one batch or
    micro-batch. Collective: each rank calls it once for each backward."""
    state().is_weighing = True
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return loss
    own = torch.as_tensor(samples, dtype=torch.float64, device=loss.device)
    total = own.clone()
    dist.all_reduce(total)
    factor = own * dist.get_world_size() / total
    # In 16 bits the factor would lose digits.
    return loss * factor.to(torch.promote_types(loss.dtype, torch.float32))


def receive(sizes: Sizes) -> int:
    """Note that the loop has got a batch of these parts, and return this rank's samples in it."""
    now = state()
    now.received = [sum(pair) for pair in zip(now.received or [0] * len(sizes), sizes)]
    return sizes[now.rank]


class StepWeights:
    """This rank's weight in each step of a model, by the batches that arrived since the one
    before."""

    def __init__(self) -> None:
        self._received, self._weight = state().received or [], 1.0

    def next(self) -> float:
        """Return the weight of the coming step: 1 if all ranks count alike. Raises UserError if the
        batches of `sampler` were not seen."""
        now = state()
        if now.is_weighing or not now.is_dealing:
            return 1.0
        if now.received is None:
            raise UserError(
                "tandem.sync.attach: tandem.sampler divides the batches, but their sizes are not "
                "known here: loop over timings.timed(loader, model) with that DataLoader, or write "
                "loss = tandem.weigh(loss, samples)."
            )
        step = [a - b for a, b in zip(now.received, self._received or [0] * len(now.received))]
        # A second backward by the same batch has the weight of the first one.
        if any(step):
            self._received = now.received
            self._weight = step[now.rank] * len(step) / sum(step)
        return self._weight
