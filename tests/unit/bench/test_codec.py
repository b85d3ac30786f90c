"""What coding a bucket would cost a GPU does not grow unseen."""

import pytest

from bench.codec import SHOWN, stages
from contract.strategies import UNIT


@pytest.mark.parametrize("spec", SHOWN)
def test_a_bucket_takes_few_kernels_and_little_memory_traffic(spec):
    values = 4 * UNIT * 20
    counted = stages(spec, 4, values).values()
    own = spec.endswith("own")  # its packing costs ten, and saves more: see bench/pipeline.py
    assert sum(sum(one.kernels.values()) for one in counted) <= (70 if own else 60)
    assert sum(one.bytes for one in counted) <= (245 if own else 120) * values
