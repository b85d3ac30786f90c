"""Make trainer/prices.json, and the tables and the chart of docs/slow-networks.md, of the runs.

    python tests/bench/accuracy/tables.py

Runs are those of runs.jsonl (study.py). Pairs are runs of one seed: a strategy's top-1 less that of
allreduce, in points. Intervals are Student's, of 95 %, over the seeds.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE)]

import study  # noqa: E402

from report import formulas  # noqa: E402
from report.paper import paper_step  # noqa: E402
from trainer import prices, strategies  # noqa: E402
from trainer.strategies import EXACT  # noqa: E402

PRICES = ROOT / "trainer/prices.json"
PAGE = ROOT / "docs/slow-networks.md"
CHART = ROOT / "docs/images/slow-networks.svg"
FIRST_TRIAL = 100  # seeds from here on were for the choice of the learning rate
GPU, MODEL, LINK = "2080ti", "resnet50", 1000.0
ALONE = "-"
# Student's t, two-sided 95 %, by degrees of freedom from 1.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)

Runs = dict[tuple[str, int], dict[int, float]]  # (sync, epochs) -> seed -> points


def runs(lines: list[dict]) -> Runs:
    found: Runs = {}
    for line in lines:
        ours = line["task"] == study.TASK and line["lr"] == study.LR and line["seed"] < FIRST_TRIAL
        if ours:
            found.setdefault((line["sync"], line["epochs"]), {})[line["seed"]] = 100 * line["top1"]
    return found


def differences(found: Runs, sync: str, epochs: int) -> list[float]:
    """Of each seed, to allreduce after the usual epochs."""
    base, own = found.get((EXACT, study.EPOCHS), {}), found.get((sync, epochs), {})
    return [own[seed] - base[seed] for seed in sorted(base.keys() & own.keys())]


def interval(values: list[float]) -> tuple[float, float | None, float | None]:
    """Mean, and the interval's ends where there are two values or more."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = T[min(len(values) - 1, len(T)) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def crossing(points: list[tuple[float, float | None]]) -> float | None:
    """How many times the samples make a difference of zero: between two lengths of runs that were
    measured, in a straight line; None where the longest does not reach it."""
    points = [(factor, value) for factor, value in points if value is not None]
    for (before, low), (after, high) in zip(points, points[1:]):
        if low < 0 <= high:
            return before + (after - before) * low / (low - high)
    return points[0][0] if points and points[0][1] >= 0 else None


def samples(found: Runs, sync: str) -> tuple[float | None, ...]:
    """How many times the samples it takes to reach allreduce's final accuracy: by the means, and
    by the upper and the lower ends of the intervals."""
    lengths = sorted(epochs for name, epochs in found if name == sync)
    told = [(epochs / study.EPOCHS, differences(found, sync, epochs)) for epochs in lengths]
    measured = [(factor, interval(values)) for factor, values in told if values]
    ends = [[(factor, value[end]) for factor, value in measured] for end in range(3)]
    mean, low, high = map(crossing, ends)
    return mean, high, low


def price(found: Runs, sync: str) -> dict:
    values = differences(found, sync, study.EPOCHS)
    mean, low, high = interval(values)
    factor = samples(found, sync)[0] if mean < 0 else None
    told = {"seeds": len(values), "difference": mean, "low": low, "high": high, "samples": factor}
    return {name: value if value is None else round(value, 3) for name, value in told.items()}


def measured(found: Runs) -> list[str]:
    """The strategies with at least one pair, in the registry's order."""
    order = list(strategies.RULES)
    names = {sync for sync, _ in found if sync not in (ALONE, EXACT)}
    names = {name for name in names if differences(found, name, study.EPOCHS)}
    return sorted(names, key=lambda spec: (order.index(spec.split(":")[0]), spec))


def document(found: Runs) -> dict:
    base = list(found.get((EXACT, study.EPOCHS), {}).values())
    steps = study.EPOCHS * study.TRAIN * study.glyphs.CLASSES // (study.NODES * study.BATCH)
    return {
        "task": {
            "classes": study.glyphs.CLASSES,
            "pixels": study.glyphs.SIZE,
            "nodes": study.NODES,
            "batch": study.BATCH,
            "steps": steps,
            "lr": study.LR,
            "validation_images": study.VAL * study.glyphs.CLASSES,
            "allreduce_top1": round(statistics.fmean(base), 2) if base else None,
            "seeds": len(base),
        },
        "strategies": {spec: price(found, spec) for spec in measured(found)},
    }


def step_seconds(sync: str) -> float:
    """As `make plan` has it on paper; ALONE: one machine."""
    step = paper_step(GPU, MODEL)
    if sync == ALONE:
        return step.work
    waited = step.wait(strategies.parse(sync), study.NODES, formulas.goodput(LINK))
    return float("nan") if waited is None else step.work + waited


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def accuracy_table(told: dict, found: Runs) -> list[str]:
    rows = [
        "| SYNC | seeds | difference, points | 95 % interval | label |",
        "|---|---|---|---|---|",
    ]
    for spec, one in told["strategies"].items():
        ends = f"{signed(one['low'])} to {signed(one['high'])}" if one["low"] is not None else "-"
        label = prices.Price(**one).label
        label += f", x {one['samples']:.2f}" if label == "costs samples" else ""
        rows.append(
            f"| `{spec}` | {one['seeds']} | {signed(one['difference'])} | {ends} | {label} |"
        )
    alone = differences(found, ALONE, study.EPOCHS)
    if alone:
        mean, low, high = interval(alone)
        ends = f"{signed(low)} to {signed(high)}" if low is not None else "-"
        rows.append(f"| one machine alone | {len(alone)} | {signed(mean)} | {ends} | |")
    return rows


