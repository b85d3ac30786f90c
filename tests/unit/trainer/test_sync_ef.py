"""Strategies with error feedback over real processes: what is left out is sent later."""

import hashlib

import pytest
import torch

from contract.options import Options
from contract.strategies import UNIT, coded_bytes
from tandem.sync.codec import CODECS, KEPT, make_scales
from tests.trainer_ranks import run_ranks
from tests.unit.trainer.sync_ranks import Between, Steps, six_steps
from trainer.world import start


@pytest.mark.parametrize("levels", CODECS)
def test_codes_are_as_near_as_their_levels_allow(levels):
    codec = CODECS[levels]
    torch.manual_seed(0)
    rows = torch.randn(3, 2 * UNIT) * torch.logspace(-12, 12, 2 * UNIT)
    left = rows.clone()
    coded = codec.encode(left)
    assert coded.shape == (3, coded_bytes(2 * UNIT, levels))
    peaks = rows.view(-1, 256).abs().amax(1, keepdim=True)
    # Half a level, and what the scale's 8 bits round off.
    most = peaks * (0.5 / codec.levels + 2.0**-8)
    assert bool((left.view(-1, 256).abs() <= most).all())
    # Rounded twice here, and once there.
    beside = (codec.decode(coded, 2 * UNIT) + left - rows).view(-1, 256).abs()
    assert bool((beside <= peaks * 2.0**-22).all())
    nothing = torch.zeros(1, UNIT)
    assert torch.equal(codec.decode(codec.encode(nothing.clone()), UNIT), nothing)


