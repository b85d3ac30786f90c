"""What coding a bucket would cost a GPU does not grow unseen, nor does what it rounds to change."""

import hashlib

import pytest
import torch

from bench.codec import SHOWN, stages
from contract.strategies import BLOCK, OWN, UNIT, parse
from tandem.sync.codec import CODECS


@pytest.mark.parametrize("spec", SHOWN)
def test_a_bucket_takes_few_kernels_and_little_memory_traffic(spec):
    values = 4 * UNIT * 20
    counted = stages(spec, 4, values).values()
    kernels = sum(sum(stage.kernels.values()) for stage in counted)
    assert kernels <= (60 if spec.endswith("own") else 50)
    assert sum(stage.bytes for stage in counted) <= (270 if spec.endswith("own") else 140) * values


# What `ef` makes of `numbers` in the runs of bench/accuracy. Where this changes, their figures are
# of another codec, and so are the labels that come of them.
BITS = {
    "ef:3:peak": "6889799f1d61cb5a",
    "ef:5:peak": "36de9b9ac143c6bb",
    "ef:5:own": "fb270a5cf2c033ff",
    "ef:15:peak": "fe4b0fd335ff684d",
}


def numbers(levels: int) -> torch.Tensor:
    """Halfway between two levels of their block's peak, and beside that by some units in the last
    place, where codecs differ that round in another order: (1, UNIT) of fp32."""
    values = torch.arange(UNIT)
    peaks = (129.0 + values // BLOCK).view(-1, BLOCK)
    odd = (values.view(-1, BLOCK) % (levels + 2)) * 2 - levels - 2
    halves = peaks / (levels - 1) * odd.clamp(1 - levels, levels - 1)
    last = halves * 2.0**-23 * (values.view(-1, BLOCK) % 11 - 5)
    return torch.where(values.view(-1, BLOCK) % BLOCK == 0, peaks, halves + last).view(1, -1)


@pytest.mark.parametrize("spec", BITS)
def test_the_codec_rounds_as_in_the_runs_of_the_study(spec):
    strategy = parse(spec)
    codec, own = CODECS[strategy.levels], None
    rows = numbers(2 * codec.levels + 1)
    if strategy.scale == OWN:
        rows = rows.round().clamp(-63, 63)  # whose squares add up to the same in any order
        own = 0.5 ** (torch.arange(UNIT) % 3).view(1, -1)
    bits = codec.decode(codec.encode(rows, own), UNIT, own).numpy().tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == BITS[spec]
