"""Share the samples of each step among the ranks of a script: `batch_size`, `sampler` and `weigh`.

A fast machine gets more samples than a slow machine, so that both finish a step together. Each rank
computes the batch shares of all ranks from the launcher's measurements (contract/decisions.py), so
no rank waits for the others. attach.py then weights the gradients, or the script calls `weigh`:
DDP itself counts all ranks alike. trainer/ divides its own batches.
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
    """The ranks' shares of a batch in this process's run, and the batches that its loop got."""

    def __init__(self) -> None:
        self.measured = read_measurements(os.environ)
        self.balance: Optional[Balance] = None  # None until the script asks for its share
        self.rank = 0
        self._rank_weights = [1]  # the share of each rank, relative to the others
        self.is_unequal = False  # the ranks' shares of some batch differ
        self.calls_weigh = False  # the script has called `weigh`
        self.uses_sampler = False  # the script has iterated over a `BalancedSampler`
        self.received: Optional[List[int]] = None  # samples of each rank, over all batches

    def divide(self, total: int, name: str) -> Sizes:
        """Return each rank's share of `total` samples. Raises UserError, which calls the caller
        `name`, unless `total` is a whole number with at least one sample for each rank."""
        if self.balance is None:
            self._choose_weights()
        world = len(self._rank_weights)
        if type(total) is not int or total < world:
            raise UserError(
                f"{name}: {total!r} samples cannot be divided among {world} ranks: give the whole "
                "number of samples that all ranks train on in a step."
            )
        # BatchNorm cannot train on one sample, so each rank gets two if there are enough.
        floor = min(SMALLEST, total // world)
        sizes = tuple(share(total, self._rank_weights, [floor] * world))
        self.is_unequal = self.is_unequal or len(set(sizes)) > 1
        return sizes

    def _choose_weights(self) -> None:
        """Choose the ranks' weights, once, so that all batches of a run are divided alike."""
        coordinates, ranks_of_host = read_coordinates(os.environ), self.measured.ranks
        self.rank, world = coordinates.rank, coordinates.size
        if dist.is_available() and dist.is_initialized():
            self.rank, world = dist.get_rank(), dist.get_world_size()
        self.balance, self._rank_weights = Balance(), [1] * world
        # A script may have started more processes than the launcher, which has not measured them.
        if sum(ranks_of_host.values()) != world:
            return
        self.balance = choose_balance(self.measured)
        by_host = self.balance.weights
        if by_host:
            self._rank_weights = rank_weights(
                [by_host[host] for host in ranks_of_host], list(ranks_of_host.values())
            )
        if len(ranks_of_host) > 1 and self.rank == 0:
            ratio = ":".join(map(str, by_host.values())) or "equal"
            print(f"tandem: parts of a batch: {ratio}: {self.balance.reason}", file=sys.stderr)

    def record(self) -> Dict[str, Any]:
        """Return the fields of the `start` line about the batch shares; {} if all are equal because
        the script asked for none, or because the launcher sent no measurements."""
        if self.balance is None or not self.measured.ranks:
            return {}
        weights = {host: self.balance.weights.get(host, 1) for host in self.measured.ranks}
        return {"balance": weights, "balance_why": self.balance.reason}

    def warning(self, is_attached: bool) -> Optional[str]:
        """Return a warning for after the first step, or None. `is_attached`: each model of the loop
        has a strategy, which weights the gradients if the batches' sizes are known."""
        if self.balance is None and self.measured.is_typed and self.measured.balance != OFF:
            return (
                "tandem: BALANCE= has no effect: this script never asks for its part of a batch, "
                "by tandem.sampler or tandem.batch_size (docs/own-script.md)."
            )
        is_weighted = self.calls_weigh or (is_attached and self.received is not None)
        if self.is_unequal and not is_weighted:
            return (
                "tandem: the ranks have batches of different sizes, and DDP counts all ranks "
                "alike: call tandem.sync.attach and use tandem.sampler, or write "
                "loss = tandem.weigh(loss, samples) (docs/own-script.md)."
            )
        return None


_state: Optional[State] = None


def state() -> State:
    """Return the state of this process; the first call reads the launcher's measurements."""
    global _state
    if _state is None:
        _state = State()
    return _state


def batch_size(total: int) -> int:
    """Return how many of a step's `total` samples this rank trains on. The numbers of all ranks add
    up to `total`, and a faster machine gets more (contract/split.py). Raises UserError unless
    `total` is a whole number with at least one sample for each rank."""
    return state().divide(total, "tandem.batch_size")[state().rank]


