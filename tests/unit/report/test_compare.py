"""Runs side by side: what differs, what came of it, and which runs are refused."""

import json
import re
from pathlib import Path

import pytest

from report.__main__ import main
from tests.unit.report.report_runs import RunBuilder

SLOW = {"step": {"sync_exposed": 0.138}}  # a step of 0.266 s in the place of 0.138 s


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that writes a run below runs/ and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name, **settings):
        folder = tmp_path / "runs" / name
        RunBuilder(folder, **{"steps": 600, **settings}).write()
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
    a = runs("a")
    b = runs("b", sync="bf16", options={"sync_bn": True}, versions={"torchvision": "0.13.1"})
    c = runs("c", cpu="AMD Ryzen 5", **SLOW)
    code, said, lines = compared(capsys, a, b, c)
    assert code == 0
    assert max(map(len, lines[:-1])) <= 80
    assert "sync allreduce (A, C); bf16 (B)" in said
    assert "sync_bn off (A, C); on (B)" in said
    assert "torchvision 0.29.2 (A, C); 0.13.1 (B)" in said
    assert re.search(r"processor Intel\S* .*?\(A, B\); AMD Ryzen 5 \(C\)", said)
    assert "step_epochs" not in said  # the same in all
    assert "output" not in said  # where a run writes is no setting
    assert "NOT COMPARABLE" not in said
    found = figures(capsys, a, b, c)
    speeds = [one["images_per_second"] for one in found["runs"]]
    assert speeds == pytest.approx([128 / 0.138, 128 / 0.138, 128 / 0.266], rel=1e-3)
    assert found["settings"]["sync"] == {"A": "allreduce", "B": "bf16", "C": "allreduce"}
    step = found["runs"][2]["step"]
    assert step["network"] + step["peers"] == pytest.approx(0.138, rel=1e-3)


@pytest.mark.parametrize("other", [{"model": "resnet18"}, {"data": "digits"}])
def test_runs_that_did_not_do_the_same_are_compared_and_that_is_said_first(runs, capsys, other):
    code, said, _ = compared(capsys, runs("a"), runs("b", **other))
    (value,) = other.values()
    assert code == 0
    assert said.index("NOT COMPARABLE") < said.index("SETTINGS") < said.index("RESULTS")
    assert f"{value} (B)" in said[: said.index("SETTINGS")]
    page = Path("runs/compare.html").read_text()
    assert page.index("did not do the same") < page.index("Results")


def test_accuracy_is_set_against_epochs_and_against_time(runs, capsys):
    a, b = runs("a", epochs=4), runs("b", epochs=2, **SLOW)
    found = figures(capsys, a, b)
    first, second = (one["top1"] for one in found["runs"])
    assert [epoch for epoch, _, _ in first] == [1, 2, 3, 4]
    # 6 s of start, an epoch of 150 steps, and 2 s of evaluation.
    assert first[0][1] == pytest.approx(6 + 150 * 0.138 + 2, abs=0.01)
    assert second[0][1] == pytest.approx(6 + 300 * 0.266 + 2, abs=0.01)
    _, said, _ = compared(capsys, a, b)
    assert "to 90.0 %" in said  # both reached it
    page = Path("runs/compare.html").read_text()
    assert page.count("<polyline") == 4
    assert len(re.findall('role="img"', page)) == page.count("<svg") == 4
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert page.count("<th ") == page.count("<th scope=")


def test_a_short_run_and_a_failed_one_have_rows(runs, capsys):
    a, b = runs("a"), runs("b", steps=20)
    builder = RunBuilder("runs/c", steps=600)
    builder.write()
    builder.write_control(
        status="failed",
        first_cause={"host": "node2", "rank": 1, "message": "node2 ran out of memory"},
    )
    code, said, _ = compared(capsys, a, b, "c")
    assert code == 0
    assert "Too short to judge: B." in said
    assert "C failed" in said
    assert "node2 ran out of memory" in said


def test_a_demo_among_them_is_told(runs, capsys):
    a, b = runs("a"), runs("b", connection="local")
    assert "processes of one PC" not in compared(capsys, a, runs("c"))[1]
    assert "processes of one PC" in compared(capsys, a, b)[1]
    assert "processes of one PC" in Path("runs/compare.html").read_text()


def test_latest_and_those_before_it(runs, capsys):
    for day in (1, 2, 3):
        runs(f"2026010{day}T000000Z-resnet50-4n")
    code, said, _ = compared(capsys, "latest~2", "latest~0")
    assert code == 0
    assert said.index("20260101T") < said.index("20260103T")
    code, said, _ = compared(capsys, "latest~3", "latest~0")
    assert (code, said) == (2, "report: latest~3: there are 3 runs: `make runs` lists them.")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "RUNS is missing: 2 to 8 can be compared"),
        (["a"], "RUNS names 1 run: 2 to 8 can be compared"),
        (["a"] * 9, "RUNS names 9 runs: 2 to 8 can be compared"),
        (["a", "runs/a"], "the same run twice: a and runs/a"),
        (["a", "."], "is not a run directory"),
        (["a", "b"], "There is no run at b"),
        (["a", "old"], "old has version 1 of the record, and runs of version 2"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(runs, capsys, names, said):
    runs("a")
    old = RunBuilder("runs/old", steps=600)
    of_today = old.start_line
    old.start_line = lambda rank, host: {**of_today(rank, host), "record": None}
    old.write()
    code = main(["compare", *names])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_runs_say_of_themselves_cannot_become_markup(runs, capsys):
    a = runs("a")
    b = runs("b", cpu="<script>alert(1)</script>\x1b[2J", options={"<b>x": "<i>y"})
    code, _, lines = compared(capsys, a, b)
    assert code == 0
    assert all(line.isprintable() for line in lines)
    page = Path("runs/compare.html").read_text()
    assert not re.search("<script|<b>x|<i>y", page)


ODD = [
    None,
    True,
    -1,
    10**30,
    "x" * 5000,
    "\x1b[2J\u202e",
    [],
    [[]],
    [{}] * 300,
    {},
    {"a": {"b": []}},
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: repr(odd)[:20])
def test_odd_values_in_a_start_line_break_nothing(runs, capsys, odd):
    a = runs("a")
    builder = RunBuilder("runs/b", steps=600)
    of_today = builder.start_line
    kept = {"kind", "attempt", "record"}
    builder.start_line = lambda rank, host: {
        name: value if name in kept else odd for name, value in of_today(rank, host).items()
    }
    builder.write()
    assert compared(capsys, a, "b")[0] == 0
    builder.start_line = lambda rank, host: {
        **of_today(rank, host),
        **{name: {"sync_bn": odd, "data": odd} for name in ("options", "versions", "instructions")},
    }
    for path in Path("runs/b").glob("nodes/*/*.jsonl"):
        path.unlink()
    builder.write()
    code, _, lines = compared(capsys, a, "b")
    assert code == 0
    assert all(line.isprintable() for line in lines)
    assert Path("runs/compare.html").stat().st_size < 100_000
