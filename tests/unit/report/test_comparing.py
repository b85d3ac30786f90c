"""What a sweep's comparison concludes, and from which files."""

import json
import re

import pytest

from report.__main__ import main
from tests.unit.report.report_runs import RunBuilder

SLOW = {"step": {"sync_exposed": 0.138}}


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
    assert "Within the spread of its runs as fast: B." in text
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
