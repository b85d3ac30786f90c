"""Runs of a few seconds: the report says that they judge nothing, and what does."""

import json
import shlex

import pytest

from contract.options import DEFAULT_MODEL
from launcher import cli
from report.analysis import analyse
from report.page import render_page
from report.rerun import train_line
from report.text import render_text
from tests.unit.report.report_runs import BOTTLENECKS, RunBuilder
from tools import verbs

STEP = 0.138  # what a step of RunBuilder takes, its exchange included
LONG = 30 / STEP


def run(folder, options=None, **settings):
    made = RunBuilder(folder / "run", **{"steps": 40, **settings})
    made.write()
    if options is not None:
        path = made.folder / "plan.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "options": options}))
    return analyse(made.folder)


@pytest.mark.parametrize("steps", [40, 200, 230, 400])
def test_a_run_is_too_short_below_thirty_seconds_of_measured_steps(tmp_path, steps):
    analysis = run(tmp_path, steps=steps)
    assert (analysis.too_short is not None) == (steps - 1 < LONG)
    text, page = " ".join(render_text(analysis).split()), render_page(analysis)
    for shown in (text, page):
        assert ("too short to judge" in shown) == (steps - 1 < LONG)
        assert ("bottleneck" in shown) == (steps - 1 >= LONG)


def test_the_demos_network_is_followed_by_one_whose_cost_is_that_of_real_work(tmp_path):
    asked = {"inventory": "examples/demo.ini", "model": DEFAULT_MODEL, "data": "digits"}
    analysis = run(tmp_path, {**asked, "trainer": []})
    command = "make train NODES=4 INVENTORY=examples/demo.ini DATA=digits MODEL=resnet50 EPOCHS=10"
    assert analysis.too_short.command == command
    lines = render_text(analysis).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("    make train"))
    assert lines[begin].endswith(" \\") and max(map(len, lines)) <= 80
    pasted = "\n".join(lines[begin : begin + 2]).replace("\\\n", "")
    assert shlex.split(pasted) == shlex.split(command)
    assert f">{command}</pre>" in render_page(analysis)
    assert "only its times count" in analysis.too_short.because


def test_another_run_is_followed_by_the_same_for_longer(tmp_path):
    options = {"model": "resnet50", "data": "my photos", "sync": "bf16", "batch": None}
    analysis = run(tmp_path, {**options, "trainer": ["--lr", "0.2"]}, epochs=2)
    words = shlex.split(analysis.too_short.command)
    assert words[:2] == ["make", "train"]
    given = dict(word.split("=", 1) for word in words[2:])
    epochs = int(given.pop("EPOCHS"))
    per_epoch = 20 * STEP
    assert 2 * 30 <= epochs * per_epoch <= 90
    assert "only its times count" not in analysis.too_short.because
    assert given == {
        "NODES": "4",
        "MODEL": "resnet50",
        "DATA": "my photos",
        "SYNC": "bf16",
        "ARGS": "--lr 0.2",
    }


def test_the_command_is_one_that_train_takes(tmp_path):
    """Each variable is an option of the launcher, in lower case."""
    options = {"model": "resnet34", "data": "d", "batch": 8, "precision": "fp32", "sync": "bf16"}
    more = {"inventory": "my pcs.ini", "max_restarts": 2, "min_nodes": 3, "force": True}
    asked = {**options, **more, "queue": False, "trainer": ["--lr", "0.2"]}
    words = shlex.split(run(tmp_path, asked).too_short.command)[2:]
    typed = dict(word.split("=", 1) for word in words)
    verbs.check(["train"], list(typed), typed)
    read = cli._new(cli._parse(["train", *verbs.options("train", list(typed), typed)]))
    kept = read.flat()
    assert {name: kept[name] for name in {**options, **more}} == {**options, **more}
    assert (read.nodes, read.trainer) == (4, ("--lr", "0.2"))


@pytest.mark.parametrize("status", ["finished", "failed", "stopped", "running"])
def test_a_run_that_is_too_short_gets_neither_verdict_nor_advice(tmp_path, status):
    """However clearly its few steps wait for the network. What failed is told to be mended first,
    so no longer run is proposed."""
    made = RunBuilder(tmp_path / "run", **{**BOTTLENECKS["network"], "steps": 16})
    made.write()
    path = made.folder / "attempts.json"
    attempts = json.loads(path.read_text())["attempts"]
    path.write_text(json.dumps({"status": status, "attempts": attempts}))
    analysis = analyse(made.folder)
    assert (analysis.summary["bottleneck"], analysis.summary["advice"]) == ("none", [])
    assert bool(analysis.failure) == (status != "finished")
    for shown in (render_text(analysis), render_page(analysis)):
        assert "too short to judge" in shown
        assert ("This one says more" in shown) == (status == "finished")
        for word in ("bottleneck", "SYNC=", "NODES=1:", "WHAT TO DO", "What to do"):
            assert word not in shown
    long = analyse(RunBuilder(tmp_path / "long", **BOTTLENECKS["network"]).write())
    assert long.summary["bottleneck"] == "network" and long.summary["advice"]


@pytest.mark.parametrize(("nodes", "connection"), [(4, "local"), (1, "ssh")])
def test_of_one_machine_nothing_is_said_about_networks(tmp_path, nodes, connection):
    """Four local nodes, as in the demo, or one machine: no cable is between their processes."""
    settings = {**BOTTLENECKS["network"], "nodes": nodes, "connection": connection}
    analysis = analyse(RunBuilder(tmp_path / "run", **settings).write())
    assert analysis.too_short is None
    assert analysis.networks == []
    for shown in (render_text(analysis), render_page(analysis)):
        for word in ("NETWORK", "network is", "SYNC=", "Gbit/s", "switch", "network card"):
            assert word not in shown
    several = RunBuilder(tmp_path / "several", **BOTTLENECKS["network"]).write()
    assert "NETWORK" in render_text(analyse(several))


def test_a_script_of_one_s_own_is_told_nothing_of_our_trainer_s_options(tmp_path):
    """Its own say how long it trains, and how many images a step has."""
    run(tmp_path)
    path = tmp_path / "run/plan.json"
    asked = {"inventory": "own.ini", "script": "/home/x/train.py", "balance": "auto", "nodes": 2}
    plan = {**json.loads(path.read_text()), "options": asked, "script": {"words": ["train.py"]}}
    path.write_text(json.dumps(plan))
    analysis = analyse(path.parent)
    assert analysis.too_short.command == "the same script, for longer by its own options (ARGS=)"
    assert train_line(analysis.run, {"SYNC": "ef:1.6"}) is None
    again = train_line(analysis.run)
    assert "SCRIPT=/home/x/train.py" in again and "BALANCE" not in again
