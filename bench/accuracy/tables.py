"""Write what the runs of the study show: contract/prices.json, the tables of docs/slow-networks.md
and README.md, and the chart.

    python bench/accuracy/tables.py

The runs are those of runs.jsonl (study.py). A pair is two runs of one seed. Its difference is a
strategy's top-1 minus all-reduce's, in points, and the intervals of differences are Student's.

The time of a run is its number of steps, times the step time that bench/test_bench_slow_links.py
measured. The number of steps is what a strategy needs to reach all-reduce's final accuracy. The
intervals of these figures come from DRAWS bootstrap draws of the seeds.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import adamw  # noqa: E402
import study  # noqa: E402
import text  # noqa: E402
from study import ALONE, confidence_interval  # noqa: E402

from bench import markdown  # noqa: E402
from contract import prices, strategies  # noqa: E402
from contract.prices import AccuracyCost  # noqa: E402
from contract.strategies import EXACT  # noqa: E402

PRICES = ROOT / "contract/prices.json"
PAGE = ROOT / "docs/slow-networks.md"
STUDY_PAGE = HERE / "README.md"
CHART = ROOT / "docs/images/slow-networks.svg"
STEP_TIMES = ROOT / "docs/slow-links.json"
FIRST_TUNING_SEED = 100  # runs of this seed and higher ones only chose learning rates
LINK_MBIT = 1000.0
DRAWS = 2000
FAMILIES = {"sgd": prices.SGD, "adamw": prices.ADAM}

Runs = dict[tuple[str, int], dict[int, float]]  # {(strategy, epochs): {seed: top-1 in per cent}}


def spec_of(line: dict) -> str:
    """Return today's full name of a run's strategy, with its scale (`ef:5` is `ef:5:peak` or
    `ef:5:own`). Names without a strategy today, and ALONE, stay as they are."""
    strategy = strategies.parse_or_none(line["sync"])
    return strategy.for_family(FAMILIES[line["optimizer"]]).spec if strategy else line["sync"]


def usual_start(spec: str, optimizer: str = "sgd") -> str:
    """Return the `start` (study.Case) of runs that are made as the trainer would make them."""
    strategy = strategies.parse_or_none(spec)
    if strategy is None or not strategy.rule.warms:
        return ""
    return "" if strategy.begins_exact(FAMILIES[optimizer]) else "none"


def select_runs(
    lines: list[dict], optimizer: str, start: str | None = None, task: int = study.TASK
) -> Runs:
    """Select the runs of a task at its usual learning rate. `start`: of the coded runs, as in
    study.Case; None for each strategy's usual start."""
    wanted = {"task": task, "optimizer": optimizer, "warmup": study.WARMUP}
    wanted["lr"] = study.RATES[task, optimizer]
    runs: Runs = {}
    for line in lines:
        # The oldest lines lack some fields, whose value was then the default.
        line = {"optimizer": "sgd", "warmup": study.WARMUP, "start": "", **line}
        spec = spec_of(line)
        is_usual = start is None or spec in (ALONE, EXACT)
        wanted["start"] = usual_start(spec, optimizer) if is_usual else start
        if wanted.items() <= line.items() and line["seed"] < FIRST_TUNING_SEED:
            runs.setdefault((spec, line["epochs"]), {})[line["seed"]] = 100 * line["top1"]
    return runs


def differences(runs: Runs, sync: str, epochs: int = study.EPOCHS) -> dict[int, float]:
    """Return {seed: points}: a strategy's runs of this length minus all-reduce's usual runs."""
    exact, coded = runs.get((EXACT, study.EPOCHS), {}), runs.get((sync, epochs), {})
    return {seed: coded[seed] - exact[seed] for seed in sorted(exact.keys() & coded.keys())}


def differences_by_length(runs: Runs, sync: str) -> dict[float, dict[int, float]]:
    """Return {length of the run relative to a usual run: {seed: difference}}."""
    lengths = sorted(epochs for name, epochs in runs if name == sync)
    return {epochs / study.EPOCHS: differences(runs, sync, epochs) for epochs in lengths}


def common_seeds(runs: Runs, *names: str) -> list[int]:
    """Return the seeds of which these strategies have runs of all lengths."""
    seeds = [set(pairs) for name in names for pairs in differences_by_length(runs, name).values()]
    return sorted(set.intersection(*seeds)) if seeds else []


