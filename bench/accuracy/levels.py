"""How many levels `ef` needs, and of which scale: the runs of PROTOCOL.md's "Levels and scales".

    python bench/accuracy/levels.py [--fonts DIR] [--lines FILE] [--text FILE]

goes on where it was broken off, one run at a time, and takes what tells most first; --table prints
what is there, and --pages writes it into README.md. Runs are study.py's and text.py's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import adamw  # noqa: E402
import study  # noqa: E402
import text  # noqa: E402
import torch  # noqa: E402
from study import EXACT, FONTS, GLYPHS, RATES, WARMUP, Case, interval  # noqa: E402
from tables import put, signed  # noqa: E402

from contract import strategies  # noqa: E402

PAGE = HERE / "README.md"
CONTROL = "control"  # all-reduce, summed in another order
PEAKS, OWNS = ("ef:5:peak", "ef:3:peak"), ("ef:5:own", "ef:3:own", "ef:15:own")
TEXT = (EXACT, "ef:5:own", "ef:15:peak", "ef:5:peak", "ef:3:peak")


STARTED = {"": "", "none": ", no exact steps", "15": ", the first steps by 15 levels"}


class Text(NamedTuple):
    """Runs of text.py, of so many seeds."""

    specs: tuple[str, ...]
    seeds: int
    words: bool = False
    ranks: int = 2


class Stage(NamedTuple):
    """Pairs of one kind. `times`: the task's usual rate; `start`, `step`: as in study.Case."""

    task: int
    optimizer: str
    specs: tuple[str, ...]
    seeds: range
    times: int = 1
    epochs: int = study.EPOCHS
    start: str = ""
    step: float = 0.0

    def case(self, spec: str, seed: int) -> Case:
        lr = RATES[self.task, self.optimizer] * self.times
        warmup = WARMUP * self.epochs / study.EPOCHS
        start, step = (self.start, self.step) if spec.startswith("ef") else ("", 0.0)
        if spec == CONTROL:
            spec, start = EXACT, "backwards"
        return Case(spec, seed, self.epochs, lr, self.task, self.optimizer, warmup, start, step)

    def cases(self) -> Iterator[Case]:
        return (self.case(spec, seed) for seed in self.seeds for spec in (EXACT, *self.specs))


FIRST, CHOSEN = range(1, 7), range(7, 37)
TWELVE = range(1, 13)
STARTS: tuple[Stage, ...] = (  # of PROTOCOL.md's "Starts of five levels"
    *(Stage(FONTS, "adamw", ("ef:5:own",), TWELVE, start=start) for start in ("none", "15", "")),
    *(Stage(FONTS, "sgd", ("ef:5:peak",), TWELVE, start=start) for start in ("none", "15", "")),
    *(Stage(GLYPHS, "sgd", ("ef:5:peak",), range(1, 25), start=start) for start in ("none", "15")),
    *(Stage(GLYPHS, "adamw", ("ef:5:own",), TWELVE, start=start) for start in ("none", "15", "")),
    Stage(FONTS, "sgd", ("bf16", "ef:15:peak"), TWELVE),
    Stage(FONTS, "adamw", ("bf16", CONTROL), TWELVE),
)
STEPS: tuple[Stage, ...] = tuple(  # of PROTOCOL.md's "Steps of own scales"
    Stage(task, "adamw", ("ef:15:own",), TWELVE, start="none", step=step)
    for task in (FONTS, GLYPHS)
    for step in (0.8, 0.0)
)
STAGES: tuple[Stage | Text, ...] = (  # in order
    *STARTS,
    *STEPS,
    Stage(GLYPHS, "adamw", ("ef:5:own",), FIRST),
    Stage(GLYPHS, "sgd", ("ef:5:own", "ef:5:peak"), FIRST),
    Stage(GLYPHS, "adamw", ("ef:5:own",), FIRST, start="none"),
    Stage(GLYPHS, "adamw", ("ef:5:own", CONTROL), FIRST, times=2),
    Stage(GLYPHS, "sgd", ("ef:5:own", "ef:5:peak", CONTROL), FIRST, times=2),
    Stage(GLYPHS, "sgd", ("ef:5:own", "ef:5:peak"), FIRST, start="none"),
    Text(TEXT[:3], 3),
    Text(TEXT[:3], 3, ranks=4),
    Stage(GLYPHS, "adamw", ("ef:3:own", "ef:5:peak"), FIRST),
    Stage(GLYPHS, "sgd", ("ef:3:own", "ef:3:peak"), FIRST),
    Stage(FONTS, "adamw", ("ef:5:own",), FIRST),
    Stage(FONTS, "sgd", ("ef:5:own", "ef:5:peak", "ef:3:peak"), FIRST),
    Text(TEXT, 8),
    Stage(GLYPHS, "adamw", ("ef:5:own",), CHOSEN),
    Stage(GLYPHS, "sgd", ("ef:5:own", "ef:5:peak"), CHOSEN),
    Stage(FONTS, "adamw", ("ef:5:own",), range(7, 25)),
    Stage(FONTS, "sgd", ("ef:5:own", "ef:5:peak"), range(7, 25)),
    Stage(GLYPHS, "adamw", ("ef:5:own",), range(1, 9), epochs=32),
    Stage(GLYPHS, "sgd", ("ef:5:own", "ef:5:peak"), range(1, 9), epochs=32),
    Stage(GLYPHS, "sgd", ("ef:5:own", "ef:5:peak"), range(7, 13), times=2),
    Stage(GLYPHS, "adamw", ("ef:5:own",), range(7, 13), times=2),
    Text(TEXT[:2], 3, words=True),
)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def by_todays_names(results: study.Results) -> study.Results:
    """With the scale that the optimizer makes of each name."""
    kept = {}
    for case, top1 in results.items():
        strategy = strategies.parse_or_none(case.sync)
        if strategy is not None:
            spec = strategy.of("sgd" if case.optimizer == "sgd" else "adam").spec
            kept[replace(case, sync=spec)] = top1
    return kept


