"""What is known of a strategy with SGD does not count for a run with Adam, wherever it is asked."""

import subprocess
from types import SimpleNamespace

import pytest

from boundary.run_files import RankStart
from contract import prices, runs, strategies
from contract.decisions import choose_sync
from contract.options import Options
from launcher import cli, measure
from report.advice import advise
from report.analysis import analyse
from report.usage import ResourceUsage
from tests.unit.report.report_runs import BOTTLENECKS, SCRIPT, RunBuilder, change
from trainer import banner
from trainer.models import Cost

# Of which one strategy is safe, with SGD alone.
SAFE = {"seeds": 9, "difference": 0.0, "low": -0.1, "high": 0.1}
TABLE = {"task": {"steps": 1000}, "strategies": {"bf16": SAFE}}


@pytest.mark.parametrize(("optimizer", "taken"), [("sgd", "bf16"), ("adamw", "allreduce")])
def test_auto_takes_what_is_safe_with_the_run_s_optimizer(monkeypatch, optimizer, taken):
    monkeypatch.setattr(prices, "read_prices", lambda: TABLE)
    speeds = {("allreduce", 4): 100.0, ("bf16", 4): 150.0}
    family = Options(optimizer=optimizer).family
    assert choose_sync(runs.Prediction(1.0, speeds), 4, family, "").sync == taken


def test_beside_advice_for_a_script_stands_the_loss_with_adam(tmp_path, monkeypatch):
    """Whose optimizer nobody knows."""
    monkeypatch.setattr(prices, "read_prices", lambda: TABLE)
    folder = RunBuilder(tmp_path / "run", **BOTTLENECKS["network"]).write()
    change(folder / "plan.json", program=SCRIPT)
    own = analyse(folder).step
    told = [one.change for one in advise(own, "network", RankStart(), ResourceUsage()).remedies]
    (sync,) = [change for change in told if "tandem.sync.attach" in change]
    assert prices.with_adam(strategies.parse("bf16")) in sync


def test_a_plan_is_asked_for_with_the_optimizer_of_the_run(monkeypatch):
    asked = []

    def report(words):
        asked.extend(words)
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(measure, "run_report_plan", report)
    assert cli.main(["plan", "--model", "resnet50", "--", "--optimizer", "adamw"]) == 0
    assert asked[asked.index("--optimizer") + 1] == "adamw"


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        ("ef:3:peak", prices.with_adam(strategies.parse("ef:3:peak"))),
        ("ef:5", "--sync ef:5 is ef:5:own with --optimizer adamw"),
    ],
)
def test_the_first_lines_of_a_run_say_what_its_strategy_is_and_lost_with_adam(sync, said):
    options = Options(sync=sync, optimizer="adamw", output="x")
    world = SimpleNamespace(size=2, nodes=(0, 1), batches=(16, 16), global_batch=32)
    job = SimpleNamespace(
        options=options,
        world=world,
        image_size=32,
        micro_batches=1,
        steps_per_epoch=100,
        train_set=type("Images", (list,), {"classes": ("a", "b")})(range(64)),
    )
    assert said in banner.describe_run(job, Cost(1000, None))
