"""Make the runs of AdamW at tuned rates, and print what they show (PROTOCOL.md).

    python bench/accuracy/adamw.py --fonts DIR [--lines FILE]

This makes one run after another, in the order of the protocol, and continues where it was stopped.
`--left` prints how many runs are left, and `--table` prints the tables.
"""

from __future__ import annotations

import argparse
import fcntl
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import study  # noqa: E402
import text  # noqa: E402
import torch  # noqa: E402
from study import CONVNEXT, EXACT, FONTS, GLYPHS, Case, confidence_interval  # noqa: E402

from bench import markdown  # noqa: E402

SEEDS = range(13, 25)
TUNING_SEEDS = (101, 102)
LOWEST_RATE = 0.001  # half of the rate in study.RATES
TITLES = {GLYPHS: "glyphs", FONTS: "fonts", CONVNEXT: "glyphs, ConvNeXt"}
CONVNEXT_SEEDS = TEXT_SEEDS = range(13, 19)


class Arm(NamedTuple):
    """One kind of run. `start`: as in study.Case. `factor`: of the tuned learning rate."""

    title: str
    sync: str
    start: str = ""
    factor: float = 1.0

    def case(self, task: int, rate: float, seed: int) -> Case:
        # Rounded, so that a run finds its own line, in which the product may differ in a last bit.
        rate = rate if self.factor == 1.0 else round(self.factor * rate, 9)
        return Case(self.sync, seed, lr=rate, task=task, optimizer="adamw", start=self.start)


FORWARDS = Arm("`allreduce`", EXACT)
BACKWARDS = Arm("`allreduce`, summed backwards", EXACT, "backwards")
LOWER, HIGHER = (Arm(f"`allreduce` at {x:g} x", EXACT, factor=x) for x in (0.9, 1.1))
CODED = (
    Arm("`ef:5:own`, 75 exact steps", "ef:5:own"),
    Arm("`ef:5:own`, no exact steps", "ef:5:own", "none"),
)
STEPS_3_AND_4 = (  # their code is gone (README.md)
    Arm("`ef:5:own`, matched, 75 exact steps first", "ef:5:own", "matched"),
    Arm("`ef:5:own`, matched, no exact steps first", "ef:5:own", "matched none"),
    Arm("`ef:5:own`, exact at growing intervals", "ef:5:own", "growing"),
    Arm("`ef:5:own`, exact at growing intervals, errors rescaled", "ef:5:own", "rescaled growing"),
    Arm("`ef:5:own`, 75 exact steps, errors rescaled", "ef:5:own", "rescaled"),
)
ARMS = (FORWARDS, BACKWARDS, *CODED, LOWER, HIGHER)
CONVNEXT_ARMS = (FORWARDS, BACKWARDS, *CODED)
ONE_TASK_SPECS = ("bf16", "ef:15:peak")  # with SGD, their labels rested on glyphs alone


class Tuning(NamedTuple):
    """A task's learning rate. `rate`: None until all runs are there. `missing`: the next runs."""

    rate: float | None
    missing: list[Case]
    accuracies: dict[float, float]  # mean top-1, in per cent, by rate


def tune(results: study.Accuracies, task: int) -> Tuning:
    """Double the rate of all-reduce until its accuracy falls, and choose the best rate."""
    accuracies: dict[float, float] = {}
    rate = LOWEST_RATE
    while True:
        cases = [FORWARDS.case(task, rate, seed) for seed in TUNING_SEEDS]
        missing = [case for case in cases if case not in results]
        if missing:
            return Tuning(None, missing, accuracies)
        accuracies[rate] = 100 * statistics.fmean(results[case] for case in cases)
        if accuracies[rate] < accuracies.get(rate / 2, 0.0):
            return Tuning(max(accuracies, key=accuracies.__getitem__), [], accuracies)
        rate *= 2


