"""Runs of a few steps judge nothing; the command of one that does, and of a run with a change."""

import json
import re
import shlex

import pytest

from contract.options import DEFAULT_MODEL
from launcher import cli
from launcher.options import document, new_config
from report.__main__ import main
from report.analysis import analyse
from report.compare import read_compared_run
from report.rerun import train_line
from report.status import Follower
from report.text import command_lines
from report.view import Command
from tests.unit.report.report_runs import (
    BOTTLENECKS,
    SCRIPT,
    STEP,
    WARMED,
    RunBuilder,
    change,
    change_lines,
    page_of,
    text_of,
)


def run(folder, options=None, **settings):
    made = RunBuilder(folder / "run", **{"steps": 20, **settings}).write()
    if options:
        change(made / "plan.json", options=options)
    return analyse(made)


def words_of(line):
    """{variable: value} of a command line of `make train`."""
    assert line.startswith("make train ")
    return dict(word.split("=", 1) for word in shlex.split(line)[2:])


@pytest.mark.parametrize(
    ("settings", "judged", "settled", "faster"),
    [
        ({"steps": 20}, False, False, 1),
        ({"steps": 20}, False, False, 0.01),
        ({"steps": 21}, True, True, 1000),
        # 1.17 times the second half, but computing is the bottleneck of the last steps, too.
        ({"steps": 60, "slow_steps": 18}, True, False, 1),
        ({"steps": 60, "slow_steps": 12}, True, True, 1),  # 1.11 times
        ({"steps": 201, "slow_steps": 60}, True, True, 1),
    ],
)
def test_steps_decide_whether_a_run_can_be_judged_and_not_seconds(
    tmp_path, settings, judged, settled, faster
):
    """`settled`: its mean step can also be compared with that of another run."""
    step = {name: seconds / faster for name, seconds in STEP.items()}
    analysis = run(tmp_path, step=step, epochs=1, **settings)
    assert (analysis.too_short is None) == judged
    for shown in (" ".join(text_of(analysis).split()), page_of(analysis)):
        assert ("too short to judge" in shown, "bottleneck" in shown) == (not judged, judged)
    assert (Follower(tmp_path / "run").look().judgement is not None) == settled
    assert bool(read_compared_run(tmp_path / "run").step.missing_for_verdict) != settled


def test_a_short_run_whose_bottleneck_changes_is_too_short_to_judge(tmp_path):
    def wait(line):
        if line.get("step", 60) < 30:
            line["seconds"]["data"] = 1.0
        return line

    folder = RunBuilder(tmp_path / "run", steps=60, epochs=1).write()
    for path in folder.glob("nodes/*/*.steps.jsonl"):
        change_lines(path, wait)
    assert analyse(folder).too_short is not None


def test_steps_that_are_far_from_equal_need_not_agree_better_than_chance_lets_them(tmp_path):
    """As where packets are lost: six of the first twenty steps wait, and two of the second."""
    lost = {2, 4, 9, 12, 15, 20, 27, 33}

    def wait(line):
        if line.get("step") in lost:
            line["seconds"]["sync_exposed"] = 0.22
        return line

    folder = RunBuilder(tmp_path / "run", steps=41, epochs=1).write()
    for path in folder.glob("nodes/*/*.steps.jsonl"):
        change_lines(path, wait)
    first, second = analyse(folder).step.halves
    assert first > 1.2 * second and analyse(folder).too_short is None


def test_what_is_measured_before_one_pass_over_the_data_is_said_to_come_from_memory(tmp_path):
    """Where waiting for images is no part of it."""
    for name, cause in (("compute", "compute"), ("data_disk", "data_disk")):
        settings = {**BOTTLENECKS[name], "epochs": 1, "steps_per_epoch": 80}
        analysis = run(tmp_path / name, steps=79, **settings)
        assert analysis.summary["bottleneck"] == cause
        assert ("So far the disk may look faster" in text_of(analysis)) == (cause == "compute")
    assert "So far" not in text_of(run(tmp_path / "whole", steps=80, epochs=1))


def test_the_command_of_a_longer_run_can_be_pasted(tmp_path):
    typed = {"inventory": "examples/demo.ini", "model": DEFAULT_MODEL, "data": "digits"}
    analysis = run(tmp_path, {**typed, "trainer": []})
    command = (
        "make train NODES=4 INVENTORY=examples/demo.ini DATA=digits "
        f"MODEL={DEFAULT_MODEL} EPOCHS=22"
    )
    assert analysis.too_short.command == command
    lines = text_of(analysis).splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("    make train"))
    assert lines[begin].endswith(" \\") and max(map(len, lines)) <= 80
    pasted = "\n".join(lines[begin : begin + 2]).replace("\\\n", "")
    assert shlex.split(pasted) == shlex.split(command)
    assert f">{command}</pre>" in page_of(analysis)


