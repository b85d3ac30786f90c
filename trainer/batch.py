"""How many samples go where: ranks of a node, micro-batches of a rank. Pure functions, without
torch: the launcher refuses by them what could not be split."""

from typing import List, NamedTuple, Sequence, Tuple

from .errors import UserError

# Batch normalisation has no variance of one sample, so no rank is given exactly one.
SMALLEST = 2


def even_parts(count: int, parts: int) -> List[int]:
    """`count` as `parts` sizes that differ by at most one, larger ones first."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def least_batch(ranks_of_nodes: Sequence[int]) -> int:
    """The smallest batch of a node, for nodes with so many ranks: one sample trains only alone, by
    running statistics."""
    return SMALLEST * max(ranks_of_nodes) if sum(ranks_of_nodes) > 1 else 1


def rank_batches(per_node: int, places: Sequence[Tuple[object, int]]) -> Tuple[int, ...]:
    """Samples of a step per rank: each node's batch over its ranks, remainders to the first ones.

    `places[rank]` is (node, local rank). Raises UserError when a rank would get none, or one
    where there are several ranks.
    """
    ranks_of = {node: sum(other == node for other, _ in places) for node, _ in places}
    least = least_batch(tuple(ranks_of.values()))
    if per_node < least:
        raise UserError(
            f"--per_node_batch_size {per_node} leaves a rank with less than {SMALLEST} samples: a "
            f"node has {max(ranks_of.values())} ranks. Use at least {least}."
        )
    return tuple(even_parts(per_node, ranks_of[node])[local] for node, local in places)


def micro_batches(count: int, parts: int) -> List[int]:
    """Sizes of at most `parts` micro-batches of `count` samples, none of exactly one sample
    (unless `count` is one): accumulation splits a batch and never enlarges it."""
    if count == 0:
        return []
    return even_parts(count, max(1, min(parts, count // SMALLEST)))


class StepShape(NamedTuple):
    """What one rank does in one step: sizes of its micro-batches (none: it only takes part in the
    collectives) and whether batch normalisation uses its running statistics instead."""

    micro: List[int]
    running_statistics: bool


def step_shape(sizes: Sequence[int], rank: int, parts: int, sync_bn: bool) -> StepShape:
    """The shape of a step with `sizes` samples per rank, split into `parts` micro-batches.

    A rank without samples must not touch its statistics. With `sync_bn` each micro-batch is a
    collective of all ranks: their numbers are equal, and where one rank has no samples, none
    computes statistics.
    """
    if not sync_bn:
        return StepShape(micro_batches(sizes[rank], parts), sizes[rank] < SMALLEST)
    if min(sizes) == 0:
        return StepShape(micro_batches(sizes[rank], parts), True)
    parts = min(len(micro_batches(size, parts)) for size in sizes)
    return StepShape(micro_batches(sizes[rank], parts), sum(sizes) < SMALLEST)
