"""Faults of the trials that no machine of the lab can have: swapping, and a GPU's low clock. Their
machines exist only as records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.verdict.trials import report_answer
from report.analysis import analyse
from tests.unit.report.report_runs import STRAGGLER, RunBuilder, change_lines
from tests.unit.report.test_recorded_machines import record


def make_recorded(fault: str, scratch: Path) -> dict[str, Any]:
    """Write the records of a run in which node3 is slow. Return the fields of a trial's line."""
    run = RunBuilder(scratch / fault, gpu=fault == "clock", **STRAGGLER).write()
    if fault == "clock":
        change_lines(run / "nodes/node3/machine.1.jsonl", throttle)
    else:
        for node in range(1, 5):
            path = run / f"nodes/node{node}/machine.1.jsonl"
            path.unlink()
            record(path, "thrashing" if node == 3 else "quiet", pytest.MonkeyPatch())
    analysis = analyse(run)
    summary, accounting = analysis.summary, analysis.accounting
    return {
        "report": report_answer(summary, analysis.silent_ranks),
        "verdict": analysis.verdict.headline if analysis.verdict else "",
        "accounted": round(sum(accounting.seconds.values()) / accounting.wall, 4),
    }


def throttle(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of machine.jsonl with a lower clock of its GPUs."""
    return {**line, "gpus": [{**gpu, "clock_sm": 600} for gpu in line.get("gpus", [])]}