def test_another_run_is_followed_by_the_same_for_longer(tmp_path):
    """Each variable is one that train takes; hours were of that run alone."""
    options = {"model": "resnet34", "data": "my photos", "batch": 8, "precision": "fp32"}
    options |= {"sync": "bf16", "inventory": "my pcs.ini", "max_restarts": 2, "min_nodes": 3}
    more = {"queue": False, "at": 1795546800, "until": 1795591800, "nodes": 5, "force": True}
    analysis = run(tmp_path, {**options, **more, "trainer": ["--lr", "0.2"]})
    typed = words_of(analysis.too_short.command)
    assert 200 <= int(typed["EPOCHS"]) * 10 - 1 <= 220
    read = new_config(
        cli.parse(["train", *(f"{name}={value}" for name, value in typed.items())])[1]
    )
    kept = {**options, "force": True, "nodes": 5, "trainer": ["--lr", "0.2"]}
    assert {name: document(read)[name] for name in kept} == kept
    assert not typed.keys() & {"AT", "UNTIL", "QUEUE"}


@pytest.mark.parametrize("status", ["finished", "failed"])
def test_a_run_that_is_too_short_gets_neither_verdict_nor_advice(tmp_path, status):
    """However clearly its few steps wait for the network. What failed is to be mended first, so no
    longer run is proposed."""
    made = RunBuilder(tmp_path / "run", **{**BOTTLENECKS["network"], "steps": 16}).write()
    change(made / "attempts.json", status=status)
    analysis = analyse(made)
    assert (analysis.summary["bottleneck"], analysis.summary["advice"]) == ("none", [])
    assert bool(analysis.failure) == (status != "finished")
    for shown in (text_of(analysis), page_of(analysis)):
        assert "too short to judge" in shown
        assert ("This one says more" in shown) == (status == "finished")
        for word in ("bottleneck", "SYNC=", "NODES=1:", "WHAT TO DO", "What to do"):
            assert word not in shown


@pytest.mark.parametrize(("nodes", "connection"), [(4, "local"), (1, "ssh")])
def test_of_one_machine_nothing_is_said_about_networks(tmp_path, nodes, connection):
    """Four local nodes, as in the demo, or one machine: no cable is between their processes."""
    settings = {**BOTTLENECKS["network"], "nodes": nodes, "connection": connection}
    analysis = analyse(RunBuilder(tmp_path / "run", **settings).write())
    assert analysis.too_short is None and analysis.uses.networks == []
    for shown in (text_of(analysis), page_of(analysis)):
        for word in ("NETWORK", "Network<", "network is", "SYNC=", "Gbit/s", "switch"):
            assert word not in shown


TRAINERS = re.compile(
    r"SYNC=|BATCH|BALANCE|EPOCHS|ARGS=|--(accumulate|workers|checkpoint_every|sync|sync_warmup)\b"
)


@pytest.mark.parametrize(
    ("argument", "printed"),
    [
        ("{data}", """ARGS="--path '{data}'\""""),
        ("0.1", "ARGS='--path 0.1'"),
        # In double quotes a shell would replace $HOME.
        ("$HOME", """ARGS='--path '"'"'$HOME'"'"''"""),
    ],
)
def test_quotes_within_an_argument_can_be_read_and_typed(tmp_path, argument, printed):
    own = run(tmp_path, {"model": "resnet50", "trainer": ["--path", argument]}).run
    line = train_line(own)
    assert printed in line
    assert shlex.split(words_of(line)["ARGS"]) == ["--path", argument]
    # However narrow the terminal is, the value stays whole.
    assert any(printed in row for row in command_lines(Command(line), 30))


