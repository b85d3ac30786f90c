"""The cells of PROTOCOL.md's fifth point: seconds to all-reduce's accuracy, by link, seconds of
computing and number of machines.

    python bench/accuracy/cells.py

Steps are those that a strategy's runs needed on the seeds that it has, for as many images whatever
the number of machines; the first steps are exact where its rule warms, as many as by default, or
none. A step's seconds are those of `make plan` for ResNet-50. The table is written into README.md.
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


def whole(sync: str, factor: float, mbit: float, work: float, nodes: int, start: str = "") -> float:
    """Seconds of a run with `factor` times the images of all-reduce's. `start`: "none" without
    exact steps."""
    steps = study.EPOCHS * study.EPOCH_STEPS * study.NODES / nodes
    if sync == study.ALONE:
        return steps * nodes * factor * work
    step, rate = step_of(work), formulas.goodput(mbit)
    waits = [step.wait(parse(one), nodes, rate) for one in (sync, EXACT)]
    warms = parse(sync).rule.warms and start != "none"
    exact = steps * study.WARMUP / study.EPOCHS if warms else 0
    return (steps * factor - exact) * (work + waits[0]) + exact * (work + waits[1])


def rows(lines: list[dict]) -> list[str]:
    """With SGD all that was measured; then AdamW, and runs without exact steps."""
    found = tables.runs(lines)
    names = [study.ALONE, EXACT, *tables.measured(found)]
    seeds = {name: tables.common_seeds(found, name) for name in names}
    cases = [
        (f"SGD, {tables.titled(name)}", name, "", len(own), tables.samples(found, name, own))
        for name, own in seeds.items()
        if own
    ]
    for optimizer, spec, start, pairs, factor in tables.arms(lines):
        if optimizer != "sgd" or start:
            title = f"{tables.TITLES[optimizer]}, `{spec}`{', no exact steps' if start else ''}"
            cases.append((title, spec, start, len(pairs), factor))
    heads = [f"{mbit / 1000:g} Gbit/s, {work} s, {n}" for mbit, work, n in CELLS]
    made = [f"| | seeds | samples | {' | '.join(heads)} |", "|" + "---|" * (len(heads) + 3)]
    for title, name, start, count, factor in cases:
        times = ["-"] * len(CELLS)
        if factor is not None:
            times = [f"{whole(name, factor, *cell, start):.0f}" for cell in CELLS]
        samples = "-" if factor is None else f"{factor:.2f}"
        made.append(f"| {title} | {count} | {samples} | {' | '.join(times)} |")
    return made


def main() -> None:
    page = Path(__file__).with_name("README.md")
    made = rows(study.known())
    print("\n".join(made))
    page.write_text(tables.put(page.read_text("utf-8"), "cells", made), "utf-8")


if __name__ == "__main__":
    main()
