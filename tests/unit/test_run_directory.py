"""docs/run-directory.md, tests/run_directory.py and the report agree on the contract."""

from pathlib import Path

import pytest

from contract.records import CATEGORIES
from report.__main__ import main
from tests import run_directory
from tests.run_directory import (
    FILES,
    LINES,
    MACHINE,
    OF_SOME,
    PARTS,
    SILENT_RANK,
    SUMS,
    WHERE_KNOWN,
)
from tests.unit.report.report_runs import RunBuilder

PAGE = run_directory.documented(
    (Path(__file__).parents[2] / "docs/run-directory.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", FILES)
def test_every_field_of_a_file_is_on_its_page(name):
    assert set(FILES[name]) <= PAGE[name.split()[0]]


@pytest.mark.parametrize("kind", LINES)
def test_every_field_of_a_line_is_on_its_page(kind):
    assert {"kind", "attempt", kind, *LINES[kind]} <= PAGE["rank<k>.<a>.steps.jsonl"]


SILENT = (SILENT_RANK, OF_SOME, SUMS)
MACHINES = {"kind", *MACHINE, *WHERE_KNOWN}.union(*MACHINE.values(), *PARTS.values(), *SILENT)


def test_every_field_of_a_machine_is_on_its_page():
    assert {name for name in MACHINES if name.isidentifier()} <= PAGE["machine.<a>.jsonl"]


@pytest.mark.parametrize(
    ("name", "known"),
    [("machine.<a>.jsonl", MACHINES), ("summary.json", set(FILES["summary.json"]))],
)
def test_the_page_has_no_field_that_the_schema_lacks(name, known):
    words = {"eth0", "nfs4", "sda", "0", "finished", "failed", "stopped", "running"}
    of_a_machine = {"speed_mbit", "peers", "util", "exception"}
    inner = {"resumed_samples", "reason", "command", "trial", "cause", "signal"}
    inner |= {"step_times", "processors", "disk", "network", "links", "gpu"}
    assert PAGE[name] - words - of_a_machine - inner <= known


def test_the_categories_are_on_the_page():
    assert set(CATEGORIES) <= PAGE["The categories of `seconds`"]


def test_a_reported_run_keeps_the_contract(tmp_path):
    run = RunBuilder(tmp_path / "run", gpu=True, mounts=1.0).write()
    main([str(run)])
    assert (run / "summary.json").exists()
    assert run_directory.problems(run) == []


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("rank0.1.steps.jsonl", lambda text: text.replace('"epoch"', '"epok"'), "epoch is missing"),
        ("machine.1.jsonl", lambda text: text.replace('"cpu_busy"', '"x"'), "cpu_busy is missing"),
        ("machine.1.jsonl", lambda text: '{"kind": "sample", "mo\n' + text, "does not parse"),
        ("exit.json", lambda text: "{}\n", "exit.json is no file"),
    ],
)
def test_what_breaks_the_contract_is_noticed(tmp_path, name, change, problem):
    path = RunBuilder(tmp_path / "run").write() / "nodes/node1" / name
    path.write_text(change(path.read_text() if path.exists() else ""))
    assert any(problem in one for one in run_directory.problems(tmp_path / "run"))
