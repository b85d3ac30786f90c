"""EPOCHS of a run that goes on: more than it began with."""

import io
from unittest import mock

import torch

from tests.trainer_ranks import newest_checkpoint, run_ranks, said, trainer

PER_CLASS = 8
ARGV = ["--model", "tests.trainer_models:normed", "--workers", 0, "--per_node_batch_size", 8]
ARGV += ["--warmup_epochs", 0, "--step_epochs", "1,3", "--resume", "auto"]


def train(images, output, *more):
    argv = ["--data", images, "--output", output, *ARGV, *more]
    assert run_ranks([1], trainer, *argv) == [0]
    return newest_checkpoint(output)["model"]


def test_more_epochs_are_those_of_a_run_that_began_with_them(images, tmp_path):
    kind = ("--schedule", "step")
    train(images, tmp_path / "a", *kind, "--epochs", 2)
    ours = train(images, tmp_path / "a", *kind, "--epochs", 4)
    theirs = train(images, tmp_path / "b", *kind, "--epochs", 4)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def said_on_the_way(*argv):
    with mock.patch("sys.stdout", io.StringIO()) as output:
        assert trainer(*argv) == 0
    return output.getvalue()


def test_a_cosine_says_what_it_does_and_fewer_epochs_are_refused(images, tmp_path):
    train(images, tmp_path, "--epochs", 2)
    argv = ["--data", images, "--output", tmp_path, *ARGV]
    (text,) = run_ranks([1], said_on_the_way, *argv, "--epochs", 4)
    assert "learning rate at this step from 0 to 0.05" in text
    ((code, text),) = run_ranks([1], said, *argv, "--epochs", 3)
    assert code == 2 and "beyond epoch 3: type --epochs 4" in text
    assert newest_checkpoint(tmp_path)["epoch"] == 4
