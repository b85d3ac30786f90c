"""Which samples a step takes and which of them are whose. Pure functions of their arguments.

Nothing here knows how many ranks there were before: a run resumes at any position of an epoch on
another number of ranks, and each sample is still used exactly once.
"""

import hashlib
from typing import List, Sequence

import torch


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts; unlike sums, (1, 2) and (2, 1) differ."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def epoch_order(count: int, seed: int, epoch: int) -> torch.Tensor:
    """Indices 0..count-1 as int64, shuffled by seed and epoch alone."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(count, generator=generator)


def steps_per_epoch(count: int, global_batch: int, minimum: int = 2) -> int:
    """Steps for `count` samples, none of them with more than `global_batch` or fewer than `minimum`
    samples; where both cannot be had (3 samples, batches of 2), the minimum counts."""
    steps = -(-count // global_batch)
    return steps if count // steps >= minimum else max(1, count // minimum)


def step_size(position: int, count: int, global_batch: int, minimum: int = 2) -> int:
    """Samples of the step that begins at `position` of an epoch of `count` samples.

    The steps of an epoch are as equal as can be, the smaller ones first. A last step of what is
    left over would move the weights as far as a whole one, by the gradient and the batch statistics
    of a few samples. The size depends on what is left alone, so a resumed run goes on the same way.
    """
    left = count - position
    return left // steps_per_epoch(left, global_batch, minimum)


def split_batch(count: int, weights: Sequence[int], minimum: int = 2) -> List[int]:
    """Samples per rank of a batch of `count`, where `weights` are the ranks' full batches.

    Every rank gets nothing, or `minimum` and of the rest a share in proportion to what its weight
    has above `minimum`. Where there are too few samples for all, the ranks with the largest
    weights work, the lower rank first. No rank gets more than its weight, but one more where it
    cannot be helped (3 samples for ranks of 2). Raises ValueError when `count` < `minimum`.
    """
    able = [rank for rank, weight in enumerate(weights) if weight >= minimum]
    active = sorted(able, key=lambda rank: (-weights[rank], rank))[: count // minimum]
    if count and not active:
        raise ValueError(f"{count} samples cannot be split over {weights}, {minimum} each at least")
    sizes = [0] * len(weights)
    spare = count - minimum * len(active)
    beyond = {rank: weights[rank] - minimum for rank in active}
    if not any(beyond.values()):
        beyond = dict.fromkeys(active, 1)
    total, upto = sum(beyond.values()), 0
    for rank in active:
        # Differences of sums, rounded up, add up to the whole. Integers: all machines agree.
        before, upto = upto, upto + beyond[rank]
        sizes[rank] = minimum + -spare * before // total - -spare * upto // total
    return sizes


def rank_slice(sizes: Sequence[int], rank: int) -> slice:
    """Where a rank's samples lie in the global batch."""
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])
