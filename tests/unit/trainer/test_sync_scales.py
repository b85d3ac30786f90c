"""Scales of the values' own: one thing of the run, equal to the bit on all ranks and machines."""

import contextlib
import hashlib
import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from contract.errors import UserError
from tandem.pickles import load_tensors
from tandem.sync.feedback import check_scale
from tests.trainer_ranks import run_ranks, trainer
from tests.unit.tandem import loop
from tests.unit.trainer.sync_ranks import Steps, flat

PER_CLASS = 16
SPEC = "ef:5:own"


def means(steps):
    """What a rank keeps, in the order of the model's parameters; 0 of those without any."""
    named = steps.sync.common_state(steps.model)["squares"]
    every = steps.model.named_parameters()
    return torch.cat([named.get(name, torch.zeros(one.numel())) for name, one in every])


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def learned():
    """How far the means are from those of the sums after each step; a digest of them in the end."""
    steps, expected, off = Steps(SPEC), 0, []
    off.append(float(means(steps).abs().sum()))  # of the pass that orders buckets
    plan = [("exact", 1.0), ("coded", 1.0), ("overflow", 1.0), ("coded", 0.5), ("exact", 0.5)]
    plan += [("exact overflow", 0.5), ("coded", 0.5)]
    for number, (kind, scale) in enumerate(plan, 1):
        spoil = float("inf") if "overflow" in kind else None
        sums = steps.step(number, scale, spoil, exact="exact" in kind)
        assert bool(torch.isfinite(sums).all()) == (spoil is None)
        if number == 4:
            expected = expected * 0.25
        if spoil is None:
            expected = 0.95 * expected + sums.square()
        off.append(float((means(steps) - expected).abs().max() / expected.abs().max()))
    held = sum(
        one.numel() for bucket in steps.sync.states() for one in bucket.current + bucket.pending
    )
    values = sum(one.numel() for one in steps.model.parameters())
    return off, digest(means(steps)), held / values - steps.sync.state_copies


def test_all_ranks_learn_them_of_each_finite_sum_and_of_nothing_else():
    found = run_ranks([2, 1], learned)
    for off, _, more in found:
        assert off[0] == 0
        assert max(off[1:]) < 1e-6
        assert 0 <= more < 0.1  # of what a trial of memory is told; parts are filled up
    assert len({last for _, last, _ in found}) == 1


SINGLE = """
import hashlib, sys, torch
from tandem.sync.codec import CODECS, learn, make_scales
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
squares = torch.ldexp(torch.randint(2**20, (34560,)).float(), torch.randint(-70, 50, (34560,)))
coded = torch.randint(125, (3, CODECS[5].coded_bytes(11520)), dtype=torch.uint8)
told = hashlib.sha256()
for _ in range(9):
    own = make_scales(squares).view(3, -1)
    sums = CODECS[5].decode(coded, 11520, own).view(-1).nan_to_num_(1.0)
    sums.clamp_(-1e15, 1e15)
    learn(squares.clone(), sums, squares)
    for one in (own, sums, squares):
        told.update(one.numpy().tobytes())
print(told.hexdigest())
"""


def with_all_instructions():
    sys.argv[1:] = ["1"]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        exec(SINGLE, {})
    return told.getvalue()


def test_unlike_processors_make_the_same_bits_of_them():
    """By scalar and by vector instructions, which fuse what may be fused, and on two threads."""
    scalar = subprocess.run(
        [sys.executable, "-c", SINGLE, "2"],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    (vector,) = run_ranks([1], with_all_instructions)
    assert vector == scalar.stdout and len(vector) == 65


def exchanged(states):
    """A state for each rank of a run of others; whether the sums go on with it, or what is said."""
    steps = Steps(SPEC)
    scale, squares = states[dist.get_rank() % len(states)]
    named = {name: torch.from_numpy(value) for name, value in squares.items()}
    steps.sync.load_common_state(steps.model, {"scale": scale, "squares": named})
    try:
        steps.step(9)
    except UserError as error:
        return str(error), None
    return "", digest(means(steps))


def saved(count):
    steps = Steps(SPEC)
    for number in range(1, count + 1):
        steps.step(number)
    state = steps.sync.common_state(steps.model)
    return state["scale"], {name: one.numpy() for name, one in state["squares"].items()}


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan, True, "1"])
def test_what_is_no_loss_scale_is_not_divided_by(scale):
    with pytest.raises(ValueError):
        check_scale(scale)


def test_they_go_on_in_a_run_of_other_ranks_and_different_ones_are_refused():
    first, second = run_ranks([1, 1], saved, 2)[0], run_ranks([1, 1], saved, 3)[0]
    found = run_ranks([1, 1, 1], exchanged, [first])
    assert {said for said, _ in found} == {""} and len({after for _, after in found}) == 1
    for said, _ in run_ranks([1, 1], exchanged, [first, second]):
        assert "different mean squares" in said


def first_steps(settles):
    """The means after one step by DDP's first buckets, or by those that it makes after it."""
    loop.joined()
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(9)])
    ddp = loop.wrapped(net)
    attached = loop.sync.attach(ddp, SPEC)
    if settles:
        attached.warm_up_buckets(lambda: ddp(torch.ones(2, 300)).sum().backward())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    found, expected = [], 0
    for step in range(4):
        net.zero_grad()
        torch.manual_seed(10 * step + attached.sync.topology.rank)
        ddp(torch.randn(4, 300)).pow(2).mean().backward()
        optimizer.step()
        named = attached.state_dict()["common"]["squares"]
        ours = torch.cat([named[name] for name, _ in net.named_parameters()])
        expected = 0.95 * expected + flat(net).square()
        found.append(float((ours - expected).abs().max() / expected.max()))
    return found


@pytest.mark.parametrize("settles", [False, True])
def test_they_are_the_parameters_and_not_the_buckets_(settles):
    for found in run_ranks([1, 1], first_steps, settles):
        assert max(found) < 1e-6


ARGV = [
    "--model", "tests.trainer_models:several", "--precision", "fp32", "--augment", "none",
    "--per_node_batch_size", 8, "--workers", 0, "--epochs", 3, "--lr", 0.002, "--bucket_mb", 1,
    "--optimizer", "adamw", "--sync", "ef:5", "--resume", "auto", "--sync_warmup", 0,
    "--checkpoint_every", 0, "--keep", 99,
]  # fmt: skip


def test_with_adamw_a_run_keeps_them_on_another_number_of_machines(images, tmp_path):
    """Of one machine's checkpoint, which has none, they are learned anew."""
    argv = ["--data", images, "--output", tmp_path, *ARGV]
    for epoch, nodes in enumerate(([1], [1, 1], [1, 1, 1]), 1):
        assert run_ranks(nodes, trainer, *argv, quiet=True) == [0] * sum(nodes)
        for file in tmp_path.glob("checkpoints/*/*.pt"):
            with file.open("rb") as content:
                state = load_tensors(content)
            if state["epoch"] > epoch or file.stem == "best":
                file.unlink()  # as if the run had ended here
            elif state["epoch"] == epoch:
                kept = state["sync"]
        if nodes == [1]:
            assert kept is None
        else:
            assert len(kept["squares"]) == 6
            assert all(float(one.max()) > 0 for one in kept["squares"].values())
