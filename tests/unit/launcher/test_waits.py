"""Runs that wait, before they begin and in their middle: who says so, and for whom."""

import json

import pytest

from launcher import control, folders, status, top, waits
from launcher.top import Top
from tests.unit.report.report_runs import RunBuilder

RUN = "20261122T142755Z-resnet50-1n"
WHY = "node2: it is in use by ben: run other"


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RUNS", tmp_path)
    monkeypatch.setattr(top.inventory, "load", lambda _path: [])
    return tmp_path


def shown(capsys, show, *words):
    assert show(*words) == 0
    return capsys.readouterr().out


def test_what_has_not_begun_is_in_runs_status_and_top(capsys):
    with waits.Note("resnet18 on 4 machines") as note:
        assert waits.everybody() == []  # nothing is waited for yet
        note.tell("its time is 19:00 (AT)")
        note.tell(WHY)
        for said in (
            shown(capsys, control.runs),
            shown(capsys, status.status, "latest"),
            "".join(line.lstrip() for line in Top(None, "inventory.ini").lines(500, 9)),
        ):
            assert said.count("resnet18 on 4 machines waits") == 1 and said.count(WHY) == 1
    assert "waits" not in shown(capsys, control.runs)


def test_one_that_has_begun_is_not_said_to_run(runs, capsys):
    builder = RunBuilder(runs / RUN, nodes=1, steps=400, epochs=4)
    builder.write_control()
    builder.write_rank(0, "node1", steps=20, end=False)
    builder.write_machine(0, "node1")
    held = folders.lock(runs / RUN)
    assert control.state(runs / RUN) == "running"
    with waits.Note("resnet50", RUN) as note:
        note.tell(WHY)
        first, second, *rest = shown(capsys, status.status, RUN).splitlines()
        assert first.startswith(f"run {RUN}: waits, carried out by process") and WHY in second
        assert not any("to go" in line or "now:" in line for line in rest)
        told = json.loads(shown(capsys, status.status, RUN, True))
        assert (told["state"], told["waits_for"]) == ("waits", WHY)
        assert f"{RUN}: waits" in Top(None, "inventory.ini").lines(80, 24)[1]
        row, why = shown(capsys, control.runs).splitlines()[1:]
        assert row.split()[:2] == [RUN, "waits"] and WHY in why
    assert control.state(runs / RUN) == "running"
    held.close()


@pytest.mark.parametrize("text", ["", "{}", '{"pid": "x"}', "\x1b[2J"])
def test_the_note_of_one_that_died_is_nobody_s_and_a_damaged_one_says_nothing(runs, text):
    note = runs / waits.FOLDER / "pc7-1"
    note.parent.mkdir()
    note.write_text(text)
    with note.open() as file:
        waits.fcntl.flock(file, waits.fcntl.LOCK_EX)
        assert waits.everybody() == [] and note.exists()
    assert waits.everybody() == [] and not note.exists()
