"""Sums that no step uses leave no trace in what `tandem.sync.attach` keeps."""

import contextlib
import io

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from tandem import sync
from tests.trainer_ranks import run_ranks
from tests.unit.tandem import loop


def net():
    torch.manual_seed(0)
    layers = torch.nn.Linear(40, 30), torch.nn.LeakyReLU(0.2), torch.nn.Linear(30, 1)
    return torch.nn.Sequential(*layers)


def toward(ddp, seed, target):
    """A discriminator's loss of a batch of this rank's own."""
    generator = torch.Generator().manual_seed(2 * seed + dist.get_rank())
    images = torch.randn(8, 40, generator=generator, requires_grad=True)
    rated = ddp(images)
    wanted = torch.full_like(rated, target)
    return images, rated, binary_cross_entropy_with_logits(rated, wanted)


def throw_away(ddp, seed, how):
    """What a loop does with a model whose gradients it does not want."""
    images, rated, loss = toward(ddp, seed, 1.0)
    if how == "autograd.grad":
        torch.autograd.grad(rated.sum(), images)
        return
    if how == "penalty":
        (slope,) = torch.autograd.grad(rated.sum(), images, create_graph=True)
        loss = loss + (slope.norm(2, dim=1) - 1).pow(2).mean()
    loss.backward()
    if how == "two losses":
        ddp.zero_grad(set_to_none=True)
        toward(ddp, seed + 1, 0.0)[2].backward()
    if how == "twice":
        toward(ddp, seed + 1, 0.0)[2].backward()
    if how == "half a batch":
        ddp.zero_grad(set_to_none=True)
        with ddp.no_sync():
            toward(ddp, seed + 1, 0.0)[2].backward()


def adversary(spec, how, kind):
    """The weights, and what was left out, of a discriminator; `how`: what its generator's step
    does to it, if anything."""
    loop.joined()
    ddp = loop.wrapped(net(), **kind)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.2)
    attached = sync.attach(ddp, spec)
    for step in range(6):
        ddp.zero_grad(set_to_none=how != "zeros")
        toward(ddp, 100 * step, 1.0)[2].backward()
        toward(ddp, 100 * step + 20, 0.0)[2].backward()
        optimizer.step()
        if how:
            throw_away(ddp, 100 * step + 40, how)
    state = attached.state_dict()
    kept = [one for tensors in state["sync"]["kept"].values() for one in tensors]
    kept += list((state["common"] or {"squares": {}})["squares"].values())
    weights = [one.detach() for one in ddp.module.parameters()]
    return [one.clone().numpy() for one in (*weights, *kept)]


def rarely(*values):
    return pytest.param(*values, marks=pytest.mark.long)


HOWS = ["none", "zeros", "two losses", "twice", "half a batch", "penalty", "autograd.grad"]


@pytest.mark.parametrize(
    ("spec", "how", "kind"),
    [
        ("ef:5:own", "zeros", {}),
        ("ef:5:peak", "twice", {"gradient_as_bucket_view": True}),
        *(rarely("ef:5:peak", how, {}) for how in HOWS),
        *(rarely("ef:5:own", how, {"gradient_as_bucket_view": True}) for how in HOWS),
    ],
)
def test_a_generator_s_step_leaves_no_trace_in_the_discriminator(spec, how, kind):
    plain, thrown = (run_ranks([1, 1], adversary, spec, one, kind) for one in (None, how))
    for ours, theirs in zip(plain, thrown):
        assert any(np.abs(one).max() > 0 for one in ours[4:])
        assert all(np.array_equal(one, two) for one, two in zip(ours, theirs))


class ByData:
    """An optimizer that nobody can hear: it changes weights past their versions."""

    def __init__(self, weights):
        self.weights = list(weights)

    def step(self):
        for one in self.weights:
            one.data.sub_(0.1 * one.grad)


def exactness(kind, named):
    """Whether each of six steps was exact, and what rank 0 is told."""
    loop.joined()
    ddp = loop.wrapped(net())
    optimizer = kind(ddp.parameters())
    with contextlib.redirect_stderr(io.StringIO()) as said:
        attached = sync.attach(ddp, "ef:5:own", optimizer=optimizer if named else None)
        exact = []
        for step in range(6):
            ddp.zero_grad(set_to_none=True)
            toward(ddp, step, 1.0)[2].backward()
            exact.append(attached.exact)
            optimizer.step()
    return exact, said.getvalue().count("saw no optimizer step")


def sgd(weights):
    return torch.optim.SGD(weights, 0.1)


def fused(weights):
    return torch.optim.Adam(weights, 0.1, fused=True)


@pytest.mark.parametrize(
    ("kind", "named", "exact", "lines"),
    [
        (ByData, False, 6, 1),
        (ByData, True, 1, 0),
        rarely(sgd, False, 1, 0),
        rarely(sgd, True, 1, 0),
        rarely(fused, False, 1, 0),
    ],
)
def test_where_no_step_is_heard_sums_are_exact_and_rank_0_says_so(kind, named, exact, lines):
    first, second = run_ranks([1, 1], exactness, kind, named)
    assert first[0] == second[0] == [number < exact for number in range(6)]
    assert (first[1], second[1]) == (lines, 0)


class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(40, 40), torch.nn.Linear(40, 1)

    def forward(self, images, skips=False):
        return self.two(images if skips else self.one(images))


def two_optimizers(steps):
    """Both parts of one DDP model get gradients in each step, and one of them is stepped."""
    loop.joined()
    ddp = loop.wrapped(Both())
    parts = [sgd(part.parameters()) for part in (ddp.module.one, ddp.module.two)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        attached = sync.attach(ddp, "ef:5:peak")
        exact = []
        for step in range(steps):
            ddp.zero_grad(set_to_none=True)
            toward(ddp, step, 1.0)[2].backward()
            exact.append(attached.exact)
            parts[step % 2].step()
    return exact, "a separate DistributedDataParallel" in said.getvalue()


def test_a_step_of_a_part_of_a_model_makes_its_sums_exact_and_rank_0_says_so():
    (exact, said), (other, nothing) = run_ranks([1, 1], two_optimizers, 6)
    assert exact == other == [True, False, True, True, True, True]
    assert (said, nothing) == (True, False)


def skipped_layer():
    """What is kept of a layer before and after a step that has no gradient of it, and of another
    layer."""
    loop.joined()
    torch.manual_seed(0)
    ddp = loop.wrapped(Both(), find_unused_parameters=True)
    optimizer = sgd(ddp.parameters())
    attached = sync.attach(ddp, "ef:5:peak")
    kept = []
    for step in range(5):
        ddp.zero_grad(set_to_none=True)
        ddp(torch.randn(8, 40), skips=step == 4).pow(2).mean().backward()
        optimizer.step()
        attached.state_dict()
        state = attached.sync.errors[0]
        sizes = [one.numel() for one in state.parameters]
        parts = dict(zip(state.parameters, state.current[0][: sum(sizes)].split(sizes)))
        kept.append([parts[one.weight].clone().numpy() for one in (ddp.module.one, ddp.module.two)])
    return kept[-2:]


def test_what_is_kept_of_a_layer_stays_where_a_step_skips_it():
    for before, after in run_ranks([1, 1], skipped_layer):
        assert np.abs(before[0]).max() > 0
        assert np.array_equal(before[0], after[0]) and not np.array_equal(before[1], after[1])
