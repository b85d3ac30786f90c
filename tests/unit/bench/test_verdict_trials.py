"""The trials of the verdict: each is judged by the rule that stands in its table."""

import pytest

from bench.verdict import tables, trials
from bench.verdict.faults import Faults
from bench.verdict.recorded import make_recorded


def test_forty_trials_half_of_them_of_a_script_have_a_fault_that_can_be_made():
    every = trials.all_trials()
    assert [len(every), sum(trial.variant.script for trial in every)] == [40, 20]
    assert [trial.name for trial in every[:2]] == ["nothing-1", "nothing-2"]
    assert all(hasattr(Faults, trial.fault.method) for trial in every if trial.fault.method)


def line(name, report, **more):
    return {"trial": name, "report": report, "accounted": 0.98, **more}


def test_a_wrong_verdict_stands_in_its_row_and_a_remedy_beside_what_came(capsys):
    lines = [
        line("rate-1", "compute", live="network", grew="network"),
        line("slow-link-1", "slow_link", live="network", grew="slow_link"),
        line("nothing-1", "compute", live="compute", busy=0.2),
        line("rate-1+SYNC", "compute", value="bf16", predicted=100.0, came=90.0),
        {"trial": "hang-1", "broken": "AssertionError: no step"},
    ]
    rows = {
        row.split("|")[1].split(":")[0].strip(): row
        for row in tables.matrix(lines).split("\n")[2:-1]
    }
    assert "| 0 of 1 (1 x `compute`) | 1 of 1 | 1 of 1 |" in rows["rate"]
    assert "| 1 of 1 | 1 of 1 | 1 of 1 |" in rows["slow link"]
    assert "| - | - | - |" in rows["hang"]
    assert "| rate-1 | SYNC=bf16 | 100.0 | 90.0 | -10 % |" in tables.remedies(lines)
    assert tables.conclude(lines) == 1
    assert "2 of 40 right, 3 of 3 live; 1 network faults" in capsys.readouterr().out


def test_what_advice_says_is_what_is_typed():
    advice = [
        {"change": "SYNC=ef:5: five levels a value (accuracy: safe)"},
        {"change": 'tandem.sync.attach(model, "bf16", optimizer=optimizer) in the script: bf16'},
        {"change": "NODES=1: one machine alone instead of 4"},
        {"change": "twice the loader processes (--workers)"},
    ]
    typed = {name: trials.find_remedy(name, advice) for name in trials.REMEDIES}
    assert {name: entry and entry[1] for name, entry in typed.items()} == {
        **{"SYNC": "ef:5", "NODES": "1", "WORKERS": "2"},
        **dict.fromkeys(("BATCH", "BALANCE", "SAVING")),
    }
    assert trials.find_remedy("SYNC", advice[1:])[1] == "bf16"


def test_a_rank_that_stands_alone_is_what_a_run_that_was_stopped_waited_for():
    silent = ["ranks 0 (node1), 1 (node2), silent for 31 s: is at trainer/step.py:9, in step"]
    silent.append("rank 2 (node3), silent for 31 s: is at verdict/workload.py:99, in forward")
    summary = {"status": "stopped", "bottleneck": "compute", "first_cause": None}
    assert trials.report_answer(summary, silent) == "node3-stands"
    missed = (
        "node3, rank 2 did not enter sum 31 (bucket 0). It is at a.py:9, in f. Ranks 0 and 1 have"
    )
    silent = [
        f"{missed} waited in this sum for 31 s",
        silent[0],
        "Tandem cannot tell which rank is missing",
    ]
    assert trials.report_answer(summary, silent) == "node3-stands"
    assert trials.report_answer(summary, []) == "compute"
    failed = {**summary, "status": "failed", "first_cause": {"host": "node2"}}
    assert trials.report_answer(failed, []) == "node2-ended"
    hang = {"state": "running", "hang": {"ranks": [["node3", 2]]}, "bottleneck": "compute"}
    assert trials.live_answer(hang) == "node3-stands"


@pytest.mark.parametrize("fault", ["clock", "memory"])
def test_machines_of_records_have_their_verdict(fault, tmp_path):
    seen = make_recorded(fault, tmp_path)
    assert (seen["report"], seen["accounted"] > 0.97) == (trials.FAULTS[fault].right, True)
