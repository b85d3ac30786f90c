"""What a strategy costs in accuracy, as a label."""

import re
from pathlib import Path

import pytest

from contract import prices, strategies
from contract.prices import AccuracyCost

PAGE = Path(__file__).parents[3] / "docs/slow-networks.md"


@pytest.mark.parametrize(
    ("price", "label"),
    [
        (AccuracyCost(), "not measured"),
        (AccuracyCost(3, -0.05, -0.3, 0.2), "safe"),
        (AccuracyCost(3, -0.05, -0.31, 0.2), "unsettled"),
        (AccuracyCost(1, 0.1), "unsettled"),
        (AccuracyCost(3, -2.0, -3.0, -1.0, 1.4), "costs samples"),
        (AccuracyCost(3, -2.0, -3.0, -1.0), "experimental"),
        # Safe although it surely loses something: that is what 0.3 points are for.
        (AccuracyCost(20, -0.1, -0.2, -0.05), "safe"),
    ],
)
def test_a_label_follows_from_the_interval(price, label):
    assert price.label == label


@pytest.mark.parametrize(
    ("percent", "label"), [(1.5, "safe"), (1.6, "experimental"), (None, "unsettled")]
)
def test_with_adam_a_language_model_s_loss_decides_as_well(monkeypatch, percent, label):
    cost = AccuracyCost(12, -0.1, -0.2, 0.1)._asdict()
    known = {"adam": {"ef:5:own": cost}, "text": {} if percent is None else {"ef:5:own": percent}}
    monkeypatch.setattr(prices, "read_prices", lambda: known)
    assert prices.label_of(strategies.parse("ef:5"), prices.ADAM) == label


def test_the_page_says_what_the_table_says():
    told = {spec: AccuracyCost(**one) for spec, one in prices.read_prices()["strategies"].items()}
    assert all(strategies.parse(spec).spec == spec and told[spec].seeds for spec in told)
    labels = {spec: prices.label_of(strategies.parse(spec)) for spec in told}
    page = PAGE.read_text(encoding="utf-8").split("<!-- accuracy -->")[1].split("<!-- end")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \| ([+-][\d.]+) \| .* \| ([a-z ]+)[,|]", page, re.M)
    said = {spec: (int(seeds), float(mean), label.strip()) for spec, seeds, mean, label in rows}
    assert said == {
        spec: (price.seeds, float(f"{price.difference:.2f}"), labels[spec])
        for spec, price in told.items()
    }


@pytest.mark.parametrize(
    ("spec", "optimizer", "steps", "said"),
    [
        ("ef:5", "sgd", 1000, 0),
        ("ef:5", "sgd", 640, 1),
        ("ef:3", "sgd", 1000, 1),  # not safe on the second task
        ("allreduce", "adam", 1, 0),
        ("ef:255", "sgd", 1000, 1),  # not measured
    ],
)
def test_a_run_unlike_those_that_were_measured_is_told(spec, optimizer, steps, said):
    assert len(list(prices.caveats(strategies.parse(spec), optimizer, steps))) == said
