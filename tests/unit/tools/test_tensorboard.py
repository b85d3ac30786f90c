"""`make tensorboard`: the report writes, and TensorBoard shows, where it is installed."""

import os
import sys

import pytest

from tests.unit.report.report_runs import RunBuilder
from tools import tensorboard


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Its folder; programs are found in an empty one."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(tensorboard, "REPORT", [sys.executable, "-m", "report", "tensorboard"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    return RunBuilder(tmp_path / "run", steps=40).write()


def test_where_it_is_not_installed_the_events_are_there_and_how_to_see_them(run, capsys):
    assert tensorboard.main([str(run)]) == 0
    said = capsys.readouterr().out
    assert "pipx install tensorboard" in said and f"--logdir {run}/tensorboard" in said
    assert list((run / "tensorboard").iterdir())


def test_where_it_is_installed_it_shows_them(run, monkeypatch):
    program = run.parent / "bin/tensorboard"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    started = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tensorboard.main([str(run)])
    assert started == [(str(program), [str(program), "--logdir", f"{run}/tensorboard"])]


def test_a_run_that_is_none_is_a_sentence_and_nothing_is_shown(tmp_path, run, capfd):
    assert tensorboard.main([str(tmp_path / "none")]) == 2
    assert "There is no run at" in capfd.readouterr().err
