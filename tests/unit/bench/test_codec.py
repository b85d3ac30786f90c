"""What coding a bucket would cost a GPU does not grow unseen."""

import pytest

from bench.codec import stages


@pytest.mark.parametrize("spec", ["ef:1.6", "ef:2", "ef:4", "ef:8"])
def test_a_bucket_takes_few_kernels_and_little_memory_traffic(spec):
    values = 4 * 1280 * 50
    counted = stages(spec, 4, values).values()
    assert sum(sum(one.kernels.values()) for one in counted) <= 60
    assert sum(one.bytes for one in counted) <= 120 * values
