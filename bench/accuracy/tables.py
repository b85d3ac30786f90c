"""Make contract/prices.json, the tables of docs/slow-networks.md and README.md, and the chart.

    python bench/accuracy/tables.py

Runs are those of runs.jsonl (study.py). Pairs are runs of one seed: a strategy's top-1 less that of
allreduce, in points; their intervals are Student's, of 95 %, over the seeds. Times are seconds a
step, as bench/test_bench_slow_links.py measured them, times the steps that it takes to reach
allreduce's final accuracy, those of the warm-up at the cost of exact sums; their intervals are from
2.5 to 97.5 % of draws of as many seeds, with repetition (bootstrap).
"""

from __future__ import annotations

import functools
import json
import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import adamw  # noqa: E402
import study  # noqa: E402
import text  # noqa: E402
from study import ALONE, interval  # noqa: E402

from contract import prices, strategies  # noqa: E402
from contract.strategies import EXACT  # noqa: E402
from report import formulas  # noqa: E402
from report.published_speeds import paper_step  # noqa: E402

PRICES = ROOT / "contract/prices.json"
PAGE = ROOT / "docs/slow-networks.md"
STUDY = HERE / "README.md"
CHART = ROOT / "docs/images/slow-networks.svg"
MEASURED = ROOT / "docs/slow-links.json"
FIRST_TRIAL = 100  # seeds from here on were for the choice of learning rates
LINK = 1000.0  # Mbit/s
DRAWS = 2000

TWICE = " at twice the rate"  # runs of which are compared with those at the usual one

Runs = dict[tuple[str, int], dict[int, float]]  # (sync, epochs) -> seed -> points


def runs(lines: list[dict]) -> Runs:
    """With SGD on the first task, at the usual rate and at twice that."""
    twice = runs_with(lines, "sgd", "", times=2)
    doubled = {(spec + TWICE, epochs): by_seed for (spec, epochs), by_seed in twice.items()}
    return {**runs_with(lines, "sgd"), **doubled}


def spec_of(line: dict) -> str:
    """Today's name of a run's strategy, with its scale."""
    strategy = strategies.parse_or_none(line["sync"])
    family = prices.SGD if line.get("optimizer", "sgd") == "sgd" else prices.ADAM
    return strategy.for_family(family).spec if strategy else line["sync"]


def usual_start(spec: str, optimizer: str = "sgd") -> str:
    """What runs begin with that are not told otherwise, as study.Case has it."""
    strategy = strategies.parse_or_none(spec.removesuffix(TWICE))
    family = prices.SGD if optimizer == "sgd" else prices.ADAM
    if strategy is None or TWICE in spec:
        return ""
    return "none" if strategy.rule.warms and not strategy.begins_exact(family) else ""


def prices_with(lines: list[dict], optimizer: str, task: int) -> dict[str, dict]:
    """Of runs of the usual length."""
    found = runs_with(lines, optimizer, task=task)
    return {spec: price(found, spec) for spec in measured(found)}


def adam_prices(lines: list[dict], task: int) -> dict[str, dict]:
    """The cost of AdamW's codes at the task's tuned rate, in pairs with the mean of both exact arms
    (PROTOCOL.md, "The label"). Runs at other rates give no label."""
    results = study.results(lines)
    rate = adamw.tune(results, task).rate
    if rate is None:
        return {}
    exact = adamw.baseline(results, task, rate).accuracies
    arm = adamw.CODED[0]
    coded = adamw.accuracies_of(results, arm, task, rate)
    pairs = [coded[seed] - exact[seed] for seed in sorted(coded.keys() & exact.keys())]
    mean, low, high = (round(value, 3) for value in interval(pairs))
    cost = {"seeds": len(pairs), "difference": mean, "low": low, "high": high, "samples": None}
    return {arm.sync: cost}