def missing_pairs(
    results: study.Accuracies, tasks: tuple[int, ...], arms: tuple[Arm, ...], seeds: Iterable[int]
) -> Iterator[Case]:
    """Yield the runs of these arms that are still to make, of tasks whose rate is chosen."""
    for task in tasks:
        rate = tune(results, task).rate
        if rate is not None:
            # All runs of a seed follow each other, so that a study that is cut off has whole pairs.
            cases = [arm.case(task, rate, seed) for seed in seeds for arm in arms]
            yield from (case for case in cases if case not in results)


def missing_texts(lines: list[dict]) -> Iterator[dict]:
    """Yield the runs of the language model that are still to make."""
    for seed in TEXT_SEEDS:
        for spec in (EXACT, "ef:5:own"):
            case = text.case(spec, seed)
            if not any(case.items() <= line.items() for line in lines):
                yield case


def missing_runs(lines: list[dict], tasks: tuple[int, ...]) -> Iterator[Case]:
    """Yield the runs of images that are still to make, in the protocol's order. `tasks`: those of
    steps 1 to 3."""
    results = study.accuracy_by_case(lines)
    # Steps 1 and 2.
    for task in tasks:
        yield from tune(results, task).missing
    yield from missing_pairs(results, tasks, ARMS, SEEDS)
    # Step 5.
    yield from tune(results, CONVNEXT).missing
    yield from missing_pairs(results, (CONVNEXT,), CONVNEXT_ARMS, CONVNEXT_SEEDS)
    # The runs with SGD that the protocol asks for after these.
    if FONTS in tasks:
        for seed in range(1, 13):
            cases = [Case(sync, seed, task=FONTS) for sync in (EXACT, *ONE_TASK_SPECS)]
            yield from (case for case in cases if case not in results)


class Baseline(NamedTuple):
    """The accuracy of all-reduce at the tuned rate."""

    accuracies: dict[int, float]  # by seed: the mean of both exact arms, in per cent
    points_per_percent: float | None  # top-1 that 1 % of the learning rate is worth


def accuracies_of(results: study.Accuracies, arm: Arm, task: int, rate: float) -> dict[int, float]:
    """Return {seed: top-1 in per cent} of an arm's finished runs."""
    cases = {seed: arm.case(task, rate, seed) for seed in SEEDS}
    return {seed: 100 * results[case] for seed, case in cases.items() if case in results}


def slopes(results: study.Accuracies, task: int, rate: float) -> list[float]:
    """Return for each seed how many points of top-1 a learning rate is worth that is 1 % higher."""
    lower, higher = (accuracies_of(results, arm, task, rate) for arm in (LOWER, HIGHER))
    percent = 100 * (HIGHER.factor - LOWER.factor)
    return [(higher[seed] - lower[seed]) / percent for seed in sorted(lower.keys() & higher.keys())]


def baseline(results: study.Accuracies, task: int, rate: float) -> Baseline:
    exact = [accuracies_of(results, arm, task, rate) for arm in (FORWARDS, BACKWARDS)]
    seeds = sorted(exact[0].keys() & exact[1].keys())
    means = {seed: statistics.fmean(arm[seed] for arm in exact) for seed in seeds}
    points = slopes(results, task, rate)
    return Baseline(means, statistics.fmean(points) if points else None)


def with_interval(values: list[float], digits: int = 2) -> str:
    """Return the mean, and its 95 % interval in brackets, for a cell."""
    mean, low, high = confidence_interval(values)
    ends = "" if low is None else f" ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"{mean:+.{digits}f}{ends}"


