"""What to do: one model for all of it. tests/messages/report.txt has each remedy with its gain, the
order and the commands."""

import dataclasses
import shlex

import pytest

from contract import prices
from report.advice import (
    NONE,
    Situation,
    advise,
    calibrate,
    family_of,
    loading,
    twice_the_batch,
    waiting,
)
from report.analysis import analyse
from report.formulas import sync_wait
from report.measure import real_rate
from report.uses import Uses
from tests.unit.report.report_runs import (
    BOTTLENECKS,
    STEP,
    WARMED,
    RunBuilder,
    change,
    change_lines,
)

NOW = Situation(
    images=100, work=0.1, data=0.01, loader=0.0, network=0.5, peers=0.0, saving=0.2
)  # fmt: skip


def advised(folder, options=None, **settings):
    run = RunBuilder(folder / "run", **settings).write()
    change(run / "plan.json", options=options or {"model": "resnet50", "trainer": ["--lr=1"]})
    return analyse(run)


def test_now_and_gains_are_of_one_model(tmp_path):
    """Where the rate was bounded, the formula's wait for this very run is not what was measured:
    half as many bytes then halve the wait that was measured."""
    step = advised(tmp_path, **BOTTLENECKS["network"]).step
    bounded = dataclasses.replace(step, rate=2 * step.rate)
    formula = bounded.wait(step.strategy, step.nodes, bounded.rate)
    assert formula < 0.6 * step.network
    assert calibrate(bounded, formula) == pytest.approx(step.network)
    assert calibrate(bounded, formula / 2) == pytest.approx(step.network / 2)
    now = advise(bounded, "network", {}, Uses()).now
    assert now == pytest.approx(step.images_per_second)
    # What processes of one machine wait for is no matter of its card, whatever its counters saw.
    inner = dataclasses.replace(step, nodes=1, world=4, network=0.1, rate=None)
    assert real_rate(inner, []) is None
    assert not any("SYNC" in one.change for one in advise(inner, "network", {}, Uses()).remedies)
    assert advise(None, "none", {}, Uses()) == NONE


def test_an_optimizer_that_is_no_name_ends_no_report(tmp_path):
    step = advised(tmp_path, **BOTTLENECKS["network"]).step
    assert family_of(step, {"options": {"optimizer": ["adamw"]}}) == prices.SGD


def test_a_step_waits_for_the_slower_of_loader_and_all_else():
    assert NOW.seconds == pytest.approx(0.81)
    late = Situation(images=100, work=0.1, data=0.0, loader=1.0, network=0.5, peers=0.0, saving=0.0)
    assert waiting(0.0)(late).seconds == 1.0  # a faster network is no use to a late loader
    assert loading(4)(late).seconds == pytest.approx(0.6)
    assert waiting(0.0)(loading(4)(late)).seconds == pytest.approx(0.25)
    assert twice_the_batch(NOW).images_per_second == pytest.approx(200 / 1.12)


def test_predictions_are_what_can_be_counted_by_hand(tmp_path, monkeypatch):
    safe = {"seeds": 9, "difference": 0.0, "low": -0.1, "high": 0.1}
    told = {"task": {"steps": 1000}, "strategies": {"ef:3:peak": safe, "bf16": safe}}
    monkeypatch.setattr(prices, "read", lambda: told)
    network = advised(tmp_path / "network", **BOTTLENECKS["network"])
    gains = {
        one["change"].split(": ")[0]: one["predicted_images_per_second"]
        for one in network.summary["advice"]
    }
    assert gains["NODES=1"] == pytest.approx(32 / 0.128, rel=0.01)
    step = network.step
    waited = sync_wait(step.strategy, 4, step.payload, step.rate, step.backward)
    assert waited == pytest.approx(1.2, rel=0.01)
    # The fewest bits: 1.6 and a sixteenth of 32, and a last bucket of 8 MiB that nothing hides.
    least = (1.2 + 0.08) * (1.6 + 1 / 16) / 32
    waited = max(least - 0.08, least * (8 << 20) / step.payload.bytes)
    assert gains["SYNC=ef:3"] == pytest.approx(128 / (0.128 + waited), rel=0.01)
    unlike = advised(tmp_path / "unlike", **BOTTLENECKS["straggler"])
    (balance,) = [one for one in unlike.summary["advice"] if "BALANCE" in one["change"]]
    assert "BALANCE=auto" in shlex.split(balance["command"])
    # One that had asked for it, when nobody had measured these machines, is told what it lacked.
    asked = {"model": "resnet50", "balance": "auto"}
    again = advised(tmp_path / "again", asked, **BOTTLENECKS["straggler"]).summary["advice"]
    again = [one["change"] for one in again]
    assert not any("BALANCE" in one for one in again)
    assert any(one.startswith("start it again: each machine's images") for one in again)
    # Three machines need 0.128 s for 32 images and one 0.278 s; 10 ms are the network's.
    alone = 128 / (3 * 32 / 0.128 + 32 / 0.278)
    assert balance["predicted_images_per_second"] == pytest.approx(128 / (alone + 0.01), rel=0.02)


def test_advice_counts_the_warm_up_of_a_run_as_long(tmp_path):
    """A strategy that begins after half of the run makes it at most twice as fast."""
    builder = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"])
    builder.warmup = 1.0
    (sync,) = (
        one for one in analyse(builder.write()).summary["advice"] if "SYNC=" in one["change"]
    )
    exact = sum({**STEP, **BOTTLENECKS["network"]["step"]}.values())
    assert 128 / exact < sync["predicted_images_per_second"] < 2 * 128 / exact


def test_a_run_that_was_all_warm_up_counts_as_exact_sums(tmp_path):
    """Bytes, link and advice were those of a strategy that had never begun: `NODES=3` would have
    been eleven times as fast, and SYNC=ef:5 the remedy."""
    done = advised(tmp_path, exact=240, **WARMED)
    assert done.summary["bytes_sent_per_step"] == pytest.approx(153.4e6, rel=0.05)
    assert done.step.rate * 8 / 1e6 == pytest.approx(950, rel=0.06)
    half = advised(tmp_path / "half", steps=400, exact=100, **WARMED)
    assert half.step.network == pytest.approx(0.005, rel=0.01)
    assert half.summary["bytes_sent_per_step"] == pytest.approx(8e6, rel=0.05)
    warm = sum(STEP.values()) - STEP["sync_exposed"] + 1.2
    assert half.step.warm_seconds == pytest.approx(warm, rel=0.01)
    assert half.hundred_epochs < 100 * 200 * 0.2 + 100 * warm + 1000


@pytest.mark.parametrize(
    ("workers", "busy", "typed"),
    [(4, 3.0, "--workers 8"), (4, 7.0, None), (0, 5.0, "--workers 3"), (0, 7.9, None)],
)
def test_loader_processes_are_advised_where_processors_are_idle(tmp_path, workers, busy, typed):
    run = RunBuilder(tmp_path, **{**BOTTLENECKS["data_decode"], "machine": {"busy": busy}}).write()
    for path in run.glob("nodes/*/rank*.jsonl"):
        change_lines(
            path, lambda line: {**line, "workers": workers} if line["kind"] == "start" else line
        )
    remedies = analyse(run).advice.remedies
    assert [" ".join(one.args) for one in remedies if "--workers" in one.args] == (
        [typed] if typed else []
    )