class BalancedSampler(Sampler):  # type: ignore[type-arg]
    """Yields this rank's indices of each batch. All ranks get the same number of batches.

        sampler = tandem.sampler(dataset, batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler)
        sampler.set_epoch(epoch)  # before each epoch

    `dataset`: anything with a length. `batch_size`: samples of all ranks in a step. `accumulate`:
    micro-batches of a step, of equal size. The last step of an epoch has the remaining samples. The
    sampler omits this step with `drop_last`, and if there are fewer than two samples for each rank
    and micro-batch. It also omits the up to accumulate - 1 samples that micro-batches of equal size
    cannot hold. `seed`: the order of an epoch follows from seed + epoch. Raises UserError for a
    dataset without a length, and for a `batch_size` that cannot be divided.
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
        # A rank without samples would run fewer steps, so the last step has samples for each rank.
        floor = min(SMALLEST, *self._sizes) if len(self._sizes) > 1 else 1
        remaining = self.length % batch_size // accumulate  # in each micro-batch of the last step
        self._last_sizes: Optional[Sizes] = None
        if not drop_last and remaining >= floor * len(self._sizes):
            self._last_sizes = tuple(split_batch(remaining, self._sizes, floor))
            state().is_unequal = state().is_unequal or len(set(self._last_sizes)) > 1

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch's number from now on."""
        self.epoch = epoch

    def __len__(self) -> int:
        steps = self.length // self.batch_size + (self._last_sizes is not None)
        return steps * self.accumulate

    def sizes(self) -> Iterator[Sizes]:
        """Yield the samples of each rank in each batch of an epoch."""
        for _ in range(self.length // self.batch_size * self.accumulate):
            yield self._sizes
        if self._last_sizes is not None:
            for _ in range(self.accumulate):
                yield self._last_sizes

    def __iter__(self) -> Iterator[List[int]]:
        state().uses_sampler = True
        order: Sequence[int] = range(self.length)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator).tolist()
        # The ranks divide each batch in their order: rank 0 has its first indices.
        batch_begin, rank = 0, state().rank
        for sizes in self.sizes():
            begin = batch_begin + sum(sizes[:rank])
            yield list(order[begin : begin + sizes[rank]])
            batch_begin += sum(sizes)


sampler = BalancedSampler  # what a script calls


def weigh(loss: torch.Tensor, samples: Any) -> torch.Tensor:
    """Return `loss` times a factor with which DDP's mean over the ranks becomes the mean over the
    samples of all ranks. `loss`: a scalar, the mean over this rank's `samples` (a number, or a
    tensor of one element) of one batch or micro-batch. The result is fp32 at least. Collective:
    each rank calls `weigh` once for each backward."""
    state().calls_weigh = True
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return loss
    rank_samples = torch.as_tensor(samples, dtype=torch.float64, device=loss.device)
    total = rank_samples.clone()
    dist.all_reduce(total)
    factor = rank_samples * dist.get_world_size() / total
    # In 16 bits the factor would lose digits.
    return loss * factor.to(torch.promote_types(loss.dtype, torch.float32))


def receive(sizes: Sizes) -> int:
    """Note that the loop has got a batch of these sizes, and return this rank's samples in it."""
    shares = state()
    shares.received = [sum(pair) for pair in zip(shares.received or [0] * len(sizes), sizes)]
    return sizes[shares.rank]


class StepWeights:
    """Computes this rank's weight in each step of a model, by the batches since the last step."""

    def __init__(self) -> None:
        self._received, self._weight = state().received or [], 1.0

    def next(self) -> float:
        """Return the weight of the next step, 1 if all ranks count alike. Raises UserError if a
        `sampler` divides the batches, but the loop does not report them."""
        shares = state()
        if shares.calls_weigh or not shares.uses_sampler:
            return 1.0
        if shares.received is None:
            raise UserError(
                "tandem.sync.attach: tandem.sampler divides the batches, but their sizes are not "
                "known here: loop over timings.timed(loader, model) with that DataLoader, or write "
                "loss = tandem.weigh(loss, samples)."
            )
        earlier = self._received or [0] * len(shares.received)
        step_sizes = [total - count for total, count in zip(shares.received, earlier)]
        # A second backward of the same batch has the weight of the first backward.
        if any(step_sizes):
            self._received = shares.received
            self._weight = step_sizes[shares.rank] * len(step_sizes) / sum(step_sizes)
        return self._weight
