"""`make plan GPU=...`: what `make train` would take, and would reach, on such machines."""

import pytest

from contract import prices
from contract.strategies import Phases, parse
from launcher import cli
from report import formulas
from report.measurements import on_paper
from report.predict import fastest, predict


@pytest.mark.parametrize(
    ("gpu", "level"), [("1080ti", "fp32"), ("titanv", "O1"), ("2080ti", "O1"), ("3090", "bf16")]
)
def test_its_precision_is_that_of_make_train_unless_another_is_asked_for(gpu, level):
    assert on_paper(gpu, "resnet50", None).precision == level
    assert on_paper(gpu, "resnet50", "fp32").precision == "fp32"


def test_the_fastest_is_who_has_all_reduces_accuracy_first(monkeypatch):
    """ef:3 has more images/s there; here it takes 1.25 times as many."""
    real, costs = prices.price_of, prices.Price(9, -1.0, -1.5, -0.5, 1.25)
    monkeypatch.setattr(
        prices, "price_of", lambda one, *more: costs if one.spec == "ef:3" else real(one, *more)
    )
    basis, rate = on_paper("2080ti", "resnet50", None), formulas.goodput(1000)
    rows = predict(basis, 4, lambda _: rate, parse("allreduce"), Phases(90))
    thin = next(row for row in rows if (row.sync, row.nodes) == ("ef:3", 4))
    assert fastest(rows).sync == "ef:5"
    assert fastest(rows).run_images_per_second < thin.run_images_per_second


@pytest.mark.parametrize(("optimizer", "sync"), [("sgd", "ef:15"), ("adamw", "ef:5")])
def test_it_recommends_nothing_that_loses_with_the_runs_optimizer(capsys, optimizer, sync):
    """ef:15 is safe with SGD alone."""
    words = ["plan", "--gpu", "3090", "--link", "10gbit", "--", "--optimizer", optimizer]
    assert cli.main(words) == 0
    assert f"Best (*): 4 nodes with sync {sync}" in " ".join(capsys.readouterr().out.split())
