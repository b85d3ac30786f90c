"""Runs of a few seconds: the report says that they judge nothing, and what does."""

import json
import re
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


WARMS = {"sync": "ef:1.6", "exact": 240, "exact_step": {"sync_exposed": 1.2}, "speed_mbit": 1000}
TRAINERS = re.compile(
    r"SYNC=|BATCH|BALANCE|EPOCHS|ARGS=|--(accumulate|workers|checkpoint_every|sync|sync_warmup)\b"
)


@pytest.mark.parametrize("name", [*BOTTLENECKS, "all warm-up"])
def test_what_a_timed_script_is_advised_is_in_its_own_lines(tmp_path, name):
    settings = BOTTLENECKS.get(name, WARMS)
    builder = RunBuilder(tmp_path / "run", model="Net", **settings)
    path = builder.write() / "plan.json"
    trainers = render_text(analyse(path.parent))
    options = {"inventory": "own.ini", "script": "/p/train.py", "nodes": 4, "trainer": ["--lr=1"]}
    script = {"words": ["train.py"], "arguments": ["--lr=1"], "folder": "/p", "outputs": []}
    plan = {**json.loads(path.read_text()), "options": options, "script": script}
    path.write_text(json.dumps(plan))
    analysis = analyse(path.parent)
    assert analysis.too_short is None
    shown = " ".join(render_text(analysis).split())
    for one in (shown, render_page(analysis), json.dumps(analysis.summary)):
        assert not [match[0] for match in TRAINERS.finditer(one.replace("ARGS=--lr=1", ""))]
    if name == "all warm-up":
        assert "or with attach's warmup_steps=0" in shown
    if name == "network":
        assert TRAINERS.search(trainers)
        assert 'tandem.sync.attach(model, "' in shown
        (fewer,) = (one for one in analysis.summary["advice"] if "NODES=" in one["change"])
        assert "SCRIPT=/p/train.py" in fewer["command"] and "ARGS=--lr=1" in fewer["command"]


def test_hours_were_of_that_run_alone_and_nodes_are_those_that_were_asked_for(tmp_path):
    asked = {"model": "resnet50", "nodes": 5, "at": 1795546800, "until": 1795591800, "trainer": []}
    analysis = run(tmp_path, {**asked, "batch": 32})
    assert train_line(analysis.run) == "make train NODES=5 MODEL=resnet50 BATCH=32"
