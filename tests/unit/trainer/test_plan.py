"""Options, places, batch sizes, and the order of an epoch: what is decided before anything runs."""

import dataclasses
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from contract.command_line import parse
from contract.errors import UserError
from contract.options import Options
from contract.split import (
    even_parts,
    node_batches,
    rank_batches,
    split_batch,
    step_shape,
    step_size,
    steps_per_epoch,
)
from tandem.coordinates import read_coordinates
from trainer.data.batch import derive_seed
from trainer.data.loader import epoch_order
from trainer.parallel import balanced_sizes, check
from trainer.world import World


@pytest.mark.parametrize("word", ["--local_rank=3", "--local-rank=3"])
def test_both_spellings_of_local_rank(word):
    """Pitfall 23; torchrun's LOCAL_RANK wins."""
    assert parse([word]).local_rank == 3
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read_coordinates(env, 1).local_rank == 1
    assert read_coordinates({**env, "LOCAL_RANK": "2"}, 1).local_rank == 2


def test_a_config_file_has_the_same_fields_and_flags_win(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("epochs: 90\nlr: 1e-1\nstep_epochs: [30, 60]\nsync-bn: true\n")
    ours = parse(["--config", str(file), "--epochs", "3"])
    flags = ["--lr=0.1", "--sync-bn", "--epochs", "3"]
    alike = parse([*flags, "--step_epochs=30,60"])
    others = ["--lr", "0.1", "--sync_bn", "true", "--epochs=3", "--step-epochs", "30,60"]
    assert alike == parse(others)
    assert ours == dataclasses.replace(alike, config=str(file))
    assert (ours.epochs, ours.lr, ours.step_epochs, ours.sync_bn) == (3, 0.1, (30, 60), True)
    for wrong, word in (("epoch: 3", "epochs"), ("epochs: some", "some"), ("- 3", "epochs: 90")):
        file.write_text(wrong)
        with pytest.raises(UserError, match=word):
            parse(["--config", str(file)])


def test_only_what_changes_learning_must_be_equal_to_resume():
    from trainer.checkpoint import fixed_options
    from trainer.resume import find_differences

    state = {"options": fixed_options(Options()), "train_images": 9, "classes": ["ant", "bee"]}
    images = TrainSet(range(9), ["ant", "bee"])
    same = Options(output="x", workers=3, accumulate=4, balance=(2, 1))
    assert find_differences(state, same, images) == []
    fewer = TrainSet(range(8), ["ant", "bee"])
    assert find_differences(state, Options(lr=0.2, seed=1), fewer) == [
        "--seed 1 (it has 0)",
        "--lr 0.2 (it has 0.1)",
        "data set",
    ]
    (renamed,) = find_differences(state, same, TrainSet(range(9), ["ant", "wasp"]))
    assert "bee is not in --data" in renamed and "wasp is new" in renamed


class TrainSet(list):
    def __init__(self, images, classes):
        super().__init__(images)
        self.classes = classes


def numbered(prefix, **values):
    return {prefix + name: str(value) for name, value in values.items()}


SRUN = numbered("SLURM_", PROCID=4, NTASKS=5, LOCALID=1, NODEID=2)


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, (0, 1, 0, None)),
        (numbered("", RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, GROUP_RANK=1), (5, 8, 1, 1)),
        (SRUN, (4, 5, 1, 2)),
        # srun --mpi=pmi2 sets MPICH's names too, all but the local rank.
        ({**SRUN, **numbered("PMI_", RANK=4, SIZE=5)}, (4, 5, 1, 2)),
        (numbered("OMPI_COMM_WORLD_", RANK=3, SIZE=4, LOCAL_RANK=1, LOCAL_SIZE=2), (3, 4, 1, None)),
        (numbered("PMI_", RANK=3, SIZE=4) | numbered("MPI_", LOCALRANKID=2), (3, 4, 2, None)),
        # salloc's shell: Slurm's variables, but no task of srun's.
        ({"SLURM_NTASKS": "5"}, (0, 1, 0, None)),
    ],
)
def test_places(environ, expected):
    ours = read_coordinates(environ)
    assert (ours.rank, ours.size, ours.local_rank, ours.node) == expected


def test_machines_are_told_apart_by_their_names_where_no_launcher_numbers_them(monkeypatch):
    """mpirun deals ranks out by node or by slot, and unevenly: here a has 1, b has 3."""
    from trainer import world

    hosts = ["b", "a", "b", "b"]
    monkeypatch.setattr(world, "_meet", lambda *_: world.Meeting(None, None, ()))
    monkeypatch.setattr(world.World, "gather", lambda self, _: hosts)
    monkeypatch.setenv("TANDEM_NODE", "b")
    for name, value in numbered("OMPI_COMM_WORLD_", RANK=3, SIZE=4, LOCAL_RANK=2).items():
        monkeypatch.setenv(name, value)
    ours = world.start(Options(per_node_batch_size=9))
    assert (ours.node_rank, ours.local_size, ours.nodes) == (0, 3, (0, 1, 0, 0))