def runs_with(
    lines: list[dict],
    optimizer: str,
    start: str | None = None,
    task: int = study.TASK,
    times: int = 1,
) -> Runs:
    """Those at so many times the task's usual rate. `start`: of what is not exact; "none" where
    none of its steps is, "" where the first ones are, by default what a run begins with."""
    same = {"task": task, "optimizer": optimizer, "warmup": study.WARMUP}
    same["lr"] = study.RATES[task, optimizer] * times
    made: Runs = {}
    for line in lines:
        line = {"optimizer": "sgd", "warmup": study.WARMUP, "start": "", **line}
        spec = spec_of(line)
        is_usual = start is None or spec in (ALONE, EXACT)
        beginning = usual_start(spec, optimizer) if is_usual else start
        if {**same, "start": beginning}.items() <= line.items() and line["seed"] < FIRST_TRIAL:
            made.setdefault((spec, line["epochs"]), {})[line["seed"]] = 100 * line["top1"]
    return made


def of_text(lines: list[dict]) -> dict[str, float]:
    """Per cent more of the language model's loss, in the mean over the pairs."""
    usual = {
        name: value for name, value in text.case("", 0).items() if name not in ("sync", "seed")
    }
    loss: dict[str, dict[int, float]] = {}
    for line in lines:
        if usual.items() <= line.items():
            loss.setdefault(line["sync"], {})[line["seed"]] = line["loss"]
    found = {}
    for spec, own in loss.items():
        pairs = own.keys() & loss.get(EXACT, {}).keys()
        if spec != EXACT and pairs:
            more = statistics.fmean(own[seed] / loss[EXACT][seed] for seed in pairs)
            found[spec] = round(100 * (more - 1), 1)
    return found


def differences(found: Runs, sync: str, epochs: int) -> dict[int, float]:
    """By seed, to allreduce after the usual epochs."""
    base, own = found.get((EXACT, study.EPOCHS), {}), found.get((sync, epochs), {})
    return {seed: own[seed] - base[seed] for seed in sorted(base.keys() & own.keys())}


def crossing(points: list[tuple[float, float]]) -> float | None:
    """How many times the samples make a difference of zero: between two lengths of runs that were
    measured, in a straight line; the shortest where that is enough, None where the longest is
    not."""
    for (before, low), (after, high) in zip(points, points[1:]):
        if low < 0 <= high:
            return before + (after - before) * low / (low - high)
    return points[0][0] if points and points[0][1] >= 0 else None


def by_length(found: Runs, sync: str) -> dict[float, dict[int, float]]:
    """Differences of a strategy's runs, by how many times the samples they had."""
    lengths = sorted(epochs for name, epochs in found if name == sync)
    return {epochs / study.EPOCHS: differences(found, sync, epochs) for epochs in lengths}


def samples(found: Runs, sync: str, drawn: list[int]) -> float | None:
    """How many times the samples it takes to reach allreduce's final accuracy, by the means over
    these seeds, one of which may stand there more than once."""
    if sync == EXACT:
        return 1.0
    lengths = by_length(found, sync).items()
    return crossing(
        [(factor, statistics.fmean(told[seed] for seed in drawn)) for factor, told in lengths]
    )


def common_seeds(found: Runs, *names: str) -> list[int]:
    """Those with all runs of these strategies."""
    every = [set(told) for name in names for told in by_length(found, name).values()]
    return sorted(set.intersection(*every)) if every else []


@functools.cache
def seconds(sync: str) -> tuple[float, str]:
    """A step of ResNet-50 on four machines, or on one, and where the figure is from."""
    sync = sync.removesuffix(TWICE)
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row["mbit"] == LINK and row["nodes"] == study.NODES]
    if sync == ALONE:
        return statistics.fmean(row["alone"] for row in rows), "measured"
    for row in rows:
        if strategies.parse(row["sync"]).for_family(prices.SGD).spec == sync:
            return row["seconds"], "measured"
    step = paper_step("2080ti", "resnet50")
    work = seconds(ALONE)[0]
    payload = step.payload_for(strategies.parse(sync))
    backward = work * step.backward / step.work
    rate = formulas.goodput(LINK)
    waited = formulas.sync_wait(strategies.parse(sync), study.NODES, payload, rate, backward)
    return work + waited, "planned"