def differences(found: study.Results, stage: Stage, spec: str) -> list[float]:
    """Points against all-reduce, of all pairs of this kind there are."""
    seeds = [one.seed for one in found if one == stage.case(spec, one.seed)]
    pairs = [(stage.case(spec, seed), stage.case(EXACT, seed)) for seed in sorted(seeds)]
    return [100 * (found[own] - found[base]) for own, base in pairs if base in found]


def text_rows(lines: list[dict]) -> Iterator[str]:
    names = ("ranks", "words", "steps", "lr", "gloo")
    keys = sorted({tuple(one[name] for name in names) for one in lines})
    for key in keys:
        shape = dict(zip(names, key))
        same = [one for one in lines if shape.items() <= one.items()]
        base = {one["seed"]: one["loss"] for one in same if one["sync"] == EXACT}
        for spec in TEXT[1:]:
            own = {one["seed"]: one["loss"] for one in same if one["sync"] == spec}
            more = [100 * (own[seed] / base[seed] - 1) for seed in sorted(own.keys() & base.keys())]
            if more:
                mean, low, high = interval(more)
                ends = "-" if low is None else f"{signed(low)} to {signed(high)}"
                kind = "words" if shape["words"] else "characters"
                name = f"Python's sources, {kind}, {shape['ranks']} ranks"
                name += " over Gloo" if shape["gloo"] else ""
                cells = name, "AdamW", f"{shape['steps']:,}", f"`{spec}`", str(len(more))
                yield row(*cells, f"{signed(mean)} % of the loss", ends)


def table(found: study.Results, lines: list[dict]) -> list[str]:
    heads = ("task", "optimizer", "steps", "SYNC", "pairs", "difference, points", "95 % interval")
    rows, seen = [row(*heads), row(*["---"] * 7)], set()
    for stage in STAGES:
        if isinstance(stage, Text):
            continue
        for spec in (*OWNS, *PEAKS, "ef:15:peak", "bf16", CONTROL):
            key = stage._replace(specs=(), seeds=FIRST), spec
            values = differences(found, stage, spec)
            if key in seen or not values or (stage.start and not spec.startswith("ef")):
                continue
            seen.add(key)
            mean, low, high = interval(values)
            ends = "-" if low is None else f"{signed(low)} to {signed(high)}"
            task = "glyphs" if stage.task == GLYPHS else "fonts"
            how = "SGD" if stage.optimizer == "sgd" else "AdamW"
            how += f" at {stage.times} x" if stage.times > 1 else ""
            how += STARTED[stage.start]
            how += f", steps of {stage.step} RMS" if stage.step else ""
            name = "`allreduce`, summed backwards" if spec == CONTROL else f"`{spec}`"
            steps = f"{stage.epochs * study.EPOCH_STEPS:,}"
            rows.append(row(task, how, steps, name, str(len(values)), signed(mean), ends))
    return [*rows, *text_rows(lines)]


def left(found: study.Results, lines: list[dict], has_fonts: bool) -> Iterator[Case | dict]:
    """What is still to be run, in order."""
    for stage in STAGES:
        if isinstance(stage, Text):
            for seed in range(1, stage.seeds + 1):
                for spec in stage.specs:
                    case = text.case(spec, seed, words=stage.words, ranks=stage.ranks)
                    if not any(case.items() <= line.items() for line in lines):
                        yield case
        elif has_fonts or stage.task == GLYPHS:
            yield from (case for case in stage.cases() if case not in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fonts", type=Path, help="the folder that fonts.py filled")
    parser.add_argument("--lines", type=Path, default=study.LINES)
    parser.add_argument("--text", type=Path, default=text.LINES)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--pages", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    while True:
        found, lines = (
            by_todays_names(study.results(study.known(options.lines))),
            text.known(options.text),
        )
        if options.table:
            runs = study.known(options.lines)
            tables = table(found, lines), adamw.tuning_table(runs), adamw.table(runs)
            print("\n\n".join("\n".join(rows) for rows in tables))
        if options.pages:
            page = put(PAGE.read_text(encoding="utf-8"), "levels", table(found, lines))
            PAGE.write_text(page, encoding="utf-8")
        case = next(left(found, lines, options.fonts is not None), None)
        if case is None or options.table or options.pages:
            return
        if isinstance(case, dict):
            line, file = text.carry_out(case), options.text
        else:
            data = study.images(case.task, case.seed, options.fonts if case.task == FONTS else None)
            line, file = study.carry_out(case, data), options.lines
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
