"""Runs side by side, or those of a sweep: what differs, what came of it, and which are refused."""

import json
import re
from pathlib import Path

import pytest

from report.__main__ import main
from tests.unit.report.report_runs import RunBuilder, change_lines

SLOW = {"step": {"sync_exposed": 0.138}}  # a step of 0.266 s in the place of 0.138 s


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that writes a run below runs/ and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name, **settings):
        folder = tmp_path / "runs" / name
        RunBuilder(folder, **{"steps": 240, **settings}).write()
        return name

    return write


def compared(capsys, *names):
    """(exit code, what was printed in words without line breaks, the lines)."""
    code = main(["compare", *names])
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split()), (out + err).splitlines()


def figures(capsys, *names):
    assert main(["compare", "--json", *names]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_differs_and_what_came_of_it(runs, capsys):
    """What it prints: tests/messages/report.txt."""
    a = runs("a")
    b = runs("b", sync="bf16", options={"sync_bn": True}, versions={"torchvision": "0.13.1"})
    c = runs("c", cpu="AMD Ryzen 5", **SLOW)
    said = compared(capsys, a, b, c)[1]
    assert "AMD Ryzen 5 (C)" in said and "torchvision 0.29.2 (A, C); 0.13.1 (B)" in said
    found = figures(capsys, a, b, c)
    speeds = [one["images_per_second"] for one in found["runs"]]
    assert speeds == pytest.approx([128 / 0.138, 128 / 0.138, 128 / 0.266], rel=1e-3)
    # Neither step_epochs, which all have, nor the folder that a run writes to.
    assert found["settings"] == {
        "sync": {"A": "allreduce", "B": "bf16", "C": "allreduce"},
        "sync_bn": {"A": "off", "B": "on", "C": "off"},
    }
    step = found["runs"][2]["step"]
    assert step["network"] + step["peers"] == pytest.approx(0.138, rel=1e-3)


@pytest.mark.parametrize("other", [{"model": "resnet18"}])
def test_runs_that_did_not_do_the_same_are_compared_and_that_is_said_first(runs, capsys, other):
    code, said, _ = compared(capsys, runs("a"), runs("b", **other))
    (value,) = other.values()
    assert code == 0
    assert said.index("NOT COMPARABLE") < said.index("SETTINGS") < said.index("RESULTS")
    assert f"{value} (B)" in said[: said.index("SETTINGS")]
    page = Path("runs/compare.html").read_text()
    assert page.index("did different work") < page.index("Results")


def test_accuracy_is_set_against_epochs_and_against_time(runs, capsys):
    a, b = runs("a", epochs=4), runs("b", epochs=2, **SLOW)
    found = figures(capsys, a, b)
    first, second = (one["top1"] for one in found["runs"])
    assert [epoch for epoch, _, _ in first] == [1, 2, 3, 4]
    # 6 s of start, an epoch of 60 steps, and 2 s of evaluation.
    assert first[0][1] == pytest.approx(6 + 60 * 0.138 + 2, abs=0.01)
    assert second[0][1] == pytest.approx(6 + 120 * 0.266 + 2, abs=0.01)
    _, said, _ = compared(capsys, a, b)
    assert "to 90.0 %" in said  # both reached it
    page = Path("runs/compare.html").read_text()
    assert page.count("<polyline") == 4


def test_a_short_run_a_failed_one_and_a_demo_have_rows(runs, capsys):
    a, b = runs("a"), runs("b", steps=20, connection="local")
    builder = RunBuilder("runs/c", steps=600)
    builder.write()
    cause = {"host": "node2", "rank": 1, "message": "node2 ran out of memory"}
    builder.write_control(status="failed", first_cause=cause)
    code, said, _ = compared(capsys, a, b, "c")
    assert code == 0
    assert "B: too short to judge: a verdict needs 20 steps, but only 19 were measured." in said
    assert "C failed" in said and cause["message"] in said
    demo = "processes on one PC"
    assert demo in said and demo in Path("runs/compare.html").read_text()
    assert demo not in compared(capsys, a, "c")[1]


def test_latest_and_those_before_it(runs, capsys):
    for day in (1, 2, 3):
        runs(f"2026010{day}T000000Z-resnet50-4n")
    code, said, _ = compared(capsys, "latest~2", "latest~0")
    assert code == 0
    assert said.index("20260101T") < said.index("20260103T")
    assert compared(capsys, "latest~3", "latest~0")[0] == 2


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "RUNS is missing"),
        (["a"], "RUNS names 1 run: 2 to 8"),
        (["a", "runs/a"], "the same run twice: a and runs/a"),
        (["a", "."], "is not a run directory"),
        (["a", "b"], "There is no run at b"),
        (["a", "old"], "old has version 1 of the record, but only runs of version 2"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(runs, capsys, names, said):
    runs("a")
    changed("old", record=None)
    assert main(["compare", *names]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), said in err) == ("", 1, True)


def changed(name, **fields):
    """A run with other fields in its start lines."""
    for path in RunBuilder(f"runs/{name}", steps=240).write().glob("nodes/*/rank*.jsonl"):
        change_lines(path, lambda line: {**line, **fields} if line["kind"] == "start" else line)


