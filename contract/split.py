"""Split samples: an epoch into steps, a step over the ranks, a rank's share into micro-batches. The
trainer calls these functions in each step, and the launcher rejects batches that cannot be split.

The functions depend only on their arguments. So a run may resume at any position of an epoch on
another number of ranks, and still uses each sample exactly once. The invariants of every split: the
parts add up to the whole, and all ranks compute the same parts. If there are at least two samples,
no part is a single sample.
"""

import math
from collections import Counter
from typing import List, NamedTuple, Sequence, Tuple

from contract.errors import UserError

# Batch normalisation cannot compute a variance from one sample, so no rank gets exactly one.
SMALLEST = 2
# Machines whose speeds differ by less get equal batches: measurements are not much more exact.
MIN_SPEED_RATIO = 1.10
FASTEST_WEIGHT = 1000  # the weight of the fastest machine; slower machines have smaller weights


def weights_of(speeds: Sequence[float]) -> Tuple[int, ...]:
    """Return the weights of machines with these speeds in images/s; () if the speeds are nearly
    equal."""
    fastest = max(speeds, default=0.0)
    if not speeds or fastest <= MIN_SPEED_RATIO * min(speeds):
        return ()
    return tuple(max(1, round(FASTEST_WEIGHT * speed / fastest)) for speed in speeds)


