"""When a prediction is valid: what `make plan` writes (report/), as a run reads it (launcher/)."""

import contextlib
import json
import time
from dataclasses import replace

import pytest
from hypothesis import example, given

from contract.decisions import Measurements, choose_sync, find_prediction, warn_if_slower
from contract.errors import UserError
from contract.prices import SGD
from contract.runs import (
    Setting,
    may_have_trained,
    prediction_path,
    prediction_text,
    read_prediction,
    run_id,
)
from contract.strategies import Phases
from report.__main__ import main
from tests import fuzz
from tests.unit.report.report_runs import RunBuilder

ASKED = Setting("resnet50", 32, 224, "fp32", ("node1", "node2"))
PHASES = Phases(epochs=90, warmup=0.0)


def predicted(folder, asked=ASKED):
    """What a rank is told of such a run by the file in this folder of runs."""
    document = read_prediction(prediction_path(folder, asked.model, len(asked.machines)))
    return find_prediction(Measurements(prediction=document), asked, PHASES)


@pytest.fixture
def runs(tmp_path):
    """A folder of runs with one run of ResNet-50 on four machines."""
    RunBuilder(tmp_path / run_id("resnet50", 4, 1.7e9), nodes=4).write()
    return tmp_path


def plan(runs, *words):
    return main(["plan", "--runs", str(runs), "--model", "resnet50", "--nodes", "2", *words])


def test_what_the_report_wrote_is_what_a_run_is_told(runs, capsys):
    assert plan(runs) == 0
    told = predicted(runs)
    rows = json.loads(prediction_path(runs, "resnet50", 2).read_text())["rows"]
    (row,) = (row for row in rows if (row["nodes"], row["sync"]) == (2, "allreduce"))
    assert told.speed("allreduce", 2) == pytest.approx(row["images_per_second"], abs=0.01)


@pytest.mark.parametrize(
    "other",
    [{"model": "x:resnet50"}, {"batch": 64}, {"precision": "O1"}],
)
def test_it_is_no_prediction_of_another_run(runs, capsys, other):
    plan(runs)
    assert predicted(runs) is not None
    assert predicted(runs, replace(ASKED, **other)) is None


def test_what_was_measured_of_machines_by_themselves_holds_for_them_and_for_a_week(runs):
    measured = Setting("resnet50", 32, 224, "fp32", ("node1", "node2", "node3"))
    rows = [{"nodes": 1, "sync": "allreduce", "images_per_second": 9.0}]
    path = prediction_path(runs, "resnet50", 2)

    def read(unix, asked):
        path.write_text(prediction_text(measured, 2, unix, rows))
        return predicted(runs, asked)

    now = time.time()
    assert read(now, ASKED).speed("ef:15", 1) == 9.0
    assert read(now, replace(ASKED, machines=("node2", "node1"))) is None
    assert read(now - 8 * 86400, ASKED) is None


def test_a_question_about_another_network_is_answered_and_not_kept(runs, capsys):
    """It took the place of what was said of the real one: a run that is slower than one machine was
    not warned of, and its report showed the other network's figure."""
    plan(runs, "--link", "100mbit")
    plan(runs)
    kept = prediction_path(runs, "resnet50", 2).read_text()
    warned = warn_if_slower(predicted(runs), 2, "allreduce", SGD)
    capsys.readouterr()
    assert plan(runs, "--link", "10gbit") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Over a link of 10 Gbit/s" in told and "The next run's report does not use this" in told
    assert prediction_path(runs, "resnet50", 2).read_text() == kept
    assert warn_if_slower(predicted(runs), 2, "allreduce", SGD) == warned


@pytest.mark.parametrize(
    "text",
    ["", "null", "[" * 100_000, '{"measured_unix": 1e999}'],
)
def test_a_damaged_file_predicts_nothing(tmp_path, text):
    prediction_path(tmp_path, "resnet50", 2).write_text(text)
    assert predicted(tmp_path) is None


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("my.module:a-net", "19700101T000000Z-a-net-4n"),  # names of units have no other signs
        ("Net.small", "19700101T000000Z-Net-small-4n"),
    ],
)
def test_a_run_is_found_by_its_model(tmp_path, capsys, model, name):
    assert run_id(model, 4, 0) == name
    assert may_have_trained(name, model)
    assert not may_have_trained(name, "other")
    RunBuilder(tmp_path / name, model=model).write()
    assert main(["plan", "--runs", str(tmp_path), "--model", model]) == 0
    assert f"In run {name}, a step" in " ".join(capsys.readouterr().out.split())


MEASURED = Setting("resnet50", 32, 224, "fp32")
SLOW, FAST = (
    {"nodes": n, "sync": sync, "images_per_second": 9.0}
    for n, sync in ((1, "allreduce"), (2, "ef:15"))
)
DOCUMENT = json.loads(prediction_text(MEASURED, 2, time.time(), [SLOW, FAST]))


@fuzz.many(200)
@example({**DOCUMENT, "rows": [{**SLOW, "images_per_second": "nan"}]})
@given(fuzz.odd(DOCUMENT, ("nan", "ef:15", "-1", 1e-9)))
def test_an_odd_file_is_a_prediction_or_none(tmp_path_factory, document):
    runs = tmp_path_factory.getbasetemp()
    prediction_path(runs, "resnet50", 2).write_text(json.dumps(document))
    if (found := predicted(runs)) is not None:
        with contextlib.suppress(UserError):
            warn_if_slower(found, 2, "allreduce", SGD)
            choose_sync(found, 2, SGD, "make plan")
