"""Whether the report's verdict is right: faults are made on four machines of a lab while they
train, and each is told from the records of its time alone. Writes the confusion matrix into
docs/report.md; three quarters of an hour, or less, and nothing written, with
VERDICT_RUNS="timed disk".

The faults, their strengths and their order are those of trials.py, the thresholds those of
report/bottleneck.py: both were there before the first run. The machines come before what else this
machine does (a cgroup's share of the processors): real ones share none.
"""

import json
import os
import uuid

import pytest

from bench.verdict.trial_run import CHECKOUT, SETTINGS, Cluster, TrialRun, part
from bench.verdict.trials import FAULTS, RUNS, Outcome, matrix
from lab.plan import CACHE, RELEASES
from report.analysis import analyse
from tests.unit.report.report_runs import RunBuilder
from tests.unit.report.test_recorded_machines import TRIALS as RECORDED
from tests.unit.report.test_recorded_machines import record

CHOSEN = os.environ.get("VERDICT_RUNS", " ".join(RUNS)).split()
RIGHT = 38  # of 40
WRONG = 2  # times at most `make status` may be
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->\n"
ENVIRONMENT = "ls -d /opt/tandem/envs/cpu-*/bin/python | head -1"
OF_NETWORK = ("network", "slow_link")


@pytest.fixture(scope="module")
def cluster(start_lab, tmp_path_factory):
    made = any((CACHE / "envs" / RELEASES[0]).glob("cpu-*/bin/python"))  # by an earlier lab
    lab = start_lab("verdict", "--nodes", "4", *(["--no-bundle"] if made else []))
    if not made:
        lab.control("ansible-playbook", "site.yml")
    made = Cluster(lab, lab.ssh(1, ENVIRONMENT).strip(), tmp_path_factory.mktemp("verdict"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def outcomes():
    """The outcomes of all trials."""
    return []


@pytest.mark.parametrize("name", CHOSEN)
def test_each_trial_has_its_verdict(cluster, outcomes, tmp_path, name):
    """Which it is is judged of all together, below."""
    cluster.prepare(SETTINGS[name].data)
    run = TrialRun(cluster, tmp_path / "run", f"TANDEM_TEST_MARK={uuid.uuid4().hex}", name)
    try:
        run.begin()
        trials = list(run.carry_out())
        run.finish()
        for place, (trial, begin, end, status) in enumerate(trials):
            analysis = analyse(part(run.folder, begin, end, tmp_path / f"part{place}"))
            answer = "too short" if analysis.too_short else analysis.summary["bottleneck"]
            outcomes.append(Outcome(trial.fault, FAULTS[trial.fault].verdict, answer, status))
            print(trial, answer, status, analysis.verdict and analysis.verdict.headline, flush=True)
    finally:
        run.close()


@pytest.mark.parametrize(("machines", "steps", "cause"), RECORDED)
def test_what_a_lab_does_not_have_is_recorded(
    outcomes, tmp_path, monkeypatch, machines, steps, cause
):
    """Judged with the others, below."""
    run = RunBuilder(tmp_path / "run", **steps).write()
    for node in range(1, 5):
        path = run / f"nodes/node{node}/machine.1.jsonl"
        path.unlink()
        record(path, machines.get(f"node{node}", "quiet"), monkeypatch)
    outcomes.append(Outcome("recorded", cause, analyse(run).summary["bottleneck"], None))


def write_matrix(outcomes):
    """Between its marks."""
    path = CHECKOUT / "docs/report.md"
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(f"{before}{BEGIN}{matrix(outcomes)}{END}{rest.partition(END)[2]}")


def test_they_are_right(outcomes):
    print(matrix(outcomes))
    (CHECKOUT / "runs").mkdir(exist_ok=True)
    (CHECKOUT / "runs/verdicts.json").write_text(json.dumps(outcomes))
    blamed = [
        outcome
        for outcome in outcomes
        if outcome.verdict in OF_NETWORK and outcome.report == "compute"
    ]
    assert blamed == []
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    if list(RUNS) == CHOSEN:
        write_matrix(outcomes)
        assert len(outcomes) - len(wrong) >= RIGHT, wrong
        late = [outcome for outcome in outcomes if not outcome.status_is_right]
        assert len(late) <= WRONG, late
