"""Strategies that keep what they leave out, in whole runs with what else there is: each setting
with each strategy at least once, and settings in pairs. (O2 computes on GPUs alone.)"""

import pytest
import torch

from tests.trainer_ranks import lines, newest_checkpoint, run_ranks, trainer

PER_CLASS = 14

ARGV = [
    "--model", "tests.trainer_models:normed", "--augment", "none", "--workers", 0,
    "--epochs", 2, "--lr", 0.05, "--sync_warmup", 0.5, "--per_node_batch_size", 8,
]  # fmt: skip
BF16, LAST, COMPILE = ("--precision", "bf16", "--emulate"), ("--channels_last",), ("--compile",)
CLIP, PARTS, FP32 = ("--clip_grad_norm", 1), ("--accumulate", 2), ("--precision", "fp32")
UNEVEN, EVEN = [2, 1], [1, 1]


def rarely(*values):
    return pytest.param(*values, marks=pytest.mark.long)


# A strategy, ranks of each machine, settings.
RUNS = [
    ("ef:5:own", UNEVEN, (*BF16, *LAST, *CLIP, "--static_graph")),
    ("ef:5", EVEN, (*FP32, *CLIP, *PARTS)),
    rarely("ef:255", EVEN, (*BF16, *CLIP)),
    rarely("ef:15", UNEVEN, (*BF16, *PARTS)),
    rarely("ef:3", EVEN, (*FP32, *LAST, *CLIP)),
    rarely("ef:3", UNEVEN, (*COMPILE, *FP32, *CLIP)),
    rarely("ef:255", EVEN, (*COMPILE, *FP32, *LAST)),
    rarely("ef:5:own", EVEN, (*COMPILE, *FP32, *PARTS)),
]


@pytest.mark.parametrize(("spec", "nodes", "more"), RUNS)
def test_a_run_ends_with_the_same_finite_weights_on_all_machines(
    images, tmp_path, spec, nodes, more
):
    argv = ["--data", images, "--output", tmp_path, "--sync", spec, *ARGV, *more]
    assert run_ranks(nodes, trainer, *argv, quiet=True) == [0] * sum(nodes)
    ours, theirs = (newest_checkpoint(tmp_path, f"node{host}")["model"] for host in (1, 2))
    for name, value in ours.items():
        assert bool(torch.isfinite(value.float()).all()), name
        assert "running" in name or torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(("spec", "warmup", "count"), [("ef:5", 0.5, 2), ("fp16", 9, 0)])
def test_the_lines_of_exact_steps_say_so(images, tmp_path, spec, warmup, count):
    argv = ["--data", images, "--output", tmp_path, "--sync", spec, *ARGV, *FP32]
    run_ranks(EVEN, trainer, *argv, "--sync_warmup", warmup, quiet=True)
    for start, *steps in lines(tmp_path):
        exact = [line.get("exact", False) for line in steps if line["kind"] == "step"]
        assert exact == [True] * count + [False] * (len(exact) - count)
        assert start["warmup"] == warmup