def even_parts(count: int, number: int) -> List[int]:
    """Split `count` into `number` sizes that differ by at most one, larger sizes first."""
    return [count // number + (index < count % number) for index in range(number)]


def node_batches(
    per_node: int, ranks_of_nodes: Sequence[int], weights: Sequence[int] = ()
) -> List[int]:
    """Return the samples of each node per step: `per_node`, or with the same sum in proportion to
    `weights`. No node gets fewer than its ranks need. Raises UserError if one of several ranks
    would get fewer than SMALLEST samples, and unless each node has a weight of at least 1."""
    # A single rank may have a batch of one sample, and then uses the running statistics.
    smallest = SMALLEST if sum(ranks_of_nodes) > 1 else 1
    floors = [smallest * ranks for ranks in ranks_of_nodes]
    least = max(floors)
    if per_node < least:
        raise UserError(
            f"--per_node_batch_size {per_node} leaves a rank with less than {SMALLEST} samples: a "
            f"node has {max(ranks_of_nodes)} ranks. Use at least {least}."
        )
    if not weights:
        return [per_node] * len(ranks_of_nodes)
    if len(weights) != len(ranks_of_nodes) or min(weights) < 1:
        raise UserError(
            f"--balance {','.join(map(str, weights))}: type one positive number for each of "
            f"the {len(ranks_of_nodes)} nodes."
        )
    return share(per_node * len(weights), weights, floors)


def share(count: int, weights: Sequence[int], floors: Sequence[int]) -> List[int]:
    """Divide `count` samples in proportion to the nodes' weights, but not below their floors."""
    # A node whose proportion is below its floor gets the floor. That leaves fewer samples for the
    # remaining nodes, so that the next turn may find another node below its floor.
    samples, nodes = count, set(range(len(weights)))
    batches = [0] * len(weights)
    while True:
        total = sum(weights[node] for node in nodes)
        short = {node for node in nodes if samples * weights[node] < floors[node] * total}
        if not short:
            break
        for node in short:
            batches[node] = floors[node]
        samples, nodes = samples - sum(floors[node] for node in short), nodes - short
    # The remaining nodes share in proportion: each gets the difference of two rounded running sums,
    # so that they add up to the whole. With integers every machine computes the same.
    running_weight, begin = 0, 0
    for node in sorted(nodes):
        running_weight += weights[node]
        end = (2 * samples * running_weight + total) // (2 * total)
        batches[node], begin = end - begin, end
    return batches


def rank_weights(weights: Sequence[int], ranks_of_nodes: Sequence[int]) -> List[int]:
    """Return the weight of each rank; the ranks of a node have equal parts of its weight."""
    product = math.prod(ranks_of_nodes)
    return [
        weight * product // ranks
        for weight, ranks in zip(weights, ranks_of_nodes)
        for _ in range(ranks)
    ]


def rank_batches(
    per_node: int, places: Sequence[Tuple[object, int]], weights: Sequence[int] = ()
) -> Tuple[int, ...]:
    """Return the samples of each rank per step: each node's batch (node_batches), split over the
    node's ranks. The first ranks get the remainder. `places[rank]`: (node, local rank). `weights`:
    in the order of the nodes' first ranks."""
    ranks_of = Counter(node for node, _ in places)
    batches = node_batches(per_node, list(ranks_of.values()), weights)
    sizes = {node: even_parts(size, ranks_of[node]) for node, size in zip(ranks_of, batches)}
    return tuple(sizes[node][local] for node, local in places)


def steps_per_epoch(count: int, global_batch: int, minimum: int = SMALLEST) -> int:
    """Return the number of steps for `count` samples. Each has at most `global_batch` and at least
    `minimum` samples. If that is impossible (3 samples, batches of 2), the minimum has priority."""
    steps = -(-count // global_batch)  # rounded up
    return steps if count // steps >= minimum else max(1, count // minimum)


def step_size(position: int, count: int, global_batch: int, minimum: int = SMALLEST) -> int:
    """Return the samples of the step that begins at `position` of an epoch of `count` samples.

    The steps of an epoch are as equal as possible, smaller steps first. A last step with only the
    remainder would change the weights as much as a full step, based on a few samples. The size
    depends only on the number of remaining samples, so a resumed run continues in the same way.
    """
    remaining = count - position
    return remaining // steps_per_epoch(remaining, global_batch, minimum)


def split_batch(count: int, weights: Sequence[int], minimum: int = SMALLEST) -> List[int]:
    """Return the samples of each rank of a batch of `count`. `weights`: the ranks' full batches.

    Every rank gets either nothing, or `minimum` plus a share of the remaining samples in proportion
    to the excess of its weight over `minimum`. If there are too few samples for all, the ranks with
    the largest weights get them; among equals, the lower rank comes first. No rank gets more than
    its weight, except for one sample if that is unavoidable (3 samples for ranks of 2). Raises
    ValueError if `count` < `minimum`.
    """
    able = [rank for rank, weight in enumerate(weights) if weight >= minimum]
    active = sorted(able, key=lambda rank: (-weights[rank], rank))[: count // minimum]
    if count and not active:
        raise ValueError(
            f"{count} samples cannot be split in the ratio {weights} with at least {minimum} each"
        )
    sizes = [0] * len(weights)  # ranks that are not active keep 0 samples
    spare = count - minimum * len(active)
    excess = {rank: weights[rank] - minimum for rank in active}
    if not any(excess.values()):
        excess = dict.fromkeys(active, 1)
    total, begin = sum(excess.values()), 0
    for rank in active:
        # Differences of running sums that are rounded up (-a // b) add up to the whole.
        end = begin + excess[rank]
        sizes[rank] = minimum + -spare * begin // total - -spare * end // total
        begin = end
    return sizes


def rank_slice(sizes: Sequence[int], rank: int) -> slice:
    """Return the positions of a rank's samples in the global batch."""
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])


def micro_batches(count: int, limit: int) -> List[int]:
    """Return the sizes of at most `limit` micro-batches of `count` samples, none of exactly one
    sample unless `count` is one. Gradient accumulation splits a batch and never enlarges it."""
    if count == 0:
        return []
    return even_parts(count, max(1, min(limit, count // SMALLEST)))


class StepShape(NamedTuple):
    """Describe one rank's step: the sizes of its micro-batches, and whether batch normalisation
    uses its running statistics. A rank without micro-batches only participates in the
    collectives."""

    micro: List[int]
    running_statistics: bool


def step_shape(sizes: Sequence[int], rank: int, limit: int, sync_bn: bool) -> StepShape:
    """Return the shape of a step with `sizes` samples per rank and at most `limit` micro-batches.

    A rank without samples must not touch its statistics. With `sync_bn`, each micro-batch is a
    collective of all ranks. Therefore all ranks have the same number of micro-batches, unless one
    rank has no samples: then no rank computes batch statistics.
    """
    if not sync_bn:
        return StepShape(micro_batches(sizes[rank], limit), sizes[rank] < SMALLEST)
    if min(sizes) == 0:
        return StepShape(micro_batches(sizes[rank], limit), running_statistics=True)
    limit = min(len(micro_batches(size, limit)) for size in sizes)
    return StepShape(micro_batches(sizes[rank], limit), sum(sizes) < SMALLEST)