def image_factor(runs: Runs, sync: str, seeds: list[int]) -> float | None:
    """Return how many times all-reduce's images a strategy needs for all-reduce's final accuracy,
    or None if the longest runs did not reach it. `seeds` may contain a seed several times."""
    if sync == EXACT:
        return 1.0
    points = [
        (factor, statistics.fmean(pairs[seed] for seed in seeds))
        for factor, pairs in differences_by_length(runs, sync).items()
    ]
    # The mean difference becomes 0 between two lengths, along a straight line.
    for (factor, low), (next_factor, high) in zip(points, points[1:]):
        if low < 0 <= high:
            return factor + (next_factor - factor) * low / (low - high)
    return points[0][0] if points and points[0][1] >= 0 else None


def cost_of(pairs: list[float], factor: float | None = None) -> dict[str, float | None]:
    """Return the fields of AccuracyCost, rounded, for these differences."""
    mean, low, high = confidence_interval(pairs)
    cost = AccuracyCost(len(pairs), mean, low, high, factor)._asdict()
    return {name: value if value is None else round(value, 3) for name, value in cost.items()}


def sgd_costs(runs: Runs) -> dict[str, dict]:
    """Return {strategy: cost}."""
    costs = {}
    for spec in measured_specs(runs):
        pairs = list(differences(runs, spec).values())
        is_worse = statistics.fmean(pairs) < 0
        factor = image_factor(runs, spec, common_seeds(runs, spec)) if is_worse else None
        costs[spec] = cost_of(pairs, factor)
    return costs


def measured_specs(runs: Runs) -> list[str]:
    """Return today's coded strategies that have an interval, in the order of the registry."""
    order = list(strategies.RULES)
    specs = {
        spec
        for spec, _ in runs
        # A single pair has no interval, and some strategies are gone.
        if spec != EXACT and len(differences(runs, spec)) > 1 and strategies.parse_or_none(spec)
    }
    return sorted(specs, key=lambda spec: (order.index(spec.split(":")[0]), spec))


def adam_costs(lines: list[dict], task: int) -> dict[str, dict]:
    """Return {`ef:5:own`: cost} with AdamW at the task's tuned rate, in pairs with the mean of both
    exact arms (PROTOCOL.md, "The label"). Runs at other rates give no label."""
    accuracies = study.accuracy_by_case(lines)
    rate = adamw.tune(accuracies, task).rate
    if rate is None:
        return {}
    arm = adamw.CODED[0]
    exact = adamw.baseline(accuracies, task, rate).accuracies
    coded = adamw.accuracies_of(accuracies, arm, task, rate)
    return {arm.sync: cost_of([coded[s] - exact[s] for s in sorted(coded.keys() & exact.keys())])}


def text_losses(lines: list[dict]) -> dict[str, float]:
    """Return {`ef:5:own`: per cent by which the language model's loss exceeds all-reduce's}, in the
    mean over the pairs."""
    exact, coded = (text.losses_of(lines, spec) for spec in (EXACT, adamw.CODED[0].sync))
    ratios = [coded[seed] / exact[seed] for seed in sorted(coded.keys() & exact.keys())]
    return {adamw.CODED[0].sync: round(100 * (statistics.fmean(ratios) - 1), 1)} if ratios else {}


def make_prices(lines: list[dict], texts: list[dict]) -> dict:
    """Return the content of prices.json. `texts`: the runs of the language model."""
    runs = select_runs(lines, "sgd")
    accuracies = list(runs.get((EXACT, study.EPOCHS), {}).values())
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
            "allreduce_top1": round(statistics.fmean(accuracies), 2) if accuracies else None,
            "seeds": len(accuracies),
        },
        "strategies": sgd_costs(runs),
        "fonts": sgd_costs(select_runs(lines, "sgd", task=study.FONTS)),
        "adam": adam_costs(lines, study.GLYPHS),
        "adam_fonts": adam_costs(lines, study.FONTS),
        "text": text_losses(texts),
    }


@functools.cache
def step_seconds(sync: str) -> float:
    """Return the measured time of a step of ResNet-50 on four machines, or on one (ALONE)."""
    rows = json.loads(STEP_TIMES.read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row["mbit"] == LINK_MBIT and row["nodes"] == study.NODES]
    if sync == ALONE:
        return statistics.fmean(row["alone"] for row in rows)
    for row in rows:
        if strategies.parse(row["sync"]).for_family(prices.SGD).spec == sync:
            return row["seconds"]
    raise SystemExit(f"tables: {STEP_TIMES.name} has no step time of {sync}: `make bench`")


def run_seconds(sync: str, factor: float = 1.0, start: str | None = None) -> float:
    """Return the time of a run with `factor` times the images of a usual run. Its warm-up with
    exact sums is as long as in a usual run. `start`: as in study.Case; None for the usual start."""
    start = usual_start(sync) if start is None else start
    case = study.Case(sync, seed=0, start=start)
    phases = replace(case.options.phases, epochs=case.epochs * factor)
    strategy = strategies.parse(case.options.sync)
    mean = phases.mean(strategy, step_seconds(sync), step_seconds(EXACT))
    return mean * case.epochs * case.steps_per_epoch * factor


