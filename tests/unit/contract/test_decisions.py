"""What the ranks decide together: batches by speed (BALANCE=) and the strategy of SYNC=auto."""

import json
import time

import pytest

from contract import prices, runs
from contract.decisions import (
    Measurements,
    choose_balance,
    choose_sync,
    find_prediction,
    read_balance,
    warn_if_slower,
)
from contract.errors import UserError
from contract.options import Options

NAMES = ("node1", "node2", "node3")
HOSTS = {name: f"machine of {name}" for name in NAMES}
SPEEDS = {"node1": 100.0, "node2": 50.0, "node3": 99.0}
SAFE = {"seeds": 9, "difference": 0.0, "low": -0.2, "high": 0.2, "samples": None}
UNSETTLED = {"seeds": 2, "difference": 0.0, "low": -2.0, "high": 2.0, "samples": None}


def weights_for(**changes):
    measured = {"hosts": HOSTS, "speeds": SPEEDS, "balance": "auto", **changes}
    return dict(choose_balance(Measurements(**measured)).weights)


def test_batches_follow_the_measured_speeds():
    assert weights_for() == {"node1": 1000, "node2": 500, "node3": 990}


@pytest.mark.parametrize(
    "changes",
    [
        {"speeds": {**SPEEDS, "node2": 91.0}},  # nearly equal
        {"speeds": {"node1": 100.0, "node3": 9.0}},  # node2 is not known
        {"hosts": dict.fromkeys(NAMES, "one machine")},
        {"hosts": {"node1": "machine"}},
        {"balance": "off"},
        {"decided": {"balance": dict.fromkeys(NAMES, 1)}},  # the run began with equal batches
    ],
)
def test_batches_are_equal_if_speeds_are_equal_unknown_or_shared(changes):
    assert weights_for(**changes) == {}


def test_a_run_that_continues_keeps_its_batches_on_the_same_machines():
    before = {"node1": 1, "node2": 1, "node3": 7}
    assert weights_for(decided={"balance": before}) == before
    two = {name: HOSTS[name] for name in NAMES[1:]}
    assert weights_for(decided={"balance": before}, hosts=two) == {"node2": 505, "node3": 1000}


def test_weights_that_the_user_gave_are_of_machines_by_their_names():
    asked = read_balance("3:2:1", NAMES)
    assert weights_for(balance=asked, decided={"balance": dict.fromkeys(NAMES, 1)}) == asked
    assert weights_for(balance=asked, hosts={"node2": "a", "node3": "b"}) == {
        "node2": 2,
        "node3": 1,
    }


@pytest.mark.parametrize("asked", ["3:2", "3:2:0", "3:2:9000000", "³:2:1", ""])
def test_a_malformed_balance_is_rejected_by_its_name(asked):
    with pytest.raises(UserError, match=f"^BALANCE={asked}"):
        read_balance(asked, NAMES)


@pytest.fixture
def labels(monkeypatch):
    strategies = {"ef:255:peak": SAFE, "ef:15:peak": SAFE, "ef:5:peak": UNSETTLED}
    table = {"task": {"steps": 1000}, "strategies": strategies}
    monkeypatch.setattr(prices, "read_prices", lambda: table)


@pytest.mark.parametrize(
    ("exact", "ef255", "ef15", "chosen"),
    [
        (100, 200, 300, "ef:15"),
        (100, 50, 90, "allreduce"),
    ],
)
def test_sync_auto_takes_the_most_exact_of_the_fastest_safe_strategies(
    labels, exact, ef255, ef15, chosen
):
    speeds = {("allreduce", 4): exact, ("ef:255", 4): ef255, ("ef:15", 4): ef15, ("ef:5", 4): 500}
    speeds[("ef:15", 2)] = 9000
    assert choose_sync(runs.Prediction(1.0, speeds), 4, prices.SGD, "").sync == chosen


def test_sync_auto_is_exact_without_a_prediction_and_names_the_command_that_makes_one(labels):
    choice = choose_sync(None, 2, prices.SGD, "`make plan NODES=2` makes one")
    assert choice.sync == "allreduce" and "`make plan NODES=2`" in choice.reason


def measured_with(speeds, setting):
    rows = [{"nodes": n, "sync": spec, "images_per_second": v} for (spec, n), v in speeds.items()]
    text = runs.prediction_text(setting, 2, time.time(), rows)
    return Measurements(prediction=json.loads(text))


def test_a_prediction_is_of_a_whole_run_and_warns_of_one_that_is_slower_than_one_machine(labels):
    setting = runs.Setting("resnet18", 32, 224, "fp32", ("node1", "node2"))
    speeds = {("allreduce", 1): 50.0, ("allreduce", 2): 40.0, ("ef:15:peak", 2): 90.0}
    measured = measured_with(speeds, setting)
    # The first of 16 epochs is exact, at 40 images/s.
    options = Options(epochs=16, sync_warmup=1.0)
    prediction = find_prediction(measured, setting, options.phases)
    assert prediction.speed("ef:15:peak", 2) == pytest.approx(1 / (1 / 40 / 16 + 15 / 16 / 90))
    assert warn_if_slower(prediction, 2, "ef:15", prices.SGD) is None
    assert "SYNC=ef:15:peak would give" in warn_if_slower(prediction, 2, "allreduce", prices.SGD)
    assert warn_if_slower(None, 2, "allreduce", prices.SGD) is None