def difference_table(lines: list[dict]) -> str:
    """Compare each arm with the mean of both exact arms. Of a coded arm, show how much of the
    difference a changed length of Adam's steps explains."""
    results = study.accuracy_by_case(lines)
    step_lengths = {
        case: line["step_length"]
        for line in lines
        if "step_length" in line
        for case in study.accuracy_by_case([line])
    }
    rows = []
    for task, title in TITLES.items():
        rate = tune(results, task).rate
        if rate is None:
            continue
        base = baseline(results, task, rate)
        for arm in (*ARMS, *STEPS_3_AND_4):
            accuracies = accuracies_of(results, arm, task, rate)
            seeds = sorted(accuracies.keys() & base.accuracies.keys())
            if not seeds:
                continue
            differences = [accuracies[seed] - base.accuracies[seed] for seed in seeds]
            cells = [title, f"{rate:g}", arm.title, str(len(seeds)), with_interval(differences)]
            ratios = [step_lengths.get(arm.case(task, rate, seed)) for seed in seeds]
            if None in ratios or base.points_per_percent is None:
                cells += ["", "", ""]
            else:
                explained = [100 * (ratio - 1) * base.points_per_percent for ratio in ratios]
                remaining = [d - e for d, e in zip(differences, explained)]
                cells += [f"x {statistics.fmean(ratios):.3f}"]
                cells += [f"{statistics.fmean(explained):+.2f}", with_interval(remaining)]
            rows.append(cells)
        points = slopes(results, task, rate)
        if points:
            worth = f"1 % of the rate is worth {with_interval(points, 3)} points"
            rows.append([title, f"{rate:g}", worth, str(len(points)), "", "", "", ""])
    head = ["task", "rate", "run", "pairs", "difference, points (95 % interval)"]
    head += ["Adam's step length", "which explains", "what remains"]
    return markdown.table(head, rows)


def tuning_table(lines: list[dict]) -> str:
    """Show the accuracy of all-reduce at each rate that was tried."""
    rows = []
    for task, title in TITLES.items():
        tuning = tune(study.accuracy_by_case(lines), task)
        for rate, accuracy in tuning.accuracies.items():
            chosen = " (chosen)" if rate == tuning.rate else ""
            rows.append([title, f"{rate:g}{chosen}", f"{accuracy:.2f}"])
    return markdown.table(["task", "rate", "top-1 of seeds 101 and 102, %"], rows)


def text_table(lines: list[dict]) -> str:
    """Compare the language model's loss with that of all-reduce, in pairs of one seed."""
    exact, coded = text.losses_of(lines, EXACT), text.losses_of(lines, "ef:5:own")
    seeds = sorted(exact.keys() & coded.keys())
    differences = [100 * (coded[seed] / exact[seed] - 1) for seed in seeds]
    rows = [["`ef:5:own`", str(len(seeds)), with_interval(differences)]] if seeds else []
    return markdown.table(["language model", "pairs", "loss above all-reduce's, %"], rows)


def tables(lines: list[dict], text_lines: list[dict]) -> str:
    """Return all tables of this study."""
    return "\n\n".join([tuning_table(lines), difference_table(lines), text_table(text_lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--fonts", type=Path, help="the folder that fonts.py filled; none: skip this task"
    )
    parser.add_argument("--lines", type=Path, default=study.LINES, help="file of finished runs")
    parser.add_argument("--text", type=Path, default=text.LINES, help="of the language model")
    parser.add_argument("--left", action="store_true", help="print how many runs are left")
    parser.add_argument("--table", action="store_true", help="print what the runs show")
    options = parser.parse_args()
    if options.table:
        print(tables(study.read_runs(options.lines), text.read_runs(options.text)))
        return
    tasks = (GLYPHS, FONTS) if options.fonts else (GLYPHS,)
    torch.set_num_threads(1)
    with options.lines.open("a+") as file:
        if not options.left:
            fcntl.flock(file, fcntl.LOCK_EX)  # two processes would make the same runs
        # Each run may change which runs are next: the accuracies at a rate choose the next rate.
        while True:
            missing = list(missing_runs(study.read_runs(options.lines), tasks))
            texts = list(missing_texts(text.read_runs(options.text)))
            if options.left:
                print(f"{len(missing)} runs of images and {len(texts)} of text are left")
                return
            if missing:
                images = study.images(missing[0].task, missing[0].seed, options.fonts)
                study.append_line(file, study.train_case(missing[0], images))
            elif texts:
                line = text.train_case(texts[0])
                with options.text.open("a") as text_file:
                    study.append_line(text_file, line)
            else:
                return


if __name__ == "__main__":
    main()