def speed_up(runs: Runs, slower: str, faster: str, seeds: list[int]) -> float | None:
    """Return by how much a strategy reaches all-reduce's final accuracy sooner than another. None
    if one of them does not reach it."""
    factors = [image_factor(runs, sync, seeds) for sync in (slower, faster)]
    if None in factors:
        return None
    return run_seconds(slower, factors[0]) / run_seconds(faster, factors[1])


def with_bootstrap(
    seeds: list[int], figure_of: Callable[[list[int]], float | None], form: str
) -> str:
    """Format a figure and its 95 % interval, from draws of the seeds with repetition. The figure of
    a draw that does not reach all-reduce's accuracy is None: it counts as infinite ("never")."""
    figure = figure_of(seeds)
    if figure is None:
        return "-"
    chance = random.Random(1)
    draws = [figure_of(chance.choices(seeds, k=len(seeds))) for _ in range(DRAWS)]
    reached = sorted(draw for draw in draws if draw is not None)
    low = form.format(reached[round(0.025 * (DRAWS - 1))])
    place = round(0.975 * (DRAWS - 1))
    high = form.format(reached[place]) if place < len(reached) else "never"
    if low == high:  # all-reduce, compared with itself
        return high
    return f"{form.format(figure)} ({low} to {high})"


def interval_of(low: float | None, high: float | None) -> str:
    return "-" if low is None else f"{low:+.2f} to {high:+.2f}"


def cost_rows(
    costs: dict[str, dict], fonts_costs: dict[str, dict], family: str = prices.SGD
) -> list[list[str]]:
    """Return a row for each strategy: its cost on both tasks, and the label of prices.json."""
    rows = []
    for spec, fields in costs.items():
        cost, fonts = AccuracyCost(**fields), AccuracyCost(**fonts_costs.get(spec, {}))
        fonts_interval = f"({interval_of(fonts.low, fonts.high)}; {fonts.seeds})"
        label = prices.label_of(strategies.parse(spec), family)
        samples = prices.deciding_task(cost, fonts).samples
        factor = f", x {samples:.2f}" if label == "costs samples" else ""
        cells = [f"`{spec}`", str(cost.seeds), f"{cost.difference:+.2f}"]
        cells += [interval_of(cost.low, cost.high)]
        cells += [f"{fonts.difference:+.2f} {fonts_interval}" if fonts.seeds else "-"]
        rows.append([*cells, f"{label}{factor}"])
    return rows


COST_HEAD = ["SYNC", "seeds", "top-1 difference, points", "95 % interval", "fonts task", "label"]


def adam_table(document: dict) -> str:
    rows = cost_rows(document["adam"], document["adam_fonts"], prices.ADAM)
    for spec, row in zip(document["adam"], rows):
        percent = document["text"].get(spec)
        row.append("-" if percent is None else f"{percent:+.1f} %")
    return markdown.table([*COST_HEAD, "language model: loss"], rows)


def time_table(runs: Runs) -> str:
    """Show how long each strategy needs for all-reduce's final accuracy."""
    rows = []
    for sync in (EXACT, ALONE, *measured_specs(runs)):
        seeds = common_seeds(runs, sync, ALONE)
        if len(seeds) < 2:
            continue
        factor = image_factor(runs, sync, seeds)
        if factor is None:
            continue
        case = study.Case(sync, seed=0, start=usual_start(sync))
        warm_steps = case.options.exact_epochs * case.steps_per_epoch
        warm_up = f"{warm_steps:.0f} of {step_seconds(EXACT):.3f} s" if warm_steps else ""
        cells = ["one PC" if sync == ALONE else f"`{sync}`", str(len(seeds))]
        cells += [f"{step_seconds(sync):.3f} s", warm_up]
        cells += [with_bootstrap(seeds, partial(image_factor, runs, sync), "{:.2f}")]
        cells += [f"{run_seconds(sync, factor):.0f} s"]
        for slower in (ALONE, EXACT):
            cells += [with_bootstrap(seeds, partial(speed_up, runs, slower, sync), "{:.1f} x")]
        rows.append(cells)
    head = ["strategy", "seeds", "step time", "warm-up steps", "image factor", "whole run"]
    return markdown.table([*head, "speed-up over one PC", "speed-up over all-reduce"], rows)


