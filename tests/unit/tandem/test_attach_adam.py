"""`tandem.sync.attach` does not see the optimizer, so it says first what is known of Adam's."""

import contextlib
import io

import pytest
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

from contract import prices
from tandem import sync
from tests.trainer_ranks import run_ranks
from tests.unit.tandem import loop


def told(spec):
    """What this rank is told on stderr."""
    loop.joined()
    model = DistributedDataParallel(Linear(2, 2))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        sync.attach(model, spec)
    return said.getvalue()


@pytest.mark.parametrize("spec", ["ef:1.6", "fp16"])
def test_rank_0_is_told_what_a_strategy_lost_with_adam(spec):
    first, second = run_ranks([1, 1], told, spec)
    assert second == ""
    lines = first.splitlines()
    assert len(lines) == (spec == "ef:1.6")
    assert all(str(prices.WITH_ADAM[spec]) in line for line in lines)
