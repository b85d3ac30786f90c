"""Several ranks a machine: gradients are summed within it, and one rank of it speaks for all."""

import pytest
import torch
import torch.distributed as dist

from tandem.sync import Topology, make
from tests.trainer_ranks import make_images, newest_checkpoint, run_ranks, trainer

PER_CLASS = 16


def test_machines_are_told_from_the_machine_of_each_rank():
    """As mpirun deals ranks out by node."""
    machines = Topology((0, 1, 0, 2), rank=2)
    assert machines.ranks == ((0, 2), (1,), (3,))
    assert (machines.leaders, machines.local_ranks, machines.is_leader) == (
        (0, 1, 3),
        (0, 2),
        False,
    )
    assert machines.multi_rank_nodes
    assert not Topology((0, 1, 2), rank=2).multi_rank_nodes


def test_the_group_within_a_machine_sums_once_before_any_backward(monkeypatch):
    """NCCL connects in a group's first sum."""
    summed = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed.append(group))
    topology = Topology((0, 0), rank=0, group="of this machine")
    make("allreduce").setup(torch.device("cpu"), topology)
    assert summed == ["of this machine"]


ARGV = [
    "--model", "tests.trainer_models:plain", "--precision", "fp32", "--augment", "none",
    "--per_node_batch_size", 8, "--workers", 0, "--epochs", 2, "--sync_warmup", 1, "--lr", 0.05,
]  # fmt: skip


def train(images, output, nodes, *more):
    """The saved weights, after runs whose ranks' batches make up the same ones of machines."""
    argv = ["--data", images, "--output", output, *ARGV, *more]
    assert run_ranks(list(nodes), trainer, *argv, quiet=True) == [0] * sum(nodes)
    return newest_checkpoint(output)["model"]


@pytest.mark.parametrize(
    ("spec", "nodes"),
    [
        ("ef:3", [2, 1]),
        pytest.param("ef:3", [2, 2], marks=pytest.mark.long),
    ],
)
def test_machines_of_several_ranks_train_as_those_of_one(images, tmp_path, spec, nodes):
    ones = train(images, tmp_path / "a", [1, 1], "--sync", spec)
    ours = train(images, tmp_path / "b", nodes, "--sync", spec)
    for name, value in ones.items():
        assert torch.allclose(value, ours[name], atol=1e-4), name


def test_who_has_no_samples_holds_up_nobody(tmp_path):
    """Two images a step, which are the second machine's: neither rank of the first has any."""
    few = make_images(tmp_path / "images", per_class=1, classes=2)
    more = ("--weight_decay", 0.01, "--sync_warmup", 0, "--find_unused_parameters")
    exact = train(few, tmp_path / "exact", [2, 1], *more)
    ours = train(few, tmp_path / "ours", [2, 1], *more, "--sync", "ef:255")
    for name, value in exact.items():
        assert torch.allclose(value, ours[name], atol=1e-3), name


def test_on_one_machine_sums_are_exact(images, tmp_path):
    exact = train(images, tmp_path / "exact", [2])
    ours = train(images, tmp_path / "ours", [2], "--sync", "ef:3")
    assert all(torch.equal(value, ours[name]) for name, value in exact.items())
