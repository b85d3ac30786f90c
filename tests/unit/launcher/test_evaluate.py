"""`make evaluate`: real guards and processes, a stand-in for torch and the trainer."""

import csv
import json
import os

import pytest

from contract import seal
from contract.options import Config
from launcher import cli, evaluate, folders
from launcher.look import OpenMachines
from launcher.options import document
from launcher.participants import Participants
from launcher.plan.checks import ReadyRun
from launcher.program import Needs
from launcher.programs import build_program
from report.__main__ import main as report_main
from tests.unit.launcher.launcher_values import facts
from tests.unit.report.report_runs import RunBuilder

pytestmark = pytest.mark.usefixtures("settles_soon")
RUN = "20261122T130000Z-resnet50-2n"
TRAINER = {"model": "resnet50", "lr": 0.5, "eval_resize": 40, "epochs": 3}
FIGURES = {"images": 8, "top1": 0.75, "top5": 1.0, "loss": 0.5}
# Writes the evaluation, with what it was called with as the model's name.
EVALUATES = """
import json, os, sys
given = json.loads(sys.argv[-1])
document = {document!r}
if os.environ["RANK"] == "0":
    folder = os.environ["TANDEM_OUTPUT"] + "/results"
    os.makedirs(folder)
    given.update(weights=os.environ["TANDEM_WEIGHTS"], data=os.environ["TANDEM_DATA"])
    with open(folder + "/" + given["evaluate"], "w") as file:
        json.dump({{**document, "model": json.dumps(given)}}, file)
"""
WRITTEN = {
    "model": "", "data": "digits", "precision": "fp32", "image_size": 40, "unreadable": 1,
    **FIGURES, "classes": [{"name": f"c{n}", **FIGURES, "top1": n / 20} for n in range(12)],
    "confused": [{"name": "c0", "predicted": "=c1", "images": 2}],
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch, local_hosts):
    """run(script) makes two machines, and a run that has ended, whose folder it returns."""
    monkeypatch.setattr(folders, "RUNS", tmp_path / "runs")

    def make(script, **plan):
        hosts = local_hosts(script, (1, 2))
        port = 29430 + 2 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        known = {
            one.name: facts(n, machine="one", interfaces={}, free_ports=[port])
            for n, one in enumerate(hosts, 1)
        }

        def check(config, terminal, waiter):
            nodes = {one.name: one.engine.node(one) for one in hosts}
            asked = Needs(config, build_program(config))
            return ReadyRun(asked, OpenMachines(hosts, nodes, known), Participants(hosts, config))

        monkeypatch.setattr(evaluate, "check_machines", check)
        folder = RunBuilder(tmp_path / "runs" / RUN, nodes=2, steps=2, epochs=1).write()
        options = document(Config(trainer=TRAINER, nodes=2))
        told = {"options": options, "seal": seal.seal(options), **plan}
        (folder / "plan.json").write_text(json.dumps(told))
        best = folder / "checkpoints/node1/best.pt"
        best.parent.mkdir(parents=True, exist_ok=True)
        best.write_bytes(b"weights")
        return folder

    return make


def carry_out(*words):
    return cli.main(["evaluate", f"RUN={RUN}", "FORCE=1", *words])


def test_a_run_s_best_model_is_evaluated_as_it_was_trained(run, capsys, monkeypatch):
    folder = run(EVALUATES.format(document=WRITTEN))
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert carry_out("DATA=others") == 0
    (results,) = folder.glob("evaluated/*/results")
    assert {path.name for path in results.iterdir()} == {
        *("evaluation.json", "evaluation.html", "classes.csv", "confused.csv")
    }
    given = json.loads(json.loads((results / "evaluation.json").read_text())["model"])
    kept = {name: given[name] for name in TRAINER}
    assert kept == TRAINER and given["image_size"] == 224  # as its ranks recorded
    assert given["weights"].endswith("/best.pt") and given["data"].endswith("/others")
    assert {path: path.read_bytes() for path in before} == before
    said = capsys.readouterr().out
    assert "75.00 % top-1" in said and "10 of 12" in said and "c11" not in said
    assert max(map(len, said[said.index("RESULT") : said.index("Evaluation:")].splitlines())) <= 80
    with (results / "classes.csv").open() as text:
        rows = list(csv.DictReader(text))
    assert [row["class"] for row in rows] == [row["name"] for row in WRITTEN["classes"]]
    page = (results / "evaluation.html").read_text()
    assert "c11" in page and "=c1" in page and "http" not in page


def test_what_a_run_refuses_leaves_nothing_behind(run, capsys):
    folder = run("import sys; print('trainer: --evaluate: no', file=sys.stderr); sys.exit(2)")
    assert carry_out() == 2
    assert "trainer: --evaluate: no" in capsys.readouterr().err
    assert not list(folder.glob("evaluated/*"))
    (folder / "checkpoints/node1/best.pt").unlink()
    for path in folder.glob("checkpoints/*/*"):
        path.unlink()
    assert carry_out() == 2 and "no checkpoint here" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpoints/node1/best.pt", "evaluated"])
def test_a_link_that_leads_out_of_a_run_is_neither_read_nor_written_through(
    run, tmp_path, capsys, name
):
    link, private = run(EVALUATES.format(document=WRITTEN)) / name, tmp_path / "private"
    private.mkdir()
    link.unlink(missing_ok=True)
    link.symlink_to(private)
    assert carry_out() == 2
    assert f"{name} is a link to " in capsys.readouterr().err
    assert not [*private.iterdir()]


def test_the_model_of_somebody_else_s_run_is_code_that_is_named_first(run, capsys):
    folder = run(EVALUATES.format(document=WRITTEN))
    planned = json.loads((folder / "plan.json").read_text())
    planned["options"]["model"] = "evil.py:net"
    (folder / "plan.json").write_text(json.dumps(planned))
    assert carry_out() == 2 and "MODEL=evil.py:net" in capsys.readouterr().err


def test_a_file_that_is_no_evaluation_makes_no_page(tmp_path, capsys):
    (tmp_path / "e.json").write_text(json.dumps({**WRITTEN, "top1": 2}))
    assert report_main(["evaluation", str(tmp_path / "e.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["e.json"]
