"""Trials that a seed draws: each says before it runs what is right."""

import json

import pytest

from bench.verdict import blind
from bench.verdict.faults import Faults
from tests.unit.report.report_runs import RunBuilder, change_lines


def test_a_seed_draws_forty_trials_of_which_half_are_healthy():
    trials = blind.draw("a")
    assert trials == blind.draw("a") != blind.draw("b")
    assert len(trials) == 40 and sum(trial.healthy for trial in trials) >= 20
    assert sum(len(trial.right) == 2 for trial in trials) == 4
    assert sum(trial.begins > 0 for trial in trials) == 4
    assert sum(trial.ends is not None for trial in trials) == 2
    for seed in "abcdefgh":
        for trial in blind.draw(seed):
            assert all(hasattr(Faults, method) for method, _ in trial.faults)
            assert trial.nodes == 4 or trial.healthy
            assert len({*trial.right}) == len(trial.right)


def waiting(folder, since):
    """A run of 300 s whose ranks wait for gradients for most of a step, from step `since` on."""
    made = RunBuilder(folder / "run", steps=600, epochs=1, step={"sync_exposed": 0.3}).write()

    def before(line):
        if line["kind"] == "step" and line["step"] < since:
            line["seconds"]["sync_exposed"] = 0.01
        return line

    for path in made.glob("nodes/*/rank*"):
        change_lines(path, before)
    return made


def test_status_is_asked_afterwards_by_the_records_as_they_were_then(tmp_path):
    """The fault begins after 200 steps of 0.14 s, and each answer looks 40 s back."""
    begin = 1.7e9 + 200 * 0.138
    series = list(blind.answers(waiting(tmp_path, 200), begin, begin + 62))
    assert [since for since, _ in series] == [5.0 * count for count in range(1, 13)]
    assert series[0][1] == "compute" and {answer for _, answer in series[-4:]} == {"network"}
    trial = trial_of("rate")
    found = blind.live_seconds(trial, series)
    assert 10 <= found <= 30 and dict(series)[found] == "network"
    assert blind.live_seconds(trial._replace(ends=1.0), series) == 5.0  # nothing wrong is right
    assert blind.live_seconds(trial._replace(right=("h2d",)), series) is None


def test_a_run_that_stands_is_told_by_the_time_at_which_its_last_step_was_recorded(tmp_path):
    made = RunBuilder(tmp_path / "run", steps=600, epochs=1).write()
    stall = {"kind": "stall", "category": "sync_exposed", "step": 200, "idle": 5.0}
    for path in made.glob("nodes/*/rank*"):
        kept = path.read_text().splitlines(keepends=True)[:201]
        path.write_text("".join([*kept, json.dumps(stall), "\n"]))
    answers = dict(blind.answers(made, 1.7e9 + 200 * 0.138, 1.7e9 + 80))
    assert answers[5.0] == "compute" and answers[25.0] == "stands"


def test_one_right_answer_among_wrong_ones_is_chance():
    series = [(5.0, "network"), (10.0, "h2d"), (15.0, "network"), (20.0, "network")]
    assert blind.live_seconds(trial_of("rate"), series) == 15.0


def trial_of(*kinds, **more):
    right = tuple(blind.CAUSES[kind] for kind in kinds) or ("compute",)
    values = {"script": False, "nodes": 4, "usual": {}, "faults": (), "right": right, **more}
    return blind.Blind("blind-1", kinds, **values)


@pytest.mark.parametrize(
    ("trial", "report", "second", "right"),
    [
        (trial_of(), "none", "network", True),
        (trial_of(), "network", None, False),
        (trial_of("rate"), "network", "h2d", True),
        (trial_of("rate"), "compute", "network", False),
        (trial_of("rate", "copies"), "network", "h2d", True),
        (trial_of("rate", "copies"), "h2d", "network", False),
        (trial_of("rate", ends=30.0), "compute", "network", True),
        (trial_of("rate", ends=30.0), "compute", "h2d", False),
    ],
)
def test_what_is_right_is_the_larger_fault_and_then_the_other(trial, report, second, right):
    line = {"report": report, "runner_up": second and {"cause": second, "fraction": 0.3}}
    assert blind.is_right(trial, line) == right


def test_a_table_has_intervals_and_false_alarms():
    lines = []
    for trial in blind.draw("a"):
        second = {"cause": trial.right[-1], "fraction": 0.3}
        line = {"trial": trial.name, "report": trial.right[0], "runner_up": second, "commit": "c0"}
        lines.append({**line, "live": [[5.0, "compute"], [10.0, "compute"]]})
    first = next(number for number, trial in enumerate(blind.draw("a")) if trial.healthy)
    lines[first] = {**lines[first], "report": "network"}
    lines[0 if first else 1]["broken"] = "AssertionError"
    text = blind.table("a", lines)
    assert "rules of c0: 39 trials" in text
    assert "- right: 38 of 39 (87 to 100 %)" in text
    assert "- false alarms among healthy runs: 1 of 2" in text
    assert "| `compute` |" in text and "before" in text