ODD = ["\x1b[2J\u202e<i>" * 999, {"<i>": {"b": [{}] * 300}}]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:20])
def test_odd_values_in_a_start_line_break_nothing(runs, capsys, odd):
    a = runs("a")
    start = json.loads(Path("runs/a/nodes/node1/rank0.1.steps.jsonl").read_text().splitlines()[0])
    inner = {"sync_bn": odd, "data": odd}
    changed("b", **dict.fromkeys(start.keys() - {"kind", "attempt", "record"}, odd))
    changed("c", options=inner, versions=inner, instructions=inner)
    code, _, lines = compared(capsys, a, "b", "c")
    assert code == 0
    assert all(line.isprintable() for line in lines)
    assert Path("runs/compare.html").stat().st_size < 100_000
    assert "<i>" not in Path("runs/compare.html").read_text()


@pytest.fixture
def swept(tmp_path):
    """A function that makes a sweep of runs: each cell is a list of settings of RunBuilder."""

    def write(*cells):
        entries = []
        for at, runs in enumerate(cells):
            for number, settings in enumerate(runs):
                name = f"{at}-{number}"
                RunBuilder(tmp_path / "runs" / name, **{"steps": 240, **settings}).write()
                entries.append({"cell": at, "round": number, "run": name, "cause": None})
        folder = tmp_path / "runs/sweeps/one"
        folder.mkdir(parents=True)
        named = [{"name": f"BATCH={at}", "command": f"make train BATCH={at}"} for at in range(9)]
        state = {"cells": named[: max(2, len(cells))], "runs": entries}
        (folder / "sweep.json").write_text(json.dumps(state))
        return folder

    return write


def said(capsys, folder):
    code = main(["sweep", str(folder)])
    out, err = capsys.readouterr()
    return code, " ".join((out + err).split())


def test_the_fastest_has_its_command_and_those_within_its_spread(swept, capsys):
    near = {"step": {"sync_exposed": 0.012}}
    folder = swept([SLOW, SLOW], [{}, {"step": {"sync_exposed": 0.02}}], [near, near])
    code, text = said(capsys, folder)
    assert code == 0
    assert "Fastest: C, BATCH=2: 914 images/s." in text
    assert "Not measurably slower: B." in text
    assert "make train BATCH=2" in text
    assert "B finished 896 +-3.5 %" in text
    page = (folder / "compare.html").read_text()
    assert page.count('class="spread"') == 1  # of B; those of A and C are equally fast
    assert 'href="' not in page  # no run has its report yet
    assert main([str(folder.parents[1] / "2-0")]) == 0
    said(capsys, folder)
    links = re.findall(r'href="([^"]+)"', (folder / "compare.html").read_text())
    assert links and all((folder / link).is_file() for link in links)


def test_a_short_run_is_not_faster_than_one_that_can_be_judged(swept, capsys):
    assert "Fastest: B, BATCH=1" in said(capsys, swept([{"steps": 18}], [SLOW]))[1]


def test_of_runs_that_are_too_short_none_is_the_fastest(swept, capsys):
    code, text = said(capsys, swept([{"steps": 18}], [{"steps": 18, **SLOW}]))
    assert code == 0
    assert "too short to say which is fastest" in text
    assert "Fastest" not in text and "make train" not in text


def test_a_sweep_of_which_nothing_ran(swept, capsys):
    folder = swept()
    assert "No setting has a result." in said(capsys, folder)[1]
    (folder / "sweep.json").write_text("{")
    assert said(capsys, folder)[0] == 2


def test_a_name_in_a_sweep_is_no_path(swept, capsys):
    folder = swept([{}], [{}])
    state = json.loads((folder / "sweep.json").read_text())
    state["runs"][0]["run"] = "../../0-0"
    state["cells"][1]["name"] = "\x1b[2J<script>"
    (folder / "sweep.json").write_text(json.dumps(state))
    code, text = said(capsys, folder)
    assert code == 0
    assert text.isprintable()
    assert "<script" not in (folder / "compare.html").read_text()


def late(rank, change, **seconds):
    """Changes a run's lines of steps so that this rank, or each in turn (None), is late."""
    for number in range(4):
        path = Path(f"runs/{change}/nodes/node{number + 1}/rank{number}.1.steps.jsonl")

        def edit(line, number=number):
            if line["kind"] == "step":
                is_late = number == (line["step"] % 4 if rank is None else rank)
                line["seconds"].update(seconds if is_late else {"sync_exposed": 0.4})
            return line

        change_lines(path, edit)
    return change


def test_what_delays_the_last_rank_is_compared_and_not_the_means(runs, capsys):
    """The means over ranks grew most by the waits of the others."""
    a, disk = runs("a"), {"rkB/s": 12000.0, "util": 97.0, "r_await": 11.0}
    b = late(None, runs("b", disk=disk), data=0.39)
    busy = {"machines": {"node3": {"waited": 3.0, "busy": 8.0}}}
    c = late(2, runs("c", **busy), backward=0.47)
    d = late(2, runs("d"), backward=0.47)
    e = runs("e", step={"backward": 0.47})
    found = {one["name"]: one["changes"] for one in figures(capsys, a, b, c, d, e)["runs"]}
    causes = {name: list(changes) for name, changes in found.items()}
    assert causes == {
        **{"a": [], "b": ["data_disk"], "c": ["cpu_contention"]},
        **{"d": ["straggler"], "e": ["compute"]},
    }
    assert found["b"]["data_disk"] == pytest.approx(0.388, abs=0.001)
    said = compared(capsys, a, b, c)[1]
    assert "B against A: a slow disk +0.39 s." in said
    assert [*figures(capsys, b, a)["runs"][1]["changes"]] == ["data_disk"]
