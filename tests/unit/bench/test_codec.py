"""What coding a bucket would cost a GPU does not grow unseen."""

import pytest

from bench.codec import SHOWN, stages
from contract.strategies import UNIT


@pytest.mark.parametrize("spec", SHOWN)
def test_a_bucket_takes_few_kernels_and_little_memory_traffic(spec):
    values = 4 * UNIT * 20
    counted = stages(spec, 4, values).values()
    assert sum(sum(one.kernels.values()) for one in counted) <= 60
    assert sum(one.bytes for one in counted) <= (240 if spec.endswith("own") else 120) * values