@pytest.mark.parametrize("own", [None, torch.rand(1, UNIT) + 0.01], ids=["peak", "own"])
@pytest.mark.parametrize("levels", CODECS)
def test_blocks_that_overflowed_are_seen_as_such_and_the_others_are_not(levels, own):
    rows, codec = torch.ones(1, UNIT), CODECS[levels]
    rows[0, 300], rows[0, 600], rows[0, 900] = float("inf"), -float("inf"), float("nan")
    finite = torch.isfinite(codec.decode(codec.encode(rows, own), UNIT, own)).view(-1, 256)
    assert finite.all(1).tolist() == [block not in (1, 2, 3) for block in range(UNIT // 256)]
    assert not finite[1:4].any()


@pytest.mark.parametrize("levels", CODECS)
def test_with_own_scales_nothing_is_lost_and_small_values_come_as_often_as_large_ones(levels):
    """Of a block whose values differ a thousandfold, each by its scale; no gradient's size counts,
    from the least to the largest numbers, and none after thousands of steps without one."""
    codec = CODECS[levels]
    torch.manual_seed(0)
    sizes = torch.logspace(-1, 1, 256).repeat(UNIT // 256)
    for scale in (1e-15, 1.0, 1e15):
        squares = (sizes * scale).square()
        for _ in range(3000 if scale == 1 else 0):
            squares = squares * KEPT  # what is left would be nothing to divide by
        own = make_scales(squares)
        rows = torch.randn(1, UNIT) * sizes * scale
        left = rows.clone()
        sent = codec.decode(codec.encode(left, own[None]), UNIT, own[None])
        assert bool(((sent + left - rows).abs() <= rows.abs().amax() * 2.0**-21).all())
        zeros = (sent == 0).float().view(-1, 256).mean(0)
        if scale != 1:
            assert abs(float(zeros[:64].mean() - zeros[-64:].mean())) < 0.1
        assert bool(torch.isfinite(sent).all()) and float(zeros.mean()) < 0.8


def summed_up(spec):
    """How far all sums and what was left out are from the exact sums, after 6 steps; how far the
    sums alone are; a digest of them; how much this rank keeps."""
    steps, total, exact, off = six_steps(spec)
    near = float((total - exact).norm() / exact.norm())
    held = sum(one.numel() for bucket in steps.sync.errors.values() for one in bucket.current)
    assert len(steps.sync.errors) != 1, "several buckets"
    return off, near, hashlib.sha256(total.numpy().tobytes()).hexdigest(), held


@pytest.mark.parametrize(
    ("spec", "near", "nodes"),
    [
        ("ef:255:peak", 0.01, [1, 1, 1]),
        ("ef:5:own", 0.5, [2, 1]),
    ],
)
def test_what_is_left_out_is_kept_by_machines_and_all_ranks_have_the_same_sums(spec, near, nodes):
    results = run_ranks(nodes, summed_up, spec)
    for off, distance, _, _ in results:
        assert abs(off) < 1e-5
        assert distance < near
    assert len({digest for _, _, digest, _ in results}) == 1
    held = [one for *_, one in results]
    assert held[0] > 0 and set(held) == ({held[0], 0} if nodes == [2, 1] else {held[0]})


def overflowed(spec):
    """Whether sums are finite with an inf on one rank, whether errors stay, and the step after."""
    steps = Steps(spec)
    steps.step(1, scale=2.0)
    before = {
        index: [one.clone() for one in kept.current] for index, kept in steps.sync.errors.items()
    }
    bad = steps.step(2, scale=2.0, spoil=float("inf"))
    kept = all(
        torch.equal(one, then)
        for index, kept in steps.sync.errors.items()
        for one, then in zip(kept.current, before[index])
    )
    # The loss scale halves after an overflow, and errors with it.
    after = steps.step(3, scale=1.0)
    wrong = (after - steps.exact(3)).norm() / steps.exact(3).norm()
    return bool(torch.isfinite(bad).all()), kept, float(wrong)


def test_an_overflow_on_one_rank_is_seen_by_all_and_spoils_no_error():
    for finite, kept, wrong in run_ranks([1, 1], overflowed, "ef:5:own"):
        assert not finite
        assert kept
        assert wrong < 1.2


def exact_first():
    steps = Steps("ef:5")
    same = torch.equal(steps.step(1, exact=True), steps.exact(1))
    kept = [one for bucket in steps.sync.errors.values() for one in bucket.current]
    return same, len(kept) > 2, any(bool(one.any()) for one in kept)


def test_warm_up_is_exact_and_takes_the_memory_of_the_steps_after_it():
    assert run_ranks([1, 1], exact_first) == [(True, True, False)] * 2


def bytes_sent(specs):
    """By spec: bytes a step that this rank sends to other machines, and the most that the registry
    declares. (Entropy coding is as good as gradients are; these are of no real net.)"""
    world, found = start(Options()), {}
    between = Between(world)
    machines = max(world.nodes) + 1
    for spec in specs:
        steps = Steps(spec, world)
        for number in range(3):
            if number == 1:
                before = between.sent
            steps.step(number)
        gpus = world.size // machines
        declared = steps.strategy.bytes_per_step(machines, steps.payload, gpus=gpus)
        found[spec] = (between.sent - before) / 2, declared
    return found


SPECS = ["allreduce", "fp16", "ef:3", "ef:5"]


@pytest.mark.parametrize(("nodes", "specs"), [([1, 1, 1], SPECS), ([2, 2], ["allreduce", "ef:3"])])
def test_a_machine_sends_what_the_registry_declares_whatever_its_ranks(nodes, specs):
    ranks = iter(run_ranks(nodes, bytes_sent, specs))
    for count in nodes:
        machine = [next(ranks) for _ in range(count)]
        for spec in specs:
            sent, declared = [found[spec][0] for found in machine], machine[0][spec][1]
            assert sum(sent) <= declared + max(0.02 * declared, 2**16), spec
            assert sum(sent) >= (0.2 if "ef" in spec else 0.98) * declared, spec
            assert count == 1 or 0 in sent, spec


def many_steps(spec):
    steps = Steps(spec)
    for number in range(1000):
        steps.step(number)
    return True


@pytest.mark.long
def test_many_steps_of_several_buckets_end():
    assert run_ranks([1, 1, 1, 1], many_steps, "ef:5") == [True] * 4
