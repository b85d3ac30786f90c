"""`make sweep`: its grid, its order, what fails, and what goes on after an end.

The launcher is a stand-in that writes a finished run in no time; the report is the real one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.errors import UserError
from tools import sweep

ROOT = Path(__file__).parents[3]
# Speed by --sync; O1 is refused; the run whose number is in `wait` lasts until a signal.
LAUNCHER = """
import json, pathlib, signal, sys, time
sys.path.pop(0), sys.modules.pop("launcher")  # what is imported now needs the real one
from contract.result_lines import result_line
from tests.unit.report.report_runs import RunBuilder
with open("calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
number = len(open("calls").readlines())
if "PRECISION=O1" in sys.argv:
    print(result_line(refused="--precision O1: no GPU here"))
    sys.exit("tandem: a sentence for people")
name = f"20260101T0000{number:02d}Z-resnet50-4n"
run = pathlib.Path("runs") / name
print(result_line(run=name), flush=True)
if pathlib.Path("wait").exists() and number == int(pathlib.Path("wait").read_text()):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    pathlib.Path("waiting").touch()
    signal.pause()
slow = 0.2 if "SYNC=allreduce" in sys.argv else 0.0
builder = RunBuilder(run, steps=240, step={"sync_exposed": slow + number / 1000})
builder.write()
if "SYNC=ef:5" in sys.argv:
    builder.write_control(status="failed", first_cause={"message": "node2 is gone"})
    sys.exit(1)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder whose launcher is the stand-in."""
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher/__init__.py").touch()
    (tmp_path / "launcher/__main__.py").write_text(LAUNCHER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def typed(*words):
    return [sys.executable, "-m", "tools.sweep", *words]


def swept(*words):
    done = subprocess.run(typed(*words), capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def calls():
    path = Path("calls")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state():
    (path,) = Path("runs/sweeps").glob("*/sweep.json")
    return path.parent, json.loads(path.read_text())


def test_the_grid_of_the_example():
    cells = sweep.parse_grid("SYNC=allreduce,ef:3 PRECISION=fp32,O1 ARGS='--sync_bn|'", {})
    assert len(cells) == 8
    assert cells[0] == {"SYNC": "allreduce", "PRECISION": "fp32", "ARGS": "--sync_bn"}
    assert {one["ARGS"] for one in cells} == {"--sync_bn", ""}
    with_commas = sweep.parse_grid("ARGS='--step_epochs 30,60|--step_epochs 10' DATA='a,b|c'", {})
    assert with_commas[0] == {"ARGS": "--step_epochs 30,60", "DATA": "a,b"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no variable: nothing to compare"),
        ("FOO=1,2", "cannot vary FOO: it takes NODES"),
        ("LR=0.1,0.2", "ARGS='--lr 0.1|--lr 0.2'"),
        ("SYNC=a,,b", "a value is empty"),
        ("SYNC=a,a", "there twice"),
        ("BATCH=1,2", "BATCH is given twice"),
    ],
)
def test_a_grid_that_is_none_is_refused(text, said):
    with pytest.raises(UserError) as refused:
        sweep.parse_grid(text, {"BATCH": "32"})
    assert said in str(refused.value)


def test_a_cell_is_a_run_that_is_long_enough_and_the_command_of_a_whole_one():
    cell = sweep.make_cell({"ARGS": "--lr 1", "BATCH": "8"}, {"SYNC": "ef:5", "ARGS": "--sync_bn"})
    words = "ARGS=--lr 1 --sync_bn --trial 40 --sync_warmup 0"
    assert {*cell["argv"]} == {"BATCH=8", "SYNC=ef:5", words}
    assert cell["command"] == "make train ARGS='--lr 1 --sync_bn' BATCH=8 SYNC=ef:5"
    whole = sweep.make_cell({"EPOCHS": "3"}, {"SYNC": "ef:5"})
    assert whole["argv"] == ["EPOCHS=3", "SYNC=ef:5"]
    with pytest.raises(UserError, match="BATCH=x is not a whole number"):
        sweep.make_cell({}, {"BATCH": "x"})


def test_runs_alternate_and_a_cell_that_fails_is_a_row_with_its_cause(place):
    code, said = swept("--sweep=SYNC=allreduce,bf16,ef:5 PRECISION=fp32,O1", "--nodes=4")
    assert code == 0, said
    order = [[w for w in call if w.startswith(("SYNC=", "PREC"))] for call in calls()]
    tried = [
        [f"SYNC={sync}", f"PRECISION={level}"]
        for sync in ("allreduce", "bf16", "ef:5")
        for level in ("fp32", "O1")
    ]
    # What was refused or failed in the first round is not tried in the second.
    assert order == [*tried, tried[0], tried[2]]
    words = " ".join(said.split())
    assert words.count("B: refused: --precision O1: no GPU here") == 1
    assert "E: failed: node2 is gone" in words
    assert "B refused ?" in words
    assert "Fastest: C, SYNC=bf16 PRECISION=fp32:" in words
    assert "make train NODES=4 SYNC=bf16 PRECISION=fp32" in words
    assert "+-" in words  # the spread of two runs
    folder, _ = state()
    assert "no GPU here" in (folder / "compare.html").read_text()


def until(path, process):
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_sweep_that_was_ended_goes_on_where_it_was(place, number):
    Path("wait").write_text("3")
    with subprocess.Popen(
        typed("--sweep=SYNC=allreduce,bf16"), stdout=subprocess.PIPE, text=True
    ) as process:
        until(Path("waiting"), process)
        process.send_signal(number)
        said = process.communicate()[0]
    if number is signal.SIGINT:
        assert process.returncode == 75, said
    else:
        end_orphans(place)
    folder, before = state()
    assert [run["run"] is not None for run in before["runs"]] == [True, True, False]
    Path("wait").unlink()
    code, said = swept(f"--resume={folder.name}")
    assert code == 0, said
    _, after = state()
    assert len(calls()) == 5
    done = [(run["round"], run["cell"]) for run in after["runs"] if run["run"]]
    assert done == [(0, 0), (0, 1), (1, 0), (1, 1)]
    if number is signal.SIGINT:
        code, said = swept(f"--resume={folder.name}")
        assert (code, len(calls())) == (0, 5)
        assert "0 of 4 runs to do" in said


def test_another_s_sweep_carries_nothing_out_and_empties_nothing(place):
    folder, precious = place / "runs/sweeps/20260101T000000Z", place / "precious"
    folder.mkdir(parents=True)
    precious.write_text("kept")
    (folder / "lock").symlink_to(precious)
    cell = {"name": "a", "argv": [f"NOTIFY=touch {place}/made"], "command": "make train"}
    document = {"sweep": "SYNC=a,b", "rounds": 1, "cells": [cell, cell], "runs": []}
    for sealed in ({}, {"seal": "0" * 64}):
        (folder / "sweep.json").write_text(json.dumps({**document, **sealed}))
        code, said = swept("--resume=latest")
        assert (code, calls(), precious.read_text()) == (2, [], "kept"), said
    with pytest.raises(OSError, match="symbolic links"), sweep.lock_sweep(folder):
        pass
    assert precious.read_text() == "kept"


def end_orphans(place):
    """The run that a killed sweep left behind."""
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            mine = path.readlink() == place and int(path.parent.name) != os.getpid()
        except OSError:
            continue
        if mine:
            os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume=no"], "there is no sweep no: there is none yet."),
        (["--resume=latest", "--nodes=2"], "as it began: leave NODES out"),
        (["--sweep=SYNC=a,b", "--rounds=0"], "--rounds 0: must be at least 1"),
        ([], "SWEEP is missing"),
    ],
)
def test_what_cannot_be_swept_is_refused_in_a_sentence(place, capsys, words, said):
    assert sweep.main(words) == 2
    err = capsys.readouterr().err
    assert (said in err, err.count("\n")) == (True, 1)
    assert not Path("runs/sweeps").exists()
