"""The three kernels of a bucket do what plain operations do, to the bit, here by Triton's
interpreter: on the CPU, in a process of its own, since Triton reads once how it is to run."""

import importlib.util
import math
import multiprocessing
import warnings
from unittest import mock

import pytest
import torch

from contract.strategies import BLOCK
from tandem.sync.codec import CODECS, Operations

RANKS = 2
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="CUDA 10.2's torch brings no Triton"
)


@pytest.fixture(scope="module")
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            yield lambda function, *args: pool.apply(function, args)


def kernels():
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of what overflows on purpose
    from tandem.sync import kernels

    return kernels


def shard_of(codec):
    """Two tiles."""
    return 2 * math.lcm(BLOCK, codec.packed)


def bucket(coding, squares, buffer, known):
    """All that the stages of one bucket make: first what must be the same to the bit."""
    values, shard = buffer.numel(), len(known) // RANKS
    chance = torch.Generator().manual_seed(7)
    own = None if squares is None else coding.scales(squares)
    left, part = torch.zeros(RANKS * shard), torch.zeros(shard)
    coded = coding.code(buffer, known, left, own, RANKS)
    kept = torch.randn(shard, generator=chance)
    total = coding.sum(coded, kept, part, None if own is None else own[:shard])
    summed, learned = torch.empty(values, dtype=buffer.dtype), torch.zeros(RANKS * shard)
    most = coding.take(coded, shard, summed, own, squares, learned)
    codes = [one for rows in (coded, total[None]) for one in coding.codec._split_rows(rows, shard)]
    return [*codes, summed, learned, most.float()], [left, part]


def compare(levels, own, dtype):
    """Whether all is the same, and by how much what is left out differs."""
    codec, chance = CODECS[levels], torch.Generator().manual_seed(levels)
    whole = RANKS * shard_of(codec)
    values = whole - 100  # the last part is filled up
    steep = torch.rand(values, generator=chance) ** 6
    buffer = (torch.randn(values, generator=chance) * steep).to(dtype)
    known = torch.zeros(whole)
    known[:values] = torch.randn(values, generator=chance) / 10
    buffer[256:512] = known[256:512] = 0  # a block with nothing in it
    squares = torch.rand(whole, generator=chance) ** 8 if own else None
    same, left = bucket(Operations(codec), squares, buffer, known)
    fused, fused_left = bucket(kernels().Kernels(codec), squares, buffer, known)
    off = [float((one - two).abs().max()) for one, two in zip(left, fused_left)]
    return all(map(torch.equal, same, fused)), max(off)


@pytest.mark.parametrize(
    ("levels", "own", "dtype"),
    [
        (3, False, torch.float32),
        (5, True, torch.float32),
        (15, False, torch.bfloat16),
        (255, False, torch.float32),
    ],
)
def test_they_do_what_plain_operations_do(interpreted, levels, own, dtype):
    same, off = interpreted(compare, levels, own, dtype)
    assert same
    assert off < 4e-6  # torch may fuse what makes it, and each rank keeps its own


def overflow(own, bad):
    whole = RANKS * shard_of(CODECS[5])
    buffer = torch.ones(whole)
    buffer[300] = bad
    squares, coding = torch.ones(whole) if own else None, kernels().Kernels(CODECS[5])
    (*_, summed, _, most), _ = bucket(coding, squares, buffer, torch.zeros(whole))
    return float(most), (~torch.isfinite(summed)).nonzero().flatten().tolist()


@pytest.mark.parametrize(("own", "bad"), [(False, math.nan), (True, -math.inf)])
def test_a_block_that_overflowed_is_seen_in_the_sum(interpreted, own, bad):
    most, spoilt = interpreted(overflow, own, bad)
    assert not math.isfinite(most)
    assert 300 in spoilt and set(spoilt) <= set(range(256, 512))


def give_other_sums():
    """What is said."""
    made, cpu = kernels(), torch.device("cpu")
    assert made.try_out(CODECS[5], True, cpu).codec is CODECS[5]
    zeros = lambda self, coded, shard, buffer, *rest: buffer.zero_().max()  # noqa: E731
    with mock.patch.object(made.Kernels, "take", zeros):
        try:
            made.try_out(CODECS[5], True, cpu)
        except ArithmeticError as error:
            return str(error)


def test_a_device_that_takes_other_sums_is_refused(interpreted):
    assert interpreted(give_other_sums)
