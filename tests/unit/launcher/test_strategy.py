"""SYNC=auto: what it becomes, and that this is kept."""

import io

import pytest

from contract import prices, runs
from contract.runs import prediction_path
from launcher import folders, look
from launcher.look import OpenMachines
from launcher.machines import inventory
from launcher.options import config_of
from launcher.plan import checks, predictions
from launcher.terminal import Terminal
from tests.unit.launcher.launcher_values import facts, gpus, host, sent_to_trainer

SAFE = {"seeds": 9, "difference": 0.0, "low": -0.2, "high": 0.2, "samples": None}
OPEN = {"seeds": 2, "difference": 0.0, "low": -2.0, "high": 2.0, "samples": None}


@pytest.fixture(autouse=True)
def table(monkeypatch):
    found = {"ef:255:peak": SAFE, "ef:15:peak": SAFE, "ef:5:peak": OPEN}
    told = {"task": {"steps": 1000}, "strategies": found}
    monkeypatch.setattr(prices, "read", lambda: told)


@pytest.mark.parametrize(
    ("exact", "ef255", "ef15", "chosen", "why"),
    [
        (100, 200, 300, "ef:15", "300 images/s by make plan, 100 with allreduce; safe"),
        (100, 290, 300, "ef:255", "290 images/s by make plan, 300 with ef:15, 100 with allreduce"),
        (100, 50, 104, "allreduce", "100 images/s by make plan, 104 with ef:15"),
        (100, 50, 90, "allreduce", "no strategy that was measured as safe is faster"),
    ],
)
def test_the_most_exact_of_the_fastest_safe_ones_is_taken(exact, ef255, ef15, chosen, why):
    speeds = {("allreduce", 4): exact, ("ef:255", 4): ef255, ("ef:15", 4): ef15, ("ef:5", 4): 500}
    speeds[("ef:15", 2)] = 9000
    choice = predictions.choose_sync(speeds, 4, "make plan")
    assert choice.sync == chosen
    assert why in choice.why


@pytest.fixture
def ready(monkeypatch, tmp_path):
    """ready(images/s by spec, of two machines) -> (what is prepared, what was said)."""

    def make(speeds, **options):
        rows = [{"nodes": 2, "sync": spec, "images_per_second": v} for spec, v in speeds.items()]
        alone = {"nodes": 1, "sync": "allreduce", "images_per_second": 50}
        measured = runs.Setting("resnet18", 32, 224, "fp32")
        if speeds:
            told = runs.prediction_text(measured, 2, None, [alone, *rows])
            prediction_path(tmp_path, "resnet18", 2).write_text(told)
        said = io.StringIO()
        return checks.check_machines(config_of(options), Terminal(said)), said

    def answers(hosts, _asked, **_):
        return OpenMachines(
            hosts, {}, {h.name: facts(i, gpus=gpus(1)) for i, h in enumerate(hosts, 1)}
        )

    monkeypatch.setattr(folders, "RUNS", tmp_path)
    monkeypatch.setattr(inventory, "load", lambda _path: [host(1), host(2)])
    monkeypatch.setattr(look, "open_and_probe", answers)
    monkeypatch.setattr(look, "unreachable_pairs", lambda *_: {})
    return make


def test_auto_is_settled_before_anything_starts_and_stands_in_the_plan(ready):
    checked, said = ready({"allreduce": 40, "ef:15": 90}, sync="auto", precision="fp32", epochs=16)
    plan = checks.make_plan(checked, checked.machines, run="r")
    assert (plan.sync, plan.options.trainer["sync"]) == ("ef:15", "ef:15")
    assert plan.sync_why.startswith("83 images/s")  # of 16 epochs the first is at 40
    sent = sent_to_trainer(plan.nodes[0])
    assert sent["sync"] == "ef:15" and "auto" not in sent.values()
    checked.machines.close()
    assert "sync ef:15: 83 images/s" in said.getvalue()


@pytest.mark.parametrize(
    ("epochs", "more", "said"),
    [
        (1, (), "(epochs 1, exact sums in the first 1)"),
        (3, ("--sync_warmup", "4"), "first 4"),
        (2, (), ""),
    ],
)
def test_a_run_that_is_all_warm_up_says_so_before_it_starts(ready, epochs, more, said):
    checked, _ = ready({}, sync="ef:3", precision="fp32", epochs=epochs, args=list(more))
    told = checked.workload.warnings(checked.machines.hosts)
    assert [said in one for one in told] == [True] * bool(said)
    checked.machines.close()


def test_without_an_earlier_run_it_is_exact(ready):
    checked, said = ready({}, sync="auto")
    assert checked.workload.settings.sync == "allreduce"
    command = "`make plan NODES=2 MODEL=resnet18 BATCH=32 PRECISION=O1`"
    assert "make plan knows no such run yet" in said.getvalue() and command in said.getvalue()
