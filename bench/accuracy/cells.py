"""The cells of PROTOCOL.md's fifth point: seconds to all-reduce's accuracy, by link, seconds of
computing and number of machines.

    python bench/accuracy/cells.py [LINES ...]

Steps are those that a strategy's runs needed on the seeds that it has, for as many images whatever
the number of machines; the first steps are exact where its rule warms, as many as by default. A
step's seconds are those of `make plan` for ResNet-50.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import study  # noqa: E402
import tables  # noqa: E402

from contract.strategies import EXACT, parse  # noqa: E402
from report import formulas  # noqa: E402
from report.measure import Step  # noqa: E402
from report.published_speeds import paper_step  # noqa: E402

CELLS = [(mbit, work, n) for mbit in (1000, 100) for work in (0.12, 0.05) for n in (2, 4)]


def step_of(work: float) -> Step:
    """ResNet-50's, of so many seconds."""
    step = paper_step("2080ti", "resnet50")
    factor = work / step.work
    return dataclasses.replace(step, forward=step.forward * factor, backward=step.backward * factor)


def whole(sync: str, factor: float, mbit: float, work: float, nodes: int) -> float:
    """Seconds of a run with `factor` times the images of all-reduce's."""
    steps = study.EPOCHS * study.EPOCH_STEPS * study.NODES / nodes
    if sync == study.ALONE:
        return steps * nodes * factor * work
    step, rate = step_of(work), formulas.goodput(mbit)
    waits = [step.wait(parse(one), nodes, rate) for one in (sync, EXACT)]
    exact = steps * study.WARMUP / study.EPOCHS if parse(sync).rule.warms else 0
    return (steps * factor - exact) * (work + waits[0]) + exact * (work + waits[1])


def samples(found: tables.Runs, sync: str) -> tuple[float | None, int]:
    seeds = tables.common_seeds(found, sync)
    return (tables.samples(found, sync, seeds) if seeds else None), len(seeds)


def main() -> None:
    found = tables.runs(study.known(*map(Path, sys.argv[1:])))
    names = [study.ALONE, EXACT, *tables.measured(found)]
    heads = [f"{mbit / 1000:g} Gbit/s, {work} s, {n}" for mbit, work, n in CELLS]
    print(f"| SYNC | seeds | samples | {' | '.join(heads)} |")
    print("|" + "---|" * (len(heads) + 3))
    for name in names:
        factor, seeds = samples(found, name)
        times = (
            ["never"] if factor is None else [f"{whole(name, factor, *cell):.0f}" for cell in CELLS]
        )
        print(f"| {name} | {seeds} | {factor or 0:.2f} | {' | '.join(times)} |")


if __name__ == "__main__":
    main()
