"""AdamW at tuned rates: the runs and the table of PROTOCOL.md's section of that name.

    python bench/accuracy/adamw.py --fonts DIR [--lines FILE]

makes one run after another, in the order of the protocol, and continues where it was stopped.
`--left` prints how many runs are left, and `--table` prints what the runs show.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import study  # noqa: E402
import text  # noqa: E402
import torch  # noqa: E402
from study import CONVNEXT, EXACT, FONTS, GLYPHS, Case, interval  # noqa: E402

SEEDS = range(13, 25)
TUNING_SEEDS = (101, 102)
LOWEST_RATE = 0.001  # half of the rate that AdamW had before
TITLES = {GLYPHS: "glyphs", FONTS: "fonts", CONVNEXT: "glyphs, ConvNeXt"}
CONVNEXT_SEEDS = TEXT_SEEDS = range(13, 19)


class Arm(NamedTuple):
    """One kind of run. `start`: as in study.Case; `factor`: times the tuned learning rate."""

    title: str
    sync: str
    start: str = ""
    factor: float = 1.0

    def case(self, task: int, rate: float, seed: int) -> Case:
        rate = rate if self.factor == 1.0 else round(self.factor * rate, 9)
        return Case(self.sync, seed, lr=rate, task=task, optimizer="adamw", start=self.start)


FORWARDS = Arm("`allreduce`", EXACT)
BACKWARDS = Arm("`allreduce`, summed backwards", EXACT, "backwards")
LOWER, HIGHER = (Arm(f"`allreduce` at {x:g} x", EXACT, "", x) for x in (0.9, 1.1))
CODED = (
    Arm("`ef:5:own`, 75 exact steps", "ef:5:own"),
    Arm("`ef:5:own`, no exact steps", "ef:5:own", "none"),
)
MATCHED = (
    Arm("`ef:5:own`, matched, 75 exact steps first", "ef:5:own", "matched"),
    Arm("`ef:5:own`, matched, no exact steps first", "ef:5:own", "matched none"),
)
ARMS = (FORWARDS, BACKWARDS, *CODED, LOWER, HIGHER)
CONVNEXT_ARMS = (FORWARDS, BACKWARDS, *CODED)
LABELS = ("bf16", "ef:15:peak")  # with SGD on fonts, for labels that rest on glyphs alone


class Tuning(NamedTuple):
    """The choice of a task's learning rate. `rate`: None until all its runs are there; `missing`:
    those that are to be made next."""

    rate: float | None
    missing: list[Case]
    accuracies: dict[float, float]  # mean top-1, in per cent, by rate


def tune(results: study.Results, task: int) -> Tuning:
    """Double the rate of all-reduce until its accuracy falls, and take the best."""
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
    results: study.Results, tasks: tuple[int, ...], arms: tuple[Arm, ...], seeds: range = SEEDS
) -> Iterator[Case]:
    """The runs of these arms that are still to be made. Those whose rate is not known yet are not
    among them."""
    for task in tasks:
        rate = tune(results, task).rate
        if rate is not None:
            # All runs of a seed follow each other, so that a study that is cut off has whole pairs.
            cases = [arm.case(task, rate, seed) for seed in seeds for arm in arms]
            yield from (case for case in cases if case not in results)


def missing_texts(lines: list[dict]) -> Iterator[dict]:
    """The runs of the language model that are still to be made."""
    for seed in TEXT_SEEDS:
        for spec in (EXACT, "ef:5:own"):
            case = text.case(spec, seed, gloo=False)
            if not any(case.items() <= line.items() for line in lines):
                yield case


def missing_runs(lines: list[dict], tasks: tuple[int, ...]) -> Iterator[Case]:
    """The runs of images that are still to be made, in order."""
    results = study.results(lines)
    for task in tasks:
        yield from tune(results, task).missing
    yield from missing_pairs(results, tasks, ARMS)
    for task in tasks:  # the constant of runs without exact steps comes from these
        rate = tune(results, task).rate
        cases = [MATCHED[0].case(task, rate, seed) for seed in TUNING_SEEDS] if rate else []
        yield from (case for case in cases if case not in results)
    yield from missing_pairs(results, tasks, MATCHED)
    yield from tune(results, CONVNEXT).missing
    yield from missing_pairs(results, (CONVNEXT,), CONVNEXT_ARMS, CONVNEXT_SEEDS)
    if FONTS in tasks:
        for seed in range(1, 13):
            cases = [Case(sync, seed, task=FONTS) for sync in (EXACT, *LABELS)]
            yield from (case for case in cases if case not in results)


class Baseline(NamedTuple):
    """What all-reduce reaches at the tuned rate."""

    rate: float
    accuracies: dict[int, float]  # by seed: the mean of both exact arms, in per cent
    points_per_percent: float | None  # top-1 that 1 % of the learning rate is worth


def accuracies_of(results: study.Results, arm: Arm, task: int, rate: float) -> dict[int, float]:
    """Top-1 in per cent, by seed."""
    cases = {seed: arm.case(task, rate, seed) for seed in SEEDS}
    return {seed: 100 * results[case] for seed, case in cases.items() if case in results}


def slopes(results: study.Results, task: int, rate: float) -> list[float]:
    """Of each seed, the points of top-1 that 1 % of the learning rate is worth."""
    lower, higher = (accuracies_of(results, arm, task, rate) for arm in (LOWER, HIGHER))
    percent = 100 * (HIGHER.factor - LOWER.factor)
    return [(higher[seed] - lower[seed]) / percent for seed in sorted(lower.keys() & higher.keys())]


def baseline(results: study.Results, task: int, rate: float) -> Baseline:
    exact = [accuracies_of(results, arm, task, rate) for arm in (FORWARDS, BACKWARDS)]
    seeds = sorted(exact[0].keys() & exact[1].keys())
    means = {seed: statistics.fmean(arm[seed] for arm in exact) for seed in seeds}
    found = slopes(results, task, rate)
    return Baseline(rate, means, statistics.fmean(found) if found else None)


def with_interval(values: list[float], digits: int = 2) -> str:
    """The mean, and the 95 % interval in brackets."""
    mean, low, high = interval(values)
    ends = "" if low is None else f" ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"{mean:+.{digits}f}{ends}"


def table(lines: list[dict]) -> list[str]:
    """Differences against the mean of both exact arms, and what a changed step length explains."""
    results = study.results(lines)
    lengths = {
        case: line["step_length"]
        for line in lines
        if "step_length" in line
        for case in study.results([line])
    }
    rows = [
        "| task | rate | run | pairs | difference, points (95 % interval) | Adam's step length "
        "| which explains | what remains |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, title in TITLES.items():
        rate = tune(results, task).rate
        if rate is None:
            continue
        base = baseline(results, task, rate)
        for arm in (*ARMS, *MATCHED):
            own = accuracies_of(results, arm, task, rate)
            seeds = sorted(own.keys() & base.accuracies.keys())
            if not seeds:
                continue
            differences = [own[seed] - base.accuracies[seed] for seed in seeds]
            cells = [title, f"{rate:g}", arm.title, str(len(seeds)), with_interval(differences)]
            changes = [lengths.get(arm.case(task, rate, seed)) for seed in seeds]
            if None in changes or base.points_per_percent is None:
                cells += ["", "", ""]
            else:
                explained = [100 * (ratio - 1) * base.points_per_percent for ratio in changes]
                remaining = [d - e for d, e in zip(differences, explained)]
                cells += [f"x {statistics.fmean(changes):.3f}"]
                cells += [f"{statistics.fmean(explained):+.2f}", with_interval(remaining)]
            rows.append(f"| {' | '.join(cells)} |")
        found = slopes(results, task, rate)
        if found:
            worth = f"1 % of the rate is worth {with_interval(found, 3)} points"
            rows.append(f"| {title} | {rate:g} | {worth} | {len(found)} | | | | |")
    return rows


def tuning_table(lines: list[dict]) -> list[str]:
    """The accuracy of all-reduce at each rate that was tried."""
    rows = ["| task | rate | top-1 of seeds 101 and 102, % |", "|---|---|---|"]
    for task, title in TITLES.items():
        tuning = tune(study.results(lines), task)
        for rate, accuracy in tuning.accuracies.items():
            chosen = " (chosen)" if rate == tuning.rate else ""
            rows.append(f"| {title} | {rate:g}{chosen} | {accuracy:.2f} |")
    return rows


def text_table(lines: list[dict]) -> list[str]:
    """The language model's loss with `ef:5:own` beside all-reduce's, by seed."""
    losses = {}
    for spec in (EXACT, "ef:5:own"):
        cases = {seed: text.case(spec, seed, gloo=False) for seed in TEXT_SEEDS}
        losses[spec] = {
            seed: line["loss"]
            for seed, case in cases.items()
            for line in lines
            if case.items() <= line.items()
        }
    exact, coded = losses.values()
    more = [100 * (coded[seed] / exact[seed] - 1) for seed in sorted(exact.keys() & coded.keys())]
    rows = ["| language model | pairs | loss above all-reduce's, % |", "|---|---|---|"]
    return [*rows, f"| `ef:5:own` | {len(more)} | {with_interval(more)} |"] if more else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fonts", type=Path, help="the folder that fonts.py filled")
    parser.add_argument("--lines", type=Path, default=study.LINES, help="file of finished runs")
    parser.add_argument("--text", type=Path, default=text.LINES, help="of the language model")
    parser.add_argument("--left", action="store_true", help="print how many runs are left")
    parser.add_argument("--table", action="store_true", help="print what the runs show")
    options = parser.parse_args()
    if options.table:
        lines = study.known(options.lines)
        tables = tuning_table(lines), table(lines), text_table(text.known(options.text))
        print("\n\n".join("\n".join(rows) for rows in tables))
        return
    tasks = (GLYPHS, FONTS) if options.fonts else (GLYPHS,)
    torch.set_num_threads(1)
    with options.lines.open("a+") as file:
        if not options.left:
            fcntl.flock(file, fcntl.LOCK_EX)  # two processes would make the same runs
        while True:
            missing = list(missing_runs(study.known(options.lines), tasks))
            texts = list(missing_texts(text.known(options.text)))
            if options.left:
                print(f"{len(missing)} runs of images and {len(texts)} of text are left")
                return
            if missing:
                case = missing[0]
                drawn = options.fonts if case.task == FONTS else None
                line = json.dumps(study.carry_out(case, study.images(case.task, case.seed, drawn)))
                file.write(("" if study.ends_whole(options.lines) else "\n") + line + "\n")
                file.flush()
            elif texts:
                line = json.dumps(text.carry_out(texts[0]))
                with options.text.open("a") as out:
                    out.write(line + "\n")
            else:
                return
            print(line, flush=True)


if __name__ == "__main__":
    main()