def warm_steps(sync: str) -> float:
    """Steps of a run that are exact sums, before a strategy that leaves bits out begins."""
    if sync == ALONE:
        return 0
    case = study.Case(sync.removesuffix(TWICE), seed=0, start=usual_start(sync))
    return case.options.exact_epochs * case.steps_per_epoch


def run_seconds(sync: str, factor: float = 1.0, start: str | None = None) -> float:
    """A whole run with `factor` times the images of a usual one, its warm-up included: that is as
    long in a longer run."""
    start = usual_start(sync) if start is None else start
    case = study.Case(sync.removesuffix(TWICE), seed=0, start=start)
    phases = replace(case.options.phases, epochs=case.epochs * factor)
    strategy = strategies.parse(case.options.sync)
    mean = phases.mean(strategy, seconds(sync)[0], seconds(EXACT)[0])
    return mean * case.epochs * case.steps_per_epoch * factor


def hours(found: Runs, sync: str, drawn: list[int]) -> float | None:
    """Seconds to allreduce's final accuracy."""
    factor = samples(found, sync, drawn)
    return None if factor is None else run_seconds(sync, factor)


def spread(seeds: list[int], value: Callable[[list[int]], float | None], form: str) -> str:
    """The value of all seeds, and in brackets the interval; `-` where it was never reached."""
    mean = value(seeds)
    if mean is None:
        return "-"
    chance = random.Random(1)
    told = [value(chance.choices(seeds, k=len(seeds))) for _ in range(DRAWS)]
    ends = [one for one in told if one is not None]
    ends.sort()
    low = ends[round(0.025 * (len(told) - 1))]
    at = round(0.975 * (len(told) - 1))
    high = form.format(ends[at]) if at < len(ends) else "never"
    if form.format(low) == high:
        return high  # that of all-reduce to itself
    return f"{form.format(mean)} ({form.format(low)} to {high})"


def price(found: Runs, sync: str) -> dict:
    values = list(differences(found, sync, study.EPOCHS).values())
    mean, low, high = interval(values)
    factor = samples(found, sync, common_seeds(found, sync)) if mean < 0 else None
    told = {"seeds": len(values), "difference": mean, "low": low, "high": high, "samples": factor}
    return {name: value if value is None else round(value, 3) for name, value in told.items()}


def measured(found: Runs) -> list[str]:
    """The strategies with two pairs or more, in the registry's order: one has no interval."""
    order = list(strategies.RULES)
    names = {sync for sync, _ in found if sync not in (ALONE, EXACT) and TWICE not in sync}
    names = {name for name in names if len(differences(found, name, study.EPOCHS)) > 1}
    names = {name for name in names if strategies.parse_or_none(name)}  # not those that are gone
    return sorted(names, key=lambda spec: (order.index(spec.split(":")[0]), spec))


def document(found: Runs) -> dict:
    base = list(found.get((EXACT, study.EPOCHS), {}).values())
    return {
        "task": {
            "classes": study.glyphs.CLASSES,
            "pixels": study.glyphs.SIZE,
            "nodes": study.NODES,
            "batch": study.BATCH,
            "steps": study.EPOCHS * study.EPOCH_STEPS,
            "optimizer": "sgd",
            "lr": study.LR,
            "lr_alone": study.ALONE_LR,
            "validation_images": study.VAL * study.glyphs.CLASSES,
            "allreduce_top1": round(statistics.fmean(base), 2) if base else None,
            "seeds": len(base),
        },
        "strategies": {spec: price(found, spec) for spec in measured(found)},
    }


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def accuracy_table(told: dict) -> list[str]:
    rows = [
        "| SYNC | seeds | top-1 difference, points | 95 % interval | fonts task | label |",
        "|---|---|---|---|---|---|",
    ]
    for spec, one in told["strategies"].items():
        ends = f"{signed(one['low'])} to {signed(one['high'])}" if one["low"] is not None else "-"
        second = prices.AccuracyCost(**told["fonts"].get(spec, {}))
        label = prices.deciding_task(prices.AccuracyCost(**one), second).label
        label += f", x {one['samples']:.2f}" if label == "costs samples" else ""
        rows.append(
            f"| `{spec}` | {one['seeds']} | {signed(one['difference'])} | {ends} "
            f"| {elsewhere(second)} | {label} |"
        )
    return rows