def phases_table(lines: list[dict]) -> str:
    """Compare the candidates of SYNC=auto, with and without exact first steps."""
    rows = []
    specs, starts = ("ef:3:peak", "ef:5:peak", "ef:5:own"), ("", "none")
    for optimizer, spec, start in itertools.product(FAMILIES, specs, starts):
        runs = select_runs(lines, optimizer, start)
        pairs = list(differences(runs, spec).values())
        if not pairs:
            continue
        mean, low, high = confidence_interval(pairs)
        cells = ["SGD" if optimizer == "sgd" else "AdamW", f"`{spec}`"]
        cells += ["quantized" if start else "exact", str(len(pairs)), f"{mean:+.2f}"]
        cells += [interval_of(low, high)]
        factor = image_factor(runs, spec, common_seeds(runs, spec))
        if factor is None:
            rows.append([*cells, "-", f"{step_seconds(spec):.3f} s", "-", "-"])
            continue
        # One PC was not run with AdamW. There it counts as if it needed all-reduce's images.
        usual_runs = select_runs(lines, optimizer)
        seeds = common_seeds(usual_runs, ALONE)
        alone_factor = image_factor(usual_runs, ALONE, seeds) if seeds else None
        seconds, alone = run_seconds(spec, factor, start), run_seconds(ALONE, alone_factor or 1.0)
        cells += [f"{factor:.2f}", f"{step_seconds(spec):.3f} s"]
        rows.append([*cells, f"{seconds:.0f} s", f"{alone / seconds:.1f} x"])
    head = ["optimizer", "SYNC", "first 75 steps", "paired seeds", "top-1 difference, points"]
    head += ["95 % interval", "image factor", "step time", "whole run", "speed-up over one PC"]
    return markdown.table(head, rows)


def chart(document: dict) -> str:
    """Draw what each strategy costs in accuracy (down) and its speed (to the right), as an SVG."""
    width, height, left, top = 640, 340, 60, 20
    costs = {EXACT: AccuracyCost()}
    costs |= {spec: AccuracyCost(**fields) for spec, fields in document["strategies"].items()}
    # What loses far more stands at the lower edge, with its figure, and leaves the others room.
    lowest = max(-5.0, min(-1.0, *(cost.difference for cost in costs.values()))) - 0.5

    def x(speed: float) -> float:
        return left + (width - left - 110) * speed / 4

    def y(points: float) -> float:
        return top + (height - top - 50) * (1.0 - max(points, lowest)) / (1.0 - lowest)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<line x1="{left}" x2="{width - 20}" y1="{y(0):.1f}" y2="{y(0):.1f}" stroke="#999"/>',
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{top}" y2="{height - 50}" stroke="#999" '
        'stroke-dasharray="4"/>',
        f'<text x="{x(1) + 4:.1f}" y="{height - 56}" fill="#666">one machine</text>',
    ]
    for speed in range(5):
        mark = f'text-anchor="middle">{speed} x</text>'
        parts.append(f'<text x="{x(speed):.1f}" y="{height - 32}" {mark}')
    for points in range(int(lowest), 2):
        mark = f'text-anchor="end">{points:+d}</text>'
        parts.append(f'<text x="{left - 8}" y="{y(points) + 4:.1f}" {mark}')
    for spec, cost in costs.items():
        speed, mean = run_seconds(ALONE) / run_seconds(spec), cost.difference
        if cost.low is not None:
            parts.append(
                f'<line x1="{x(speed):.1f}" x2="{x(speed):.1f}" y1="{y(min(cost.high, 1)):.1f}" '
                f'y2="{y(cost.low):.1f}" stroke="#4477aa" opacity="0.5"/>'
            )
        parts.append(f'<circle cx="{x(speed):.1f}" cy="{y(mean):.1f}" r="4" fill="#4477aa"/>')
        name = spec if mean >= lowest else f"{spec}: {mean:+.0f}"
        parts.append(f'<text x="{x(speed) + 7:.1f}" y="{y(mean) + 4:.1f}">{name}</text>')
    parts += [
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">images/s of four machines '
        "at 1 Gbit/s over a whole run, one machine = 1 (ResNet-50)</text>",
        f'<text x="14" y="{height / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {height / 2})">top-1, points against all-reduce</text></svg>',
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    lines, texts = study.read_runs(), text.read_runs(text.LINES)
    document = make_prices(lines, texts)
    PRICES.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sgd_rows = cost_rows(document["strategies"], document["fonts"])
    for page, name, table in (
        (PAGE, "accuracy", markdown.table(COST_HEAD, sgd_rows)),
        (PAGE, "adam", adam_table(document)),
        (STUDY_PAGE, "adamw", adamw.tables(lines, texts)),
        (STUDY_PAGE, "phases", phases_table(lines)),
        (STUDY_PAGE, "time", time_table(select_runs(lines, "sgd"))),
    ):
        markdown.replace_part(page, f"<!-- {name} -->", f"<!-- end of {name} -->", table)
    CHART.write_text(chart(document), encoding="utf-8")


if __name__ == "__main__":
    main()
