"""What coding a bucket would cost a GPU does not grow unseen."""

import pytest
import torch

from bench.codec import stages
from tandem.sync.codec import CODECS


@pytest.mark.parametrize("spec", ["ef:1.6", "ef:2", "ef:4", "ef:8"])
def test_a_bucket_takes_few_kernels_and_little_memory_traffic(spec):
    values = 4 * 1280 * 50
    counted = stages(spec, 4, values).values()
    assert sum(sum(one.kernels.values()) for one in counted) <= 60
    assert sum(one.bytes for one in counted) <= 120 * values


def test_two_bits_and_five_values_a_byte_are_the_same_numbers():
    """What one of them costs in accuracy is what the other one costs."""
    torch.manual_seed(0)
    rows = torch.randn(2, 2560)
    coded = {bits: CODECS[bits].encode(rows.clone()) for bits in ("2", "1.6")}
    assert torch.equal(*(CODECS[bits].decode(one, 2560) for bits, one in coded.items()))
