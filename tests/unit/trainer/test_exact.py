"""Several ranks compute what one would."""

import pytest
import torch

from tests.trainer_ranks import newest_checkpoint, run_ranks, trainer

PER_CLASS = 41

EXACT = [
    "--precision", "fp64", "--augment", "none", "--workers", 0,
    "--model", "tests.trainer_models:plain",
    # At 0.1 the loss rises at first, and rounding errors with it.
    "--lr", 0.02,
]  # fmt: skip
EPOCHS = ("--epochs", 2)


def trained(images, output, nodes, *argv):
    argv = ["--data", images, "--output", output, *EXACT, *argv]
    assert run_ranks(nodes, trainer, *argv) == [0] * sum(nodes)
    return newest_checkpoint(output)["model"]


def distance(ours, theirs):
    return max(float((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max()) for k in theirs)


@pytest.fixture(scope="module")
def alone(images, tmp_path_factory):
    """One process with batches of 24: 2 epochs of 7 steps, some of 23 and some of 24 images."""
    output = tmp_path_factory.mktemp("alone")
    return trained(images, output, [1], *EPOCHS, "--per_node_batch_size", 24)


@pytest.mark.parametrize(
    "nodes, batch, more",
    [
        ([1, 2, 1], 8, ()),
        ([1, 1], 12, ("--accumulate", 3)),
        ([1, 1], 12, ("--static_graph",)),
        ([1, 1, 1], 8, ("--balance", "5,2,1")),
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
    first = newest_checkpoint(tmp_path)["model"]
    for host in ("node2", "node3"):
        other = newest_checkpoint(tmp_path, host)["model"]
        assert all(torch.equal(first[key], other[key]) for key in first)
