"""docs/run-directory.md, tests/run_directory.py and the report agree on the contract."""

import json
from pathlib import Path

import pytest

from contract.records import CATEGORIES
from report.__main__ import main
from tests import run_directory
from tests.run_directory import FILES, LINES, MACHINE, PARTS, WHERE_KNOWN
from tests.unit.report.report_runs import RunBuilder, change_lines

PAGE = run_directory.documented(
    (Path(__file__).parents[2] / "docs/run-directory.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", FILES)
def test_every_field_of_a_file_is_on_its_page(name):
    assert set(FILES[name]) <= PAGE[name.split()[0]]


@pytest.mark.parametrize("kind", LINES)
def test_every_field_of_a_line_is_on_its_page(kind):
    assert {"kind", "attempt", kind, *LINES[kind]} <= PAGE["rank<k>.<a>.steps.jsonl"]


MACHINES = {"kind", *MACHINE, *WHERE_KNOWN}.union(*MACHINE.values(), *PARTS.values())


def test_every_field_of_a_machine_is_on_its_page():
    assert {name for name in MACHINES if name.isidentifier()} <= PAGE["machine.<a>.jsonl"]


@pytest.mark.parametrize(
    ("name", "known"),
    [("machine.<a>.jsonl", MACHINES), ("summary.json", set(FILES["summary.json"]))],
)
def test_the_page_has_no_field_that_the_schema_lacks(name, known):
    words = {"eth0", "nfs4", "sda", "0", "finished", "failed", "stopped", "running"}
    of_a_machine = {"speed_mbit", "peers", "util", "exception"}
    inner = {"resumed_samples", "reason", "command"}
    assert PAGE[name] - words - of_a_machine - inner <= known


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
    path = run / "nodes/node1/rank0.1.steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines.append({"kind": "stall", "category": "data", "step": 1, "idle": 1.0})
    for line in lines:
        if line["kind"] == kind:
            del line[next(iter(LINES[kind]))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert any("is missing" in problem for problem in run_directory.problems(run))


@pytest.mark.parametrize("kind", MACHINE)
def test_a_machine_s_line_without_a_field_is_noticed(tmp_path, kind):
    run = RunBuilder(tmp_path / "run").write()
    gone = next(iter(MACHINE[kind]))
    path = run / "nodes/node1/machine.1.jsonl"
    change_lines(
        path, lambda line: line["kind"] == kind and {n: v for n, v in line.items() if n != gone}
    )
    assert any(f"{gone} is missing" in problem for problem in run_directory.problems(run))


@pytest.mark.parametrize("name", ["exit.json", "net.jsonl", "rank0.steps.jsonl", "machine.jsonl"])
def test_a_file_of_before_is_noticed(tmp_path, name):
    run = RunBuilder(tmp_path / "run").write()
    (run / "nodes/node1" / name).write_text("{}\n")
    assert any(f"{name} is no file" in problem for problem in run_directory.problems(run))


def test_half_a_last_line_is_allowed_and_half_a_line_before_it_is_not(tmp_path):
    run = RunBuilder(tmp_path / "run").write()
    path = run / "nodes/node1/machine.1.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "sample", "mo')
    assert run_directory.problems(run) == []
    path.write_text('{"kind": "sample", "mo\n' + whole)
    assert any("does not parse" in problem for problem in run_directory.problems(run))
