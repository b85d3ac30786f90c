"""`tandem.sync.attach` takes a scale by the optimizer, and says which where it cannot know."""

import contextlib
import io

import pytest
import torch
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

from contract import prices
from contract.strategies import parse
from tandem import sync
from tests.trainer_ranks import run_ranks
from tests.unit.tandem import loop


class Own(torch.optim.SGD):
    """Somebody's, made from a known one."""


class Lion(torch.optim.Optimizer):
    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})


def told(spec, kind):
    """What is carried out, and what this rank is told on stderr."""
    loop.joined()
    model = DistributedDataParallel(Linear(2, 2))
    optimizer = None if kind is None else kind(model.parameters(), lr=0.1)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        attached = sync.attach(model, spec, optimizer=optimizer)
    return attached.effective_spec, said.getvalue()


@pytest.mark.parametrize(
    ("spec", "kind", "effective_spec", "lines"),
    [
        ("ef:5", torch.optim.AdamW, "ef:5:own", 1),  # what it lost with Adam
        ("ef:5", Own, "ef:5:peak", 0),
        ("ef:5", Lion, "ef:5:own", 2),
        ("ef:5", None, "ef:5:own", 2),
        ("ef:5:peak", None, "ef:5:peak", 1),
        ("fp16", None, "fp16", 0),
    ],
)
def test_it_goes_by_the_optimizer_and_rank_0_says_once_what_it_cannot_know(
    spec, kind, effective_spec, lines
):
    (first, said), (second, nothing) = run_ranks([1, 1], told, spec, kind)
    assert (first, second, nothing) == (effective_spec, effective_spec, "")
    assert len(said.splitlines()) == lines
    assert kind is not Lion or "Lion" in said
    assert not spec.endswith("peak") or prices.with_adam(parse(spec)) in said
