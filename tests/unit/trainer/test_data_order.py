"""The order of an epoch, and its division into steps and ranks."""

import pytest
import torch

from contract.split import split_batch, step_size, steps_per_epoch
from trainer.data.batch import derive_seed
from trainer.data.loader import epoch_order


def test_order_is_a_permutation_that_changes_with_seed_and_epoch():
    order = epoch_order(1000, seed=3, epoch=4)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, epoch_order(1000, seed=3, epoch=4))
    assert not torch.equal(order, epoch_order(1000, seed=4, epoch=3))
    assert not torch.equal(order, epoch_order(1000, seed=3, epoch=5))


def test_seeds_do_not_collide_like_sums():
    assert len({derive_seed("a", seed, epoch) for seed in range(40) for epoch in range(40)}) == 1600


@pytest.mark.parametrize(
    "weights", [[8, 8, 8], [32, 16, 16, 5], [2, 2, 2], [64], [3, 2], [9, 4, 2]]
)
def test_each_tail_is_divided_whole_and_no_rank_gets_one_sample(weights):
    assert split_batch(sum(weights), weights) == weights
    for count in range(2, sum(weights) + 1):
        sizes = split_batch(count, weights)
        assert sum(sizes) == count
        assert 1 not in sizes
        extra = 1 if max(weights) == 2 else 0
        assert all(size <= weight + extra for size, weight in zip(sizes, weights))


def test_tails_keep_about_the_proportions_and_few_samples_go_to_the_largest_ranks():
    assert split_batch(28, [8, 16, 32]) == [4, 8, 16]
    assert split_batch(5, [8, 16, 32]) == [0, 2, 3]
    assert split_batch(3, [8, 8, 8]) == [3, 0, 0]
    assert split_batch(3, [8, 8, 8], minimum=1) == [1, 1, 1]
    assert split_batch(0, [8, 8]) == [0, 0]
    with pytest.raises(ValueError, match="1 samples"):
        split_batch(1, [8, 8])


@pytest.mark.parametrize("minimum", [1, 2])
def test_steps_cover_the_epoch_and_none_is_too_small(minimum):
    for count in range(2, 60):
        for batch in range(minimum, 20):
            position, sizes = 0, []
            while position < count:
                sizes.append(step_size(position, count, batch, minimum))
                position += sizes[-1]
            assert sum(sizes) == count
            assert min(sizes) >= minimum
            # Only where batches are smaller than two minima may one be larger than asked.
            assert max(sizes) <= max(batch, 2 * minimum - 1)
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes)
            assert steps_per_epoch(count, batch, minimum) == len(sizes)
