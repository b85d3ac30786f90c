"""Predicts images per second for 1..N nodes and each sync strategy, and says which is best.

It starts from the measured step of an earlier run of the same model, with any number of nodes, and
changes only the wait for the network (formulas.py). What was not measured is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from contract import prices, runs, strategies
from contract.strategies import EXACT, Phases, Strategy
from contract.text import pluralize, size, three_digits
from report.links import Links
from report.measure import Step
from report.reading import CACHE, IMAGENET, LARGE_PIXELS, SHRUNK, Reading

HARMLESS = ("exact", "safe")
WORTH_READING = 1.03  # times as fast; less is no gain
SHORT = "short run"  # than those in which a strategy was measured as safe


@dataclass(frozen=True)
class Basis:
    """What was measured: the run's name, its mean step, and what an epoch is.

    `steps[n - 1]` is the mean step of n machines, and the last one stands for more machines, too:
    all wait for the slowest. `rates[n - 1]` is what a link carries while n machines send, in bytes
    per second; it is empty where links were not measured by themselves.
    """

    run: str
    model: str
    image_size: int | None
    batch: int  # images per node and step, as asked for
    steps: tuple[Step, ...]
    train_images: int | None
    evaluate_seconds: float  # per epoch, on as many machines as the last step's
    precision: str | None = None
    about: tuple[str, ...] = ()  # sentences on where the figures come from
    machines: tuple[str, ...] = ()  # those measured by themselves, without a run
    unix: float = 0.0  # when they were measured
    rates: tuple[float, ...] = ()
    links: Links | None = None
    own_speeds: dict[str, float] = field(default_factory=dict)  # images/s of each machine by itself
    reading: Reading | None = None  # from a share, in that run

    @property
    def setting(self) -> runs.Setting:
        return runs.Setting(self.model, self.batch, self.image_size, self.precision, self.machines)

    def step_of(self, nodes: int) -> Step:
        return self.steps[min(nodes, len(self.steps)) - 1]

    @property
    def step(self) -> Step:
        return self.steps[-1]


@dataclass(frozen=True)
class Row:
    """One prediction. `bytes_sent` per node and step, `step_seconds` and `images_per_second` are of
    the steps after the warm-up; `run_images_per_second` and `run_seconds` of a whole run, with
    what it evaluates (None where an epoch's images are not known). `label`: the strategy's with the
    run's optimizer; `samples`: how many times the images it takes to all-reduce's accuracy: 1 where
    nothing else is known, None where no run was seen to reach it."""

    nodes: int
    sync: str
    bytes_sent: float
    step_seconds: float
    images_per_second: float
    run_images_per_second: float
    run_seconds: float | None
    label: str
    samples: float | None = 1.0


def predict(
    basis: Basis,
    nodes: int,
    rate: Callable[[int], float],
    requested: Strategy,
    phases: Phases,
) -> list[Row]:
    """A Row for each number of nodes up to `nodes` and each usual strategy and the one requested;
    one node needs no strategy. A strategy whose bytes do not follow from the basis has no row.
    `rate` gives the bytes per second that a link carries, by the number of nodes.

    Batch per node, loading and computing stay as measured; waiting for the network is
    formulas.sync_wait, and no step is shorter than the cable of a share needs for its images and
    gradients; waiting for slower peers is not predicted.
    """
    compared = list(dict.fromkeys([*strategies.usual(), requested]))
    rows = [predict_row(basis, 1, compared[0], rate(1), phases)]
    for n in range(2, nodes + 1):
        rows += [predict_row(basis, n, strategy, rate(n), phases) for strategy in compared]
    return rows


def predict_row(basis: Basis, nodes: int, strategy: Strategy, rate: float, phases: Phases) -> Row:
    """One prediction."""
    family = phases.family
    step, scaled = basis.step_of(nodes), strategy.of(family)
    images = step.images * nodes / step.nodes

    def bytes_and_seconds(used: Strategy) -> tuple[float, float]:
        sent = used.bytes_per_step(nodes, step.payload_for(used), step.gpus)
        busy = basis.reading.cable_bytes(nodes, images, sent) / rate if basis.reading else 0.0
        return sent, max(step.work + step.wait(used, nodes, rate), busy)

    sent, spent = bytes_and_seconds(scaled)
    _, exact = bytes_and_seconds(strategies.parse(EXACT))
    over_run = images / phases.mean(strategy, spent, exact)
    run = None
    if basis.train_images:
        evaluated = basis.evaluate_seconds * step.nodes / nodes
        run = phases.epochs * (basis.train_images / over_run + evaluated)
    # One machine sums nothing.
    label = prices.label_of(strategy, family) if nodes > 1 else "exact"
    steps = basis.train_images and phases.epochs * basis.train_images / images
    if label == "safe" and not prices.is_acceptable(strategy, family, steps):
        label = SHORT
    samples: float | None = None if label == "experimental" else 1.0
    if label == "costs samples":
        samples = prices.price_of(strategy, family).samples
    figures = nodes, strategy.spec, sent, spent, images / spent, over_run, run
    return Row(*figures, label=label, samples=samples)


def fastest(rows: list[Row]) -> Row:
    """The row that has all-reduce's accuracy first, by what is known of it; among equals, the one
    with fewer machines."""
    reached = [row for row in rows if row.samples]
    return max(
        reached, key=lambda row: (row.run_images_per_second / (row.samples or 1), -row.nodes)
    )


def best(rows: list[Row]) -> Row:
    """The most exact of those that are nearly the fastest and cost such a run no accuracy: exact
    ones, and those measured as safe."""
    taken = {row: 1 / row.run_images_per_second for row in rows if row.label in HARMLESS}
    return prices.most_exact(taken, lambda row: strategies.parse(row.sync))


def best_exact(rows: list[Row]) -> Row:
    return fastest([row for row in rows if row.label == "exact"])


def worth_showing(rows: list[Row], requested: Strategy) -> list[Row]:
    """At most 12 rows: one machine, what is best, and of two and of all machines the same with the
    strategy asked for."""
    chosen = [rows[0], best(rows), best_exact(rows), fastest(rows)]
    for nodes in {2, rows[-1].nodes} & {row.nodes for row in rows[1:]}:
        here = [row for row in rows if row.nodes == nodes]
        chosen += [best(here), best_exact(here), fastest(here)]
        chosen += [row for row in here if row.sync == requested.spec]
    return [row for row in rows if row in chosen]


def conclusion(rows: list[Row]) -> str:
    """Which number of nodes and sync is best, and whether more machines are worth it at all."""
    alone, winner, nodes = rows[0], best(rows), rows[-1].nodes
    if nodes == 1:
        return f"One machine: {three_digits(alone.images_per_second)} images/s."
    full = [row for row in rows if row.nodes == nodes]
    exact, sentence = full[0], ""
    if exact.images_per_second < alone.images_per_second:
        factor = alone.images_per_second / exact.images_per_second
        sentence = (
            f"One machine is {factor:.1f} x as fast as {nodes} with sync {exact.sync}: the "
            "gradients take longer to send than the batch takes to compute. "
        )
    if winner.nodes == 1:
        harmless = best(full)
        sentence += (
            f"Train on one machine, or raise BATCH: even the best of {nodes} machines "
            f"({harmless.sync}) gives {times_one(harmless, rows):.2f} x that. "
        )
    else:
        sentence += f"Best (*): {_describe(winner, rows)}{_why(winner, rows)}. Best exact (=): "
        sentence += f"{_describe(best_exact(rows), rows)}. "
    first = fastest(rows)
    if first.label not in HARMLESS:
        sentence += f"Fastest (+): {_describe(first, rows)}, whose accuracy is {_accuracy(first)}. "
    return sentence + "What a strategy costs in accuracy: docs/slow-networks.md."


def reading_sentence(
    basis: Basis, nodes: int, rate: Callable[[int], float], requested: Strategy, phases: Phases
) -> str:
    """What images cost that come from a share through the cable of the gradients, and what would
    help: by that run's, or where it read from none by ImageNet's. Empty where they cost nothing."""
    measured = basis.reading or Reading(IMAGENET, by_member=True)
    if nodes == 1 or (basis.image_size or 0) < LARGE_PIXELS:
        return ""

    def speed(image_bytes: float) -> float:
        reading = replace(measured, image_bytes=image_bytes)
        rows = predict(replace(basis, reading=reading), nodes, rate, requested, phases)
        return best([row for row in rows if row.nodes == nodes]).images_per_second

    now, shrunk, cached = map(speed, (measured.image_bytes, SHRUNK, 0.0))
    if cached < WORTH_READING * now:
        return ""
    counted = (
        "as the table counts" if basis.reading else "as ImageNet's, which the table leaves out"
    )
    sentence = (
        "Images of a share go through the same cable as gradients. With "
        f"{size(measured.image_bytes)} each, {counted}, {nodes} machines train on "
        f"{three_digits(now)} images/s at most; "
    )
    if shrunk > WORTH_READING * now:
        shrink = f"after `make shrink SIZE=256` ({size(SHRUNK)} each) on {three_digits(shrunk)}; "
        sentence += shrink
    return sentence + (
        f"with {CACHE} in group_vars/all.yml, by which each machine reads an image once, on "
        f"{three_digits(cached)} after the first epoch."
    )


def _why(winner: Row, rows: list[Row]) -> str:
    """Where something else that costs no accuracy is a little faster."""
    first = fastest([row for row in rows if row.label in HARMLESS])
    gain = first.run_images_per_second / winner.run_images_per_second - 1
    if first == winner or gain <= 0:
        return ""
    return f", the most exact of those that are nearly the fastest ({_describe(first, rows)})"


def _accuracy(row: Row) -> str:
    if row.label == "costs samples":
        return f"all-reduce's after {row.samples:.2f} times as many images, in as much more time"
    if row.label == SHORT:
        return "measured as safe in longer runs alone"
    return row.label if row.label == "not measured" else f"labelled {row.label}"


def _describe(row: Row, rows: list[Row]) -> str:
    if row.nodes == 1:
        return "one machine"
    factor = times_one(row, rows)
    return f"{pluralize(row.nodes, 'node')} with sync {row.sync}, {factor:.2f} x one machine"


def times_one(row: Row, rows: list[Row]) -> float:
    """The speed-up over one machine, over a whole run."""
    return row.run_images_per_second / rows[0].run_images_per_second