def elsewhere(price: prices.AccuracyCost) -> str:
    """What was seen on the second task, for a cell."""
    if not price.seeds:
        return "-"
    return (
        f"{signed(price.difference)} ({signed(price.low)} to {signed(price.high)}; {price.seeds})"
    )


def adam_table(told: dict) -> list[str]:
    rows = [
        "| SYNC | seeds | top-1 difference, points | 95 % interval | fonts task | label "
        "| language model: loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for spec in told["adam"]:
        one, more = prices.AccuracyCost(**told["adam"].get(spec, {})), told["text"].get(spec)
        ends = f"{signed(one.low)} to {signed(one.high)}" if one.seeds > 1 else "-"
        loss = "-" if more is None else f"{more:+.1f} %"
        mean = signed(one.difference if one.seeds else None)
        second = prices.AccuracyCost(**told["adam_fonts"].get(spec, {}))
        label = prices.deciding_task(one, second).label
        cells = [f"`{spec}`", str(one.seeds), mean, ends, elsewhere(second), label, loss]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def doubled(found: Runs) -> list[str]:
    return sorted({sync for sync, _ in found if TWICE in sync})


def titled(sync: str) -> str:
    """For a row's first cell."""
    if sync == ALONE:
        return "one PC"
    return f"`{sync.removesuffix(TWICE)}`{TWICE if TWICE in sync else ''}"


def time_table(found: Runs) -> list[str]:
    rows = [
        "| | seeds | step time | warm-up steps | image factor | whole run "
        "| speed-up over one PC | speed-up over all-reduce |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sync in (EXACT, ALONE, *measured(found), *doubled(found)):
        seeds = common_seeds(found, sync, ALONE)
        if len(seeds) < 2 or samples(found, sync, seeds) is None:
            continue
        step, source = seconds(sync)
        cells = [
            *(
                titled(sync),
                str(len(seeds)),
                f"{step:.3f} s{'' if source == 'measured' else ', planned'}",
                f"{warm_steps(sync):.0f} of {seconds(EXACT)[0]:.3f} s" if warm_steps(sync) else "",
            ),
            spread(seeds, lambda drawn, sync=sync: samples(found, sync, drawn), "{:.2f}"),
            f"{hours(found, sync, seeds):.0f} s",
            spread(seeds, lambda drawn, sync=sync: sooner(found, ALONE, sync, drawn), "{:.1f} x"),
            spread(seeds, lambda drawn, sync=sync: sooner(found, EXACT, sync, drawn), "{:.1f} x"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def sooner(found: Runs, slower: str, faster: str, drawn: list[int]) -> float | None:
    """How many times sooner; None where the faster one does not get there."""
    long, short = hours(found, slower, drawn), hours(found, faster, drawn)
    return None if long is None or short is None else long / short


# What a run takes without being told, or may take instead.
ARMS = [
    (optimizer, spec, start)
    for optimizer in ("sgd", "adamw")
    for spec in ("ef:3:peak", "ef:5:peak", "ef:5:own")
    for start in ("", "none")
]
TITLES = {"sgd": "SGD", "adamw": "AdamW"}


def arms(lines: list[dict]) -> Iterator[tuple[str, str, str, list[float], float | None]]:
    """Of ARMS those with pairs: these, and how many times all-reduce's images it takes."""
    for optimizer, spec, start in ARMS:
        found = runs_with(lines, optimizer, start)
        pairs = list(differences(found, spec, study.EPOCHS).values())
        if pairs:
            yield optimizer, spec, start, pairs, samples(found, spec, common_seeds(found, spec))


def alone_samples(lines: list[dict], optimizer: str) -> float:
    """Of one machine alone. Where it was not run with this optimizer, as many as all-reduce."""
    found = runs_with(lines, optimizer)
    seeds = common_seeds(found, ALONE)
    return (samples(found, ALONE, seeds) if seeds else None) or 1.0


def phases_table(lines: list[dict]) -> list[str]:
    rows = [
        "| optimizer | SYNC | first 75 steps | paired seeds | top-1 difference, points "
        "| 95 % interval | image factor | step time | whole run | speed-up over one PC |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for optimizer, spec, start, pairs, factor in arms(lines):
        step, source = seconds(spec)
        mean, low, high = interval(pairs)
        cells = [TITLES[optimizer], f"`{spec}`", "quantized" if start else "exact", str(len(pairs))]
        cells += [signed(mean), "-" if low is None else f"{signed(low)} to {signed(high)}"]
        cells.append("-" if factor is None else f"{factor:.2f}")
        cells.append(f"{step:.3f} s{'' if source == 'measured' else ', planned'}")
        if factor is None:
            cells += ["-", "-"]
        else:
            took = run_seconds(spec, factor, start)
            alone = run_seconds(ALONE, alone_samples(lines, optimizer))
            cells += [f"{took:.0f} s", f"{alone / took:.1f} x"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def put(page: str, name: str, lines: list[str]) -> str:
    """The page with a table between its marks."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    body = "\n".join([begin, *lines, end])
    return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: body, page, flags=re.S)


def chart(told: dict) -> str:
    """What each costs in accuracy (down) against its speed (to the right), as an SVG."""
    width, height, left, top = 640, 340, 60, 20
    one = run_seconds(ALONE)
    points = [(EXACT, one / run_seconds(EXACT), 0.0, None, None)]
    for spec, price_ in told["strategies"].items():
        speed = one / run_seconds(spec)
        points.append((spec, speed, price_["difference"], price_["low"], price_["high"]))
    # What loses far more stands at the lower edge, with its figure, and leaves the others room.
    least = max(-5.0, min(-1.0, *(p[2] for p in points))) - 0.5
    x = lambda v: left + (width - left - 110) * v / 4  # noqa: E731
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
        name = spec if mean >= least else f"{spec}: {mean:+.0f}"
        out.append(f'<text x="{x(speed) + 7:.1f}" y="{y(mean) + 4:.1f}">{name}</text>')
    out.append(
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">images/s of four machines '
        "at 1 Gbit/s over a whole run, one machine = 1 (ResNet-50)</text>"
    )
    out.append(
        f'<text x="14" y="{height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {height / 2})">'
        "top-1, points against all-reduce</text></svg>"
    )
    return "\n".join(out) + "\n"


def whole(lines: list[dict]) -> dict:
    """prices.json."""
    parts = {
        "fonts": prices_with(lines, "sgd", study.FONTS),
        "adam": adam_prices(lines, study.GLYPHS),
        "adam_fonts": adam_prices(lines, study.FONTS),
    }
    return {**document(runs(lines)), **parts, "text": of_text(text.known(text.LINES))}


def main() -> None:
    lines = study.known()
    found, told = runs(lines), whole(lines)
    PRICES.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    page = put(PAGE.read_text(encoding="utf-8"), "accuracy", accuracy_table(told))
    PAGE.write_text(put(page, "adam", adam_table(told)), encoding="utf-8")
    page = put(STUDY.read_text(encoding="utf-8"), "phases", phases_table(lines))
    STUDY.write_text(put(page, "time", time_table(found)), encoding="utf-8")
    CHART.write_text(chart(told), encoding="utf-8")


if __name__ == "__main__":
    main()
