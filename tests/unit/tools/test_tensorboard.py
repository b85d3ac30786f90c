"""`make tensorboard`: its writer, by a stand-in, is given what the report draws."""

import os
import runpy
import sys
import types
from pathlib import Path

import pytest

from tests.unit.report.report_runs import RunBuilder, change_lines


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """What the writer and then the program were given, after `make tensorboard RUN=...`."""
    given = {}

    class Writer:
        def __init__(self, folder, filename_suffix):
            self.path = Path(folder) / f"events.out.tfevents.1{filename_suffix}"

        def add_scalar(self, tag, value, step, unix):
            given.setdefault(tag, []).append((step, value, unix))

        def close(self):
            self.path.touch()

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    monkeypatch.setattr(os, "execv", lambda *words: given.update(program=words))

    def run(folder):
        monkeypatch.setattr(sys, "argv", ["tensorboard", str(folder)])
        try:
            runpy.run_module("tools.tensorboard", run_name="__main__")
        except SystemExit as end:
            return end.code, given
        return 0, given

    return run


def tenth(line):
    return line["kind"] == "step" and line["step"] % 10 == 0


def test_figures_of_training_and_of_every_machine_replace_those_of_before(tmp_path, typed):
    run = RunBuilder(tmp_path / "run", steps=400, gpu=True).write()
    for path in run.glob("nodes/*/rank*.steps.jsonl"):
        change_lines(
            path, lambda line: {**line, "loss": line["step"] / 1000} if tenth(line) else line
        )
    (run / "tensorboard").mkdir()
    for name in ("events.out.tfevents.0.tandem", "events.of.mine"):
        (run / "tensorboard" / name).touch()
    code, given = typed(run)
    assert code == 0 and given["program"][1][1:] == ["--logdir", str(run / "tensorboard")]
    names = {path.name for path in (run / "tensorboard").iterdir()}
    assert names == {"events.out.tfevents.1.tandem", "events.of.mine"}
    losses = given["loss"]
    assert [step for step, *_ in losses] == list(range(10, 401, 10))
    assert [value for _, value, _ in losses] == pytest.approx([s / 1000 for s, *_ in losses])
    assert losses[-1][2] - losses[0][2] == pytest.approx(390 * 0.138 + 2.5, abs=0.01)
    assert {"Processors, busy/node4", "GPU, power/node1"} <= set(given)
    assert [point[:2] for point in given["top-1"]] == [(1, 0.7), (2, 0.9)]


def test_a_link_of_a_run_s_folder_and_what_is_no_run_are_refused(tmp_path, typed, capfd):
    run = RunBuilder(tmp_path / "run").write()
    (tmp_path / "elsewhere").mkdir()
    (run / "tensorboard").symlink_to(tmp_path / "elsewhere")
    for folder, said in ((run, "is a link"), (tmp_path / "none", "There is no run at")):
        assert typed(folder) == (2, {})
        assert said in capfd.readouterr().err
    assert not any((tmp_path / "elsewhere").iterdir())
