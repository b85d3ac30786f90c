"""What is taken where nobody names a strategy: of those whose label covers the run, the most exact
that is nearly the fastest."""

import pytest

from contract import prices
from contract.strategies import parse

SAFE = {"seeds": 9, "difference": 0.0, "low": -0.2, "high": 0.2, "samples": None}
OPEN = {"seeds": 2, "difference": 0.0, "low": -2.0, "high": 2.0, "samples": None}


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({"allreduce": 100, "bf16": 50, "ef:3": 40}, "ef:3"),
        ({"allreduce": 100, "bf16": 41, "ef:3": 40}, "bf16"),
        ({"allreduce": 41.9, "bf16": 41, "ef:3": 40}, "allreduce"),
        ({"allreduce": 42.1, "bf16": 41, "ef:3": 40}, "bf16"),
        ({"bf16": 41, "fp16": 40}, "fp16"),  # as many bits
    ],
)
def test_the_most_exact_within_a_twentieth_of_the_fastest_is_taken(seconds, taken):
    assert prices.most_exact(seconds, parse) == taken


@pytest.mark.parametrize(
    ("spec", "family", "steps", "covered"),
    [
        ("allreduce", prices.ADAM, 1, True),
        ("bf16", prices.SGD, 1000, True),
        ("bf16", prices.SGD, None, True),
        ("bf16", prices.SGD, 999, False),
        ("bf16", prices.ADAM, 1000, False),
        ("fp16", prices.SGD, 1000, False),
        ("ef:5", prices.SGD, 1000, False),
    ],
)
def test_a_label_covers_its_optimizers_and_runs_as_long(monkeypatch, spec, family, steps, covered):
    found = {"task": {"steps": 1000}, "strategies": {"bf16": SAFE, "fp16": OPEN}}
    monkeypatch.setattr(prices, "read_prices", lambda: found)
    assert prices.is_acceptable(parse(spec), family, steps) is covered