@pytest.mark.parametrize("name", ["network", "data_decode", "all warm-up", "too short"])
def test_a_script_of_ones_own_is_told_nothing_of_our_trainers_options(tmp_path, name):
    settings = {"all warm-up": {**WARMED, "exact": 240}, "too short": {"steps": 20}}
    made = RunBuilder(tmp_path / "run", **{**BOTTLENECKS, **settings}[name]).write()
    options = {"inventory": "own.ini", "script": "/p/train.py", "nodes": 4, "trainer": ["--lr=1"]}
    change(made / "plan.json", options=options, program=SCRIPT)
    analysis = analyse(made)
    if name == "too short":
        assert analysis.too_short.command.startswith("the same script")
        return
    shown = " ".join(text_of(analysis).split())
    for one in (shown, page_of(analysis), json.dumps(analysis.summary)):
        assert not [match[0] for match in TRAINERS.finditer(one.replace("ARGS=--lr=1", ""))]
    # The price of a code names the task it was measured on, which may have been images.
    shown = f"{shown} {page_of(analysis)}".replace("on generated images", "")
    assert not re.search(r"\bimages?\b", shown, re.IGNORECASE)
    assert train_line(analysis.run, {"SYNC": "ef:3"}) is None
    typed = words_of(train_line(analysis.run))
    assert typed == {
        **{"NODES": "4", "INVENTORY": "own.ini"},
        **{"SCRIPT": "/p/train.py", "ARGS": "--lr=1"},
    }


def options_of(line):
    """What plan.json has of a command: the trainer's words are written anew."""
    return document(new_config(cli.parse(shlex.split(line)[1:])[1]))


def test_the_first_advice_that_can_be_tried_has_a_command_of_a_minute(tmp_path):
    """And the report of the run that follows it says what it brought."""
    slow = {**BOTTLENECKS["network"], "steps": 240}
    first = RunBuilder(tmp_path / "20260101T000000Z-resnet50-4n", **slow).write()
    line = "make train NODES=4 DATA=imagenet MODEL=resnet50 BATCH=32 ARGS='--workers 4 --lr=1'"
    change(first / "plan.json", options=options_of(line))
    assert main([str(first)]) == 0
    advice = json.loads((first / "summary.json").read_text())["advice"]
    (best,) = [one for one in advice if one["change"].startswith("SYNC=ef:5:")]
    words = words_of(best["trial"])
    assert words["SYNC"] == "ef:5" and words["ARGS"].endswith("--lr 1.0 --trial 60 --sync_warmup 0")
    assert all(one["trial"] is None for one in advice if one["costs_money"])
    second = RunBuilder(tmp_path / "20260102T000000Z-resnet50-4n", sync="ef:5").write()
    follows = options_of(best["trial"])
    for options, tried in ((follows, True), ({**follows, "batch": 16}, False)):
        change(second / "plan.json", options=options)
        found = analyse(second)
        assert (found.summary["tried"] is not None) == tried
        assert ("This run follows advice of 20260101T" in " ".join(text_of(found).split())) == tried
        assert ("This run follows advice of 20260101T" in page_of(found)) == tried
    change(second / "plan.json", options={**follows, "batch": 64})
    assert analyse(second).summary["tried"]["change"].endswith(" together")
    change(second / "plan.json", options=follows)
    found = analyse(second).summary["tried"]
    assert found["predicted"] == best["predicted_images_per_second"]
    assert found["reached"] == pytest.approx(128 / 0.138, rel=0.01)
    # A whole run follows it, too, and the last value of an option counts.
    for more in ({}, {"trainer": ["--workers", "8", "--workers", "4", "--lr", "1.0"]}):
        change(second / "plan.json", options={**options_of(best["command"]), **more})
        assert analyse(second).summary["tried"]["change"] == best["change"]
    change(second / "plan.json", options=follows)
    # The report on a trial advises whole runs.
    commands = [one["command"] for one in analyse(second).summary["advice"] if one["command"]]
    assert commands and not any("--trial" in command for command in commands)


@pytest.mark.parametrize("content", ["", '{"advice": [3, {"command": "make \'"}]}'])
def test_a_damaged_summary_of_an_earlier_run_is_no_advice(tmp_path, content):
    earlier = tmp_path / "20260101T000000Z-x-4n"
    earlier.mkdir()
    (earlier / "plan.json").write_text("{}")
    (earlier / "summary.json").write_text(content)
    made = RunBuilder(tmp_path / "20260102T000000Z-x-4n").write()
    change(made / "plan.json", options={"model": "resnet50", "trainer": []})
    assert analyse(made).summary["tried"] is None


def test_hardware_scripts_and_saving_have_no_trial(tmp_path):
    for name, program in (("checkpoint", None), ("network", SCRIPT), ("slow_link", SCRIPT)):
        made = RunBuilder(tmp_path / name / "run", **BOTTLENECKS[name]).write()
        change(made / "plan.json", options={"script": "/p/train.py", "nodes": 4, "trainer": []})
        if program:
            change(made / "plan.json", program=program)
        listed = analyse(made).summary["advice"]
        tried = [one["change"] for one in listed if one["trial"] and name != "network"]
        assert listed and not [one for one in tried if "save" in one or "link" in one]
        assert program is None or not any(one["trial"] for one in listed)