def times(found: Runs, sync: str) -> list[float | None]:
    """Seconds of ResNet-50 on paper to allreduce's final accuracy, as many images as 1,000 steps of
    four machines have: by the mean and by both ends; None where it was not reached."""
    steps = 1000 * (study.NODES if sync == ALONE else 1)
    factors = (1.0, 1.0, 1.0) if sync == EXACT else samples(found, sync)
    return [None if one is None else steps * step_seconds(sync) * one for one in factors]


def time_table(found: Runs) -> list[str]:
    rows = [
        "| | a step | samples | time, all-reduce = 1 "
        "| sooner than one machine | sooner than all-reduce |",
        "|---|---|---|---|---|---|",
    ]
    base, alone = times(found, EXACT), times(found, ALONE)
    for sync in (EXACT, ALONE, *measured(found)):
        own, factors = times(found, sync), samples(found, sync)
        if (sync != EXACT and factors[0] is None) or step_seconds(sync) != step_seconds(sync):
            continue
        name = {ALONE: "one machine alone", EXACT: "four, `allreduce`"}.get(sync, f"four, `{sync}`")
        used = "1" if sync == EXACT else spread(factors, "{:.2f}")
        rows.append(
            f"| {name} | {step_seconds(sync):.3f} s | {used} | {own[0] / base[0]:.2f} | "
            f"{ratio(alone, own)} | {ratio(base, own)} |"
        )
    return rows


def spread(values, form: str) -> str:
    """The mean, and the ends where both are known."""
    mean, *ends = values
    told = form.format(mean)
    if None not in ends and ends[0] != ends[1]:
        told += f" ({form.format(min(ends))} to {form.format(max(ends))})"
    return told


def ratio(slower: list, faster: list) -> str:
    """How many times sooner; the ends put the worst of one against the best of the other."""
    if slower[0] is None or faster[0] is None:
        return "not reached"
    ends = [slower[1], faster[2], slower[2], faster[1]]
    if None in ends:
        return f"{slower[0] / faster[0]:.1f} x"
    values = (slower[0] / faster[0], slower[1] / faster[2], slower[2] / faster[1])
    return spread(values, "{:.1f}") + " x"


def put(page: str, name: str, lines: list[str]) -> str:
    """The page with a table between its marks."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    body = "\n".join([begin, *lines, end])
    return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: body, page, flags=re.S)


def chart(told: dict) -> str:
    """What each costs in accuracy (down) against its speed (to the right), as an SVG."""
    width, height, left, top = 640, 340, 60, 20
    one = step_seconds(ALONE)
    points = [(EXACT, study.NODES * one / step_seconds(EXACT) / 1, 0.0, None, None)]
    for spec, price_ in told["strategies"].items():
        speed = (
            study.NODES * one / step_seconds(spec)
            if step_seconds(spec) == step_seconds(spec)
            else None
        )
        if speed is not None:
            points.append((spec, speed, price_["difference"], price_["low"], price_["high"]))
    least = min(-1.0, *(p[2] for p in points)) - 0.5
    x = lambda v: left + (width - left - 90) * v / 4  # noqa: E731
    y = lambda v: top + (height - top - 50) * (1.0 - max(v, least)) / (1.0 - least)  # noqa: E731
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<line x1="{left}" x2="{width - 20}" y1="{y(0):.1f}" y2="{y(0):.1f}" stroke="#999"/>',
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{top}" y2="{height - 50}" stroke="#999" '
        'stroke-dasharray="4"/>',
        f'<text x="{x(1) + 4:.1f}" y="{height - 56}" fill="#666">one machine</text>',
    ]
    for step in range(5):
        out.append(
            f'<text x="{x(step):.1f}" y="{height - 32}" text-anchor="middle">{step} x</text>'
        )
    for mark in range(int(least), 2):
        out.append(f'<text x="{left - 8}" y="{y(mark) + 4:.1f}" text-anchor="end">{mark:+d}</text>')
    for spec, speed, mean, low, high in points:
        if low is not None:
            out.append(
                f'<line x1="{x(speed):.1f}" x2="{x(speed):.1f}" y1="{y(min(high, 1)):.1f}" '
                f'y2="{y(low):.1f}" stroke="#4477aa" opacity="0.5"/>'
            )
        out.append(f'<circle cx="{x(speed):.1f}" cy="{y(mean):.1f}" r="4" fill="#4477aa"/>')
        out.append(f'<text x="{x(speed) + 7:.1f}" y="{y(mean) + 4:.1f}">{spec}</text>')
    out.append(
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">images/s of four machines '
        "at 1 Gbit/s, one machine = 1 (ResNet-50, on paper)</text>"
    )
    out.append(
        f'<text x="14" y="{height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {height / 2})">'
        "top-1, points against all-reduce</text></svg>"
    )
    return "\n".join(out) + "\n"


def main() -> None:
    found = runs(study.known())
    told = document(found)
    PRICES.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    page = put(PAGE.read_text(encoding="utf-8"), "accuracy", accuracy_table(told, found))
    PAGE.write_text(put(page, "time", time_table(found)), encoding="utf-8")
    CHART.write_text(chart(told), encoding="utf-8")


if __name__ == "__main__":
    main()
