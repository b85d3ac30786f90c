"""How samples are split: an epoch into steps, a step over the ranks, a rank's share into
micro-batches.

These are pure functions of their arguments, without torch: the launcher uses them to refuse what
could not be split. Nothing here knows how many ranks there were before: a run resumes at any
position of an epoch on another number of ranks, and each sample is still used exactly once.

The invariants of every split: its parts add up to the whole, all ranks compute the same parts, and
no part is exactly one sample where there are two.
"""

from typing import List, NamedTuple, Sequence, Tuple

from contract.errors import UserError

# Batch normalisation cannot compute a variance from one sample, so no rank is given exactly one.
SMALLEST = 2


# Machines whose speeds differ by less get equal parts: they are not measured much better than that.
MIN_SPEED_RATIO = 1.10
SCALE = 1000  # the fastest machine's weight


def weights_of(speeds: Sequence[float]) -> Tuple[int, ...]:
    """Weights of machines that do so many images/s, each by itself; none where they are nearly
    equally fast."""
    fastest = max(speeds, default=0.0)
    if not speeds or fastest <= MIN_SPEED_RATIO * min(speeds):
        return ()
    return tuple(max(1, round(SCALE * speed / fastest)) for speed in speeds)


def even_parts(count: int, parts: int) -> List[int]:
    """`count` as `parts` sizes that differ by at most one, larger ones first."""
    return [count // parts + (part < count % parts) for part in range(parts)]


def least_batch(ranks_of_nodes: Sequence[int]) -> int:
    """The smallest batch per node, for nodes with these numbers of ranks. A batch of one is allowed
    only for a single rank, which then uses the running statistics."""
    return SMALLEST * max(ranks_of_nodes) if sum(ranks_of_nodes) > 1 else 1


def node_batches(
    per_node: int, ranks_of_nodes: Sequence[int], weights: Sequence[int] = ()
) -> List[int]:
    """Samples per node and step: `per_node` for each, or with `weights`, one a node, as many in all
    in proportion to these. No node gets fewer than its ranks need; the others share what is left.
    Raises UserError where a rank would get no sample, or only one where there are several ranks,
    and for weights that are not one a node, from 1.
    """
    least = least_batch(ranks_of_nodes)
    if per_node < least:
        raise UserError(
            f"--per_node_batch_size {per_node} leaves a rank with less than {SMALLEST} samples: a "
            f"node has {max(ranks_of_nodes)} ranks. Use at least {least}."
        )
    if not weights:
        return [per_node] * len(ranks_of_nodes)
    if len(weights) != len(ranks_of_nodes) or min(weights) < 1:
        raise UserError(
            f"--balance {','.join(map(str, weights))}: give one number from 1 for each of the "
            f"{len(ranks_of_nodes)} nodes."
        )
    smallest = SMALLEST if sum(ranks_of_nodes) > 1 else 1
    floors = [smallest * ranks for ranks in ranks_of_nodes]
    left, sharing = per_node * len(weights), set(range(len(weights)))
    parts = [0] * len(weights)
    while True:
        total = sum(weights[node] for node in sharing)
        short = {node for node in sharing if left * weights[node] < floors[node] * total}
        if not short:
            break
        for node in short:
            parts[node] = floors[node]
        left, sharing = left - sum(floors[node] for node in short), sharing - short
    rest = sorted(sharing)
    for node, size in zip(rest, proportional(left, [weights[node] for node in rest])):
        parts[node] = size
    return parts


def proportional(count: int, weights: Sequence[int]) -> List[int]:
    """`count` in parts in proportion to `weights`, each rounded up or down. All are integers, so
    that every machine computes the same."""
    total, ends, upto = sum(weights), [0], 0
    for weight in weights:
        upto += weight
        # Differences of rounded running sums add up to the whole.
        ends.append((2 * count * upto + total) // (2 * total))
    return [end - begin for begin, end in zip(ends, ends[1:])]


def rank_batches(
    per_node: int, places: Sequence[Tuple[object, int]], weights: Sequence[int] = ()
) -> Tuple[int, ...]:
    """Samples per rank and step: each node's batch (node_batches) over its ranks, the remainder to
    the first ones. `places[rank]` is (node, local rank); nodes count from the one of rank 0."""
    nodes = list(dict.fromkeys(node for node, _ in places))
    ranks_of = {node: sum(other == node for other, _ in places) for node in nodes}
    batches = node_batches(per_node, list(ranks_of.values()), weights)
    parts = {node: even_parts(size, ranks_of[node]) for node, size in zip(nodes, batches)}
    return tuple(parts[node][local] for node, local in places)


def steps_per_epoch(count: int, global_batch: int, minimum: int = SMALLEST) -> int:
    """Steps for `count` samples, none of them with more than `global_batch` or fewer than `minimum`
    samples; where both are impossible (3 samples, batches of 2), the minimum takes precedence."""
    steps = -(-count // global_batch)
    return steps if count // steps >= minimum else max(1, count // minimum)


def step_size(position: int, count: int, global_batch: int, minimum: int = SMALLEST) -> int:
    """Samples of the step that begins at `position` of an epoch of `count` samples.

    The steps of an epoch are as equal as possible, the smaller ones first. A last step with only
    the remainder would move the weights as far as a full one, by the gradient and the batch
    statistics of a few samples. The size depends only on the number of samples left, so a resumed
    run continues in the same way.
    """
    left = count - position
    return left // steps_per_epoch(left, global_batch, minimum)


def split_batch(count: int, weights: Sequence[int], minimum: int = SMALLEST) -> List[int]:
    """Samples per rank of a batch of `count`, where `weights` are the ranks' full batches.

    Every rank gets either nothing, or `minimum` plus a share of the rest in proportion to the
    excess of its weight over `minimum`. Where there are too few samples for all, the ranks with the
    largest weights get them; among equals, the lower rank comes first. No rank gets more than its
    weight, except for one more where that is unavoidable (3 samples for ranks of 2). Raises
    ValueError when `count` < `minimum`.
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
        # Differences of rounded-up running sums add up to the whole. All are integers, so that
        # every machine computes the same.
        before, upto = upto, upto + beyond[rank]
        sizes[rank] = minimum + -spare * before // total - -spare * upto // total
    return sizes


def rank_slice(sizes: Sequence[int], rank: int) -> slice:
    """Where a rank's samples lie in the global batch."""
    begin = sum(sizes[:rank])
    return slice(begin, begin + sizes[rank])


def micro_batches(count: int, parts: int) -> List[int]:
    """Sizes of at most `parts` micro-batches of `count` samples, none of exactly one sample (unless
    `count` is one). Gradient accumulation splits a batch and never enlarges it."""
    if count == 0:
        return []
    return even_parts(count, max(1, min(parts, count // SMALLEST)))


class StepShape(NamedTuple):
    """What one rank does in one step: the sizes of its micro-batches (if there are none, it only
    takes part in the collectives), and whether batch normalisation uses its running statistics."""

    micro: List[int]
    running_statistics: bool


def step_shape(sizes: Sequence[int], rank: int, parts: int, sync_bn: bool) -> StepShape:
    """The shape of a step with `sizes` samples per rank, split into `parts` micro-batches.

    A rank without samples must not touch its statistics. With `sync_bn`, each micro-batch is a
    collective of all ranks: so all have equally many of them, unless one rank has no samples, and
    then no rank computes batch statistics.
    """
    if not sync_bn:
        return StepShape(micro_batches(sizes[rank], parts), sizes[rank] < SMALLEST)
    if min(sizes) == 0:
        return StepShape(micro_batches(sizes[rank], parts), running_statistics=True)
    parts = min(len(micro_batches(size, parts)) for size in sizes)
    return StepShape(micro_batches(sizes[rank], parts), sum(sizes) < SMALLEST)
