"""docs/run-directory.md, tests/run_directory.py and the report agree on the contract."""

import json
from pathlib import Path

import pytest

from report.__main__ import main
from report.records import CATEGORIES
from tests import run_directory
from tests.run_directory import FILES, LINES
from tests.unit.report.report_runs import RunBuilder

PAGE = run_directory.documented(
    (Path(__file__).parents[2] / "docs/run-directory.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", FILES)
def test_every_field_of_a_file_is_on_its_page(name):
    assert set(FILES[name]) <= PAGE[name.split()[0]]


@pytest.mark.parametrize("kind", LINES)
def test_every_field_of_a_line_is_on_its_page(kind):
    assert {"kind", "attempt", kind, *LINES[kind]} <= PAGE["rank<k>.steps.jsonl"]


@pytest.mark.parametrize(
    "name", ["net.jsonl", "gpu.jsonl", "mounts.jsonl", "machine.jsonl", "summary.json"]
)
def test_the_page_has_no_field_that_the_schema_lacks(name):
    words = {"eth0", "nfs4", "cifs", "finished", "failed", "stopped", "running"}
    inner = {"resumed_samples", "reason", "command", "0", "ran", "waited", "from", "sent", "busy"}
    assert PAGE[name] - words - inner <= set(FILES[name])


def test_the_categories_are_the_same_everywhere():
    assert set(CATEGORIES) == run_directory.CATEGORIES <= PAGE["The categories of `seconds`"]


def test_a_reported_run_keeps_the_contract(tmp_path):
    run = RunBuilder(tmp_path / "run", gpu=True, mounts=1.0).write()
    main([str(run)])
    assert (run / "summary.json").exists()
    assert run_directory.problems(run) == []


@pytest.mark.parametrize("kind", LINES)
def test_a_line_without_a_field_is_noticed(tmp_path, kind):
    run = RunBuilder(tmp_path / "run").write()
    path = run / "nodes/node1/rank0.steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == kind:
            del line[next(iter(LINES[kind]))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any("is missing" in problem for problem in run_directory.problems(run))


def test_half_a_last_line_is_allowed_and_half_a_line_before_it_is_not(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    path = run / "nodes/node1/net.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"attempt": 1, "mo')
    assert run_directory.problems(run) == []
    path.write_text('{"attempt": 1, "mo\n' + whole)
    assert any("does not parse" in problem for problem in run_directory.problems(run))