@pytest.mark.parametrize(
    "tf32, flags", [("auto", (False, True)), ("on", (True,) * 2), ("off", (False,) * 2)]
)
def test_one_switch_for_tf32_in_products_and_convolutions(monkeypatch, tf32, flags):
    from trainer import world

    products, convolutions = SimpleNamespace(allow_tf32=False), SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", products)
    monkeypatch.setattr(torch.backends, "cudnn", convolutions)
    world.start(Options(tf32=tf32))
    assert (products.allow_tf32, convolutions.allow_tf32) == flags


def test_a_node_splits_its_batch_over_its_ranks():
    places = [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert rank_batches(32, places) == (32, 11, 11, 10)
    uneven = [(node, local) for node, count in enumerate((1, 2, 4)) for local in range(count)]
    assert rank_batches(10, uneven) == (10, 5, 5, 3, 3, 2, 2)
    with pytest.raises(UserError, match="at least 6"):
        rank_batches(5, places)
    assert rank_batches(1, [(0, 0)]) == (1,)


def test_nodes_share_a_batch_by_their_weights():
    assert node_batches(64, [1, 1, 1, 1], [3, 2, 2, 1]) == [96, 64, 64, 32]
    assert node_batches(32, [1, 1, 1]) == [32, 32, 32]
    assert node_batches(4, [1, 1], [100, 1]) == [6, 2]  # a rank needs two
    assert node_batches(8, [4, 1], [1, 1000]) == [8, 8]
    assert node_batches(1, [1], [7]) == [1]
    places = [(0, 0), (1, 0), (1, 1)]
    assert rank_batches(16, places, [1, 3]) == (8, 12, 12)
    for wrong in ([1], [1, 0], [1, 1, 1]):
        with pytest.raises(UserError, match="one positive number for each of the 2 nodes"):
            node_batches(8, [1, 1], wrong)


def test_no_image_is_lost_or_doubled_by_any_weights():
    chance = random.Random(1)
    for _ in range(2000):
        ranks = chance.choices([1, 1, 2, 4], k=chance.randint(1, 6))
        each = chance.randint(1 if ranks == [1] else 2 * max(ranks), 200)
        weights = [chance.randint(1, 1000) for _ in ranks]
        parts = node_batches(each, ranks, weights)
        assert sum(parts) == each * len(ranks)
        assert len(ranks) == 1 or all(part >= 2 * own for part, own in zip(parts, ranks))


def test_a_rank_without_samples_rests():
    assert step_shape([4, 0], 1, 1, sync_bn=False) == ([], True)
    assert step_shape([4, 0], 0, 2, sync_bn=False) == ([2, 2], False)
    assert step_shape([4, 0], 0, 2, sync_bn=True) == ([2, 2], True)
    # Micro-batches are collectives under SyncBN: as many on each rank.
    assert len(step_shape([9, 4], 0, 4, True).micro) == len(step_shape([9, 4], 1, 4, True).micro)


def test_balanced_dp_gives_the_first_gpu_less():
    """Pitfall 16: DataParallel fills GPU 0 first."""
    assert balanced_sizes(32, 4, 5) == [5, 9, 9, 9]
    assert balanced_sizes(3, 4, 1) == [1, 1, 1]
    assert balanced_sizes(12, 1, 5) == [12]
    assert even_parts(7, 3) == [3, 2, 2]


@pytest.mark.parametrize("parallel", ["dp", "balanced-dp"])
@pytest.mark.parametrize("name", ["sync_bn", "compile", "checkpoint_activations"])
def test_what_copies_of_a_model_cannot_do_is_refused(monkeypatch, name, parallel):
    """--sync_bn was ignored; the others found their tensors on different GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu0 = 2 if parallel == "balanced-dp" else None
    world = World(device=torch.device("cuda", 0), batches=(16,))
    with pytest.raises(UserError, match=f"--{name} does not work with --parallel {parallel}"):
        check(Options(parallel=parallel, gpu0_batch=gpu0, **{name: True}), world)


def test_dp_s_batch_is_at_least_the_gpus(monkeypatch):
    """Pitfall 16: DataParallel leaves GPUs without samples otherwise."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for batch, refused in ((16, False), (15, True)):
        options = Options(parallel="dp", per_node_batch_size=batch, accumulate=2)
        world = World(device=torch.device("cuda", 0), batches=(batch,))
        with pytest.raises(UserError, match="batch_size 16") if refused else nullcontext():
            check(options, world)


# The order of an epoch, and its division into steps and ranks


def test_order_is_a_permutation_that_changes_with_seed_and_epoch():
    order = epoch_order(1000, seed=3, epoch=4)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, epoch_order(1000, seed=3, epoch=4))
    assert not torch.equal(order, epoch_order(1000, seed=4, epoch=3))
    assert not torch.equal(order, epoch_order(1000, seed=3, epoch=5))


def test_with_repeats_an_epoch_has_as_many_images_of_which_fewer_differ():
    """As torchvision's RASampler, but for what that drops to have a multiple of 256."""
    order, usual = epoch_order(1002, 3, 4, repeats=4), epoch_order(1002, 3, 4)
    assert torch.equal(order % 1002, usual[:251].repeat_interleave(4)[:1002])
    assert len(order.unique()) == 1002  # each copy has a number, by which it is augmented
    assert torch.equal(epoch_order(1002, 3, 4, repeats=1), usual)


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
