"""Several ranks compute what one would."""

import pytest
import torch

from tandem.compat import load_tensors
from tests.trainer_ranks import make_images, run_ranks, trainer

EXACT = [
    "--precision", "fp64", "--augment", "none", "--workers", 0,
    "--model", "tests.trainer_models:plain",
    # At 0.1 the loss rises at first, and rounding errors with it.
    "--lr", 0.02,
]  # fmt: skip
EPOCHS = ("--epochs", 3)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), per_class=41)


def weights(output, host="node1"):
    newest = sorted((output / "checkpoints" / host).glob("step-*.pt"))[-1]
    with newest.open("rb") as file:
        return load_tensors(file)["model"]


def trained(images, output, nodes, *argv):
    argv = ["--data", images, "--output", output, *EXACT, *argv]
    assert run_ranks(nodes, trainer, *argv) == [0] * sum(nodes)
    return weights(output)


def distance(ours, theirs):
    return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in theirs)


@pytest.fixture(scope="module")
def alone(images, tmp_path_factory):
    """One process with batches of 24: 3 epochs of 7 steps, some of 23 and some of 24 images."""
    output = tmp_path_factory.mktemp("alone")
    return trained(images, output, [1], *EPOCHS, "--per_node_batch_size", 24)


@pytest.mark.parametrize(
    "nodes, batch, more",
    [
        ([1, 2, 1], 8, ()),
        ([1], 24, ("--accumulate", 5)),
        ([1, 1], 12, ("--accumulate", 3)),
        ([1, 1], 12, ("--static_graph",)),
        pytest.param([1, 1, 1, 1], 6, (), marks=pytest.mark.long),
        pytest.param([1, 2, 4], 8, (), marks=pytest.mark.long),
    ],
)
def test_ranks_and_micro_batches_equal_one_process(images, alone, tmp_path, nodes, batch, more):
    ours = trained(images, tmp_path, nodes, *EPOCHS, "--per_node_batch_size", batch, *more)
    assert distance(ours, alone) < (1e-9 if len(nodes) > 1 else 1e-12)


def test_all_ranks_hold_the_same_parameters_and_buffers(images, tmp_path):
    argv = ["--data", images, "--output", tmp_path, "--epochs", 2, "--ema", 0.9]
    argv += ["--model", "tests.trainer_models:normed", "--per_node_batch_size", 8]
    run_ranks([1, 1, 1], trainer, *argv)
    first = weights(tmp_path)
    for host in ("node2", "node3"):
        other = weights(tmp_path, host)
        assert all(torch.equal(first[key], other[key]) for key in first)


def test_recomputed_activations_change_nothing(images, tmp_path):
    """Neither weights nor running statistics, which a second forward must not count again."""
    argv = ("--model", "tests.trainer_models:normed", "--per_node_batch_size", 32, "--epochs", 2)
    ours = trained(images, tmp_path / "ours", [1], *argv, "--checkpoint_activations")
    theirs = trained(images, tmp_path / "theirs", [1], *argv)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
