"""Unequal parts (--balance): what is learned, and that they are kept."""

import shutil
import signal

import pytest
import torch

from tests.trainer_ranks import (
    end,
    newest_checkpoint,
    run_ranks,
    start_ranks,
    steps_done,
    trainer,
    wait_for_steps,
)

NODES = [1, 1, 1]
ARGV = [
    "--augment", "shift", "--epochs", 6, "--checkpoint_every", 3, "--log_every", 1, "--workers", 0,
    "--evaluate_every", 6, "--resume", "auto",
]  # fmt: skip


def argv(images, output, model, *more):
    where = ["--data", images, "--output", output, "--model", f"tests.trainer_models:{model}"]
    return [*where, *ARGV, *more]


def test_unequal_parts_learn_what_one_process_does(images, tmp_path):
    same = ("--precision", "fp64", "--sync_bn", "--per_node_batch_size")
    one = argv(images, tmp_path / "one", "normed_alone", *same, 24)
    run_ranks([1], trainer, *one, quiet=True)
    three = argv(images, tmp_path / "three", "normed_alone", *same, 8, "--balance", "5,2,1")
    assert run_ranks(NODES, trainer, *three, quiet=True) == [0] * 3
    ours, alone = newest_checkpoint(tmp_path / "three"), newest_checkpoint(tmp_path / "one")
    assert ours["step"] == alone["step"]
    for name, tensor in alone["model"].items():
        torch.testing.assert_close(ours["model"][name], tensor, rtol=0, atol=1e-9)


@pytest.mark.long
def test_parts_that_change_and_a_kill_leave_the_same_bits(images, tmp_path):
    """Parts change where a run goes on; from there on a kill changes no bit."""
    begun, other = tmp_path / "begun", tmp_path / "other"
    options = ("--precision", "fp32", "--mixup", 0.2, "--accumulate", 2, "--per_node_batch_size", 8)

    def of(output, balance):
        return argv(images, output, "normed", *options, "--balance", balance)

    first = start_ranks(NODES, trainer, *of(begun, "5,2,1"), quiet=True)
    wait_for_steps(begun, 9, first)
    end(first, signal.SIGKILL)
    shutil.copytree(begun, other)
    assert run_ranks(NODES, trainer, *of(begun, "2,3,3"), quiet=True) == [0] * 3
    second = start_ranks(NODES, trainer, *of(other, "2,3,3"), quiet=True)
    wait_for_steps(other, steps_done(other) + 8, second)
    assert any(child.is_alive() for child, _ in second)
    end(second, signal.SIGKILL)
    assert run_ranks(NODES, trainer, *of(other, "2,3,3"), quiet=True) == [0] * 3
    ours, theirs = newest_checkpoint(begun), newest_checkpoint(other)
    assert ours["step"] == theirs["step"]
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])
