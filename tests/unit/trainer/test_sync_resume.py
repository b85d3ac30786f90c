"""What a strategy keeps for one machine alone is found again, or is said to be missing."""

import os
import shutil

import pytest
import torch

from tests.trainer_ranks import newest_checkpoint, run_ranks, trainer

PER_CLASS = 15

ARGV = [
    "--model", "tests.trainer_models:normed", "--precision", "fp32", "--augment", "none",
    "--per_node_batch_size", 8, "--workers", 0, "--resume", "auto", "--keep", 99,
    "--epochs", 3, "--warmup_epochs", 0, "--evaluate_every", 3, "--momentum", 0.9,
]  # fmt: skip
ONES, UNEVEN = [1, 1], [2, 1]
# Those of all strategies that keep something for each machine; ranks of each machine.
KEEPING = [
    ("ef:5:own", UNEVEN),
    pytest.param(("ef:3:peak", ONES), marks=pytest.mark.long),
]


def saying(path, *argv):
    """The trainer, with what rank 0 says in a file."""
    if os.environ["RANK"] == "0":
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 1)
    return trainer(*argv)


def train(images, output, spec, nodes, *more):
    argv = ["--data", images, "--output", output, "--sync", spec, *ARGV, *more]
    return run_ranks(nodes, saying, f"{output}.said", *argv)


@pytest.fixture(scope="module", params=KEEPING)
def undisturbed(request, images, tmp_path_factory):
    output, (spec, nodes) = tmp_path_factory.mktemp("undisturbed"), request.param
    done = train(images, output, spec, nodes, "--checkpoint_every", 3)
    assert done == [0] * sum(nodes)
    return spec, nodes, output


def cut(undisturbed, output, step):
    """As if the run had been killed while the checkpoint after `step` was written."""
    shutil.copytree(undisturbed, output)
    for file in output.glob("checkpoints/**/*.pt"):
        if file.name == "best.pt" or int(file.stem.split("-")[1]) > step:
            file.unlink()


def steps_of(output):
    files = (output / "checkpoints/node1").glob("step-*.pt")
    return sorted(int(file.stem.split("-")[1]) for file in files)


def test_the_same_ranks_go_on_to_the_bit(images, undisturbed, tmp_path):
    spec, nodes, whole = undisturbed
    first, second = steps_of(whole)[:2]
    cut(whole, tmp_path / "cut", second)
    # The newest checkpoint is there, but one machine has not written its own part of it yet.
    (tmp_path / f"cut/checkpoints/node2/rank{nodes[0]}/step-{second:08d}.pt").unlink()
    done = train(images, tmp_path / "cut", spec, nodes, "--checkpoint_every", 3)
    assert done == [0] * sum(nodes)
    ours, theirs = newest_checkpoint(tmp_path / "cut")["model"], newest_checkpoint(whole)["model"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert first < second < steps_of(whole)[-1]


def test_other_ranks_go_on_and_say_what_begins_anew(images, undisturbed, tmp_path):
    """Another number of them, or as many on more machines."""
    spec, _, whole = undisturbed
    cut(whole, tmp_path / "cut", steps_of(whole)[1])
    assert train(images, tmp_path / "cut", spec, [1, 1, 1]) == [0, 0, 0]
    said = (tmp_path / "cut.said").read_text()
    assert f"--sync {spec}: each machine stores its own state, which is missing" in said


def test_what_keeps_nothing_has_lost_nothing(images, tmp_path):
    for _ in range(2):
        assert train(images, tmp_path / "run", "allreduce", [1], "--epochs", 1) == [0]
    assert "starts from zero" not in (tmp_path / "run.said").read_text()
