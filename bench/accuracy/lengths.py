"""Make the tables of the second study in README.md: ways to begin a run, and lengths of runs on two
tasks.

    python bench/accuracy/lengths.py

Runs are those of runs.jsonl, conclusions those of PROTOCOL.md. Differences are of top-1 in points,
over runs of one seed; intervals Student's, of 95 %.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import study  # noqa: E402
from study import CODED, EXACT, FONTS, GLYPHS, OTHER_RATE, Results  # noqa: E402
from tables import put, signed  # noqa: E402

PAGE = HERE / "README.md"
TASKS = {GLYPHS: "glyphs", FONTS: "fonts"}
STARTS = {
    "none": "none is exact",
    "ef:4": "`ef:4` instead of exact sums",
    "fifth": "a fifth of them exact",
    "ef:8": "`ef:8` instead",
    "bf16": "`bf16` instead",
}
LEAST = 24  # pairs that a label needs


class Arm(NamedTuple):
    """Pairs of runs that differ by their strategy alone; `how`: the optimizer, for a table."""

    how: str
    optimizer: str
    rate: float  # times the task's rate


ARMS = (
    Arm("SGD", "sgd", 1),
    Arm("SGD at twice the rate", "sgd", OTHER_RATE),
    Arm("AdamW", "adamw", 1),
)


def differences(found: Results, task: int, epochs: int, arm: Arm = ARMS[0]) -> list[float]:
    """Points of ef:1.6 less those of all-reduce, of all pairs there are."""
    rates = [lr for lr in study.TRIED[task, arm.optimizer] if rate_is_known(found, task, arm)]
    if not rates:
        return []
    lr = arm.rate * study.best_rate(found, task, arm.optimizer)

    def of(sync: str) -> dict[int, float]:
        return {
            one.seed: top1
            for one, top1 in found.items()
            if one == study.case(lr, sync, one.seed, task, epochs, optimizer=arm.optimizer)
            and one.seed not in study.TRIAL_SEEDS
        }

    exact, coded = of(EXACT), of(CODED)
    return [100 * (coded[seed] - exact[seed]) for seed in sorted(exact.keys() & coded.keys())]


def rate_is_known(found: Results, task: int, arm: Arm) -> bool:
    runs = [run for some in study.trials(task, arm.optimizer).values() for run in some]
    return found.keys() >= set(runs)


def safe_from(found: Results) -> int | None:
    """Steps from which on PROTOCOL.md calls ef:1.6 safe on both tasks; None: from none, or not all
    runs of lengths are done."""
    for stage in (study.screening, study.confirming, study.lengths):
        if not found.keys() >= set(stage(found)):
            return None
    for shortest in (epochs for epochs in study.LENGTHS if epochs <= 16):
        pooled = [
            [
                d
                for epochs in study.LENGTHS
                if epochs >= shortest
                for d in differences(found, task, epochs)
            ]
            for task in TASKS
        ]
        if all(len(one) >= LEAST and study.interval(one)[1] >= study.WORST for one in pooled):
            return shortest * study.EPOCH_STEPS
    return None


def cells(values: list[float]) -> list[str]:
    """Pairs, their mean and its interval."""
    if len(values) < 2:
        return [str(len(values)), "-", "-"]
    mean, low, high = study.interval(values)
    return [str(len(values)), signed(mean), f"{signed(low)} to {signed(high)}"]


def row(*told: str) -> str:
    return f"| {' | '.join(told)} |"


def lengths_table(found: Results) -> list[str]:
    rows = [
        row("task", "optimizer", "steps", "pairs", "difference", "95 % interval"),
        row(*["---"] * 6),
    ]
    for arm in ARMS:
        for task, name in TASKS.items():
            for epochs in study.LENGTHS:
                values = differences(found, task, epochs, arm)
                if values:
                    steps = f"{epochs * study.EPOCH_STEPS:,}"
                    rows.append(row(name, arm.how, steps, *cells(values)))
    return rows


def against_today(found: Results, task: int, start: str) -> list[float]:
    """Points of a start less those of exact sums, of all pairs there are."""
    lr = study.best_rate(found, task, "sgd")
    seeds = [
        one.seed
        for one in found
        if one == study.case(lr, CODED, one.seed, task, start=start)
        and study.case(lr, CODED, one.seed, task) in found
    ]
    return study.against_the_usual(found, lr, seeds, task, start)


def starts_table(found: Results) -> list[str]:
    rows = [
        row("the first steps", "task", "pairs", "difference", "95 % interval"),
        row(*["---"] * 5),
    ]
    for start, title in STARTS.items():
        for task, name in TASKS.items():
            values = against_today(found, task, start)
            if values:
                rows.append(row(title, name, *cells(values)))
    return rows


def main() -> None:
    found = study.results(study.known())
    page = put(PAGE.read_text(encoding="utf-8"), "starts", starts_table(found))
    PAGE.write_text(put(page, "lengths", lengths_table(found)), encoding="utf-8")
    label = safe_from(found)
    print(f"safe from {label} steps on" if label else "no length is called safe, or runs are left")


if __name__ == "__main__":
    main()
