"""Predict images per second for 1..N nodes and each sync strategy, and say which is best.

plan.py calls this module with a Basis: the measured step of an earlier run of the same model, with
any number of nodes. A prediction changes only the wait for the network (formulas.sync_wait).
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

HARMLESS = ("exact", "safe")  # labels of strategies that cost no accuracy
MIN_READING_GAIN = 1.03  # a smaller factor of speed is no gain
SHORT = "short run"  # the label if the strategy was measured as safe only in longer runs


@dataclass(frozen=True)
class Basis:
    """The measurements that a prediction starts from."""

    run: str
    model: str
    image_size: int | None
    batch: int  # images per node and step
    # steps[n - 1] is the mean step of n machines. For more machines than `steps` has, the last step
    # counts: all machines wait for the slowest machine.
    steps: tuple[Step, ...]
    train_images: int | None
    evaluate_seconds: float  # per epoch, on as many machines as in the last of `steps`
    precision: str | None = None
    about: tuple[str, ...] = ()  # sentences on where the figures come from
    # Only a measurement by `make plan`, in which each machine trained without the other machines,
    # has `machines`, `unix`, `rates` and `links`.
    machines: tuple[str, ...] = ()
    unix: float = 0.0  # the time of the measurement
    rates: tuple[float, ...] = ()  # rates[n - 1]: bytes/s of a link while n machines send
    links: Links | None = None
    machine_speeds: dict[str, float] = field(default_factory=dict)  # images/s of each machine
    reading: Reading | None = None  # images that the run read from a share

    @property
    def setting(self) -> runs.Setting:
        return runs.Setting(self.model, self.batch, self.image_size, self.precision, self.machines)

    @property
    def step(self) -> Step:
        return self.steps[-1]


@dataclass(frozen=True)
class Row:
    """A prediction, as the plan's file stores it."""

    nodes: int
    sync: str
    # A step after the warm-up. The bytes are those that one node sends.
    bytes_sent: float
    step_seconds: float
    images_per_second: float
    # The whole run. The seconds include evaluation; None if the number of images is unknown.
    run_images_per_second: float
    run_seconds: float | None
    label: str  # of the strategy, with the run's optimizer
    # How many times as many images the strategy needs to reach all-reduce's accuracy: 1 if that was
    # not measured, None if no measured run reached it.
    samples: float | None = 1.0


def predict(
    basis: Basis, nodes: int, rate: Callable[[int], float], requested: Strategy, phases: Phases
) -> list[Row]:
    """Return a Row for one node. For each larger number of nodes, return Rows for all usual
    strategies and the requested strategy. `rate`: number of nodes -> bytes per second of a link."""
    compared = list(dict.fromkeys([*strategies.list_usual(), requested]))
    rows = [predict_row(basis, 1, compared[0], rate(1), phases)]
    for n in range(2, nodes + 1):
        rows += [predict_row(basis, n, strategy, rate(n), phases) for strategy in compared]
    return rows


def predict_row(basis: Basis, nodes: int, strategy: Strategy, rate: float, phases: Phases) -> Row:
    """Predict one number of nodes with one strategy, over links of `rate` bytes per second."""
    # Batch per node, loading and computing stay as measured, without waits for slower machines.
    family = phases.family
    step, scaled = basis.steps[min(nodes, len(basis.steps)) - 1], strategy.for_family(family)
    images = step.images * nodes / step.nodes

    def bytes_and_seconds(used: Strategy) -> tuple[float, float]:
        """Return the bytes that a node sends in a step, and the seconds of the step."""
        sent = used.bytes_per_step(nodes, step.payload_for(used), step.ranks_per_machine)
        # A step is not shorter than the cable of a share needs for its images and gradients.
        cable = basis.reading.cable_bytes(nodes, images, sent) / rate if basis.reading else 0.0
        return sent, max(step.work + step.wait(used, nodes, rate), cable)

    # The warm-up of a compressing strategy sums exactly, at the speed of all-reduce.
    sent, spent = bytes_and_seconds(scaled)
    _, exact = bytes_and_seconds(strategies.parse(EXACT))
    run_speed = images / phases.mean(strategy, spent, exact)
    run_seconds = None
    if basis.train_images:
        evaluation = basis.evaluate_seconds * step.nodes / nodes
        run_seconds = phases.epochs * (basis.train_images / run_speed + evaluation)
    # One machine sums no gradients, whatever the strategy.
    label = prices.label_of(strategy, family) if nodes > 1 else "exact"
    steps = basis.train_images and phases.epochs * basis.train_images / images
    # In a shorter run than the measured runs, a strategy is not known to be safe.
    if label == "safe" and not prices.is_acceptable(strategy, family, steps):
        label = SHORT
    samples: float | None = None if label == "experimental" else 1.0
    if label == "costs samples":
        samples = prices.price_of(strategy, family).samples
    return Row(
        nodes=nodes,
        sync=strategy.spec,
        bytes_sent=sent,
        step_seconds=spent,
        images_per_second=images / spent,
        run_images_per_second=run_speed,
        run_seconds=run_seconds,
        label=label,
        samples=samples,
    )


def fastest(rows: list[Row]) -> Row:
    """Return the row that reaches all-reduce's accuracy first, with as few machines as possible."""
    # A strategy that needs more images takes that much longer. Rows without `samples` never reach
    # the accuracy.
    reaching = [row for row in rows if row.samples]
    return max(
        reaching, key=lambda row: (row.run_images_per_second / (row.samples or 1), -row.nodes)
    )


def best(rows: list[Row]) -> Row:
    """Return the most exact of the nearly fastest rows whose label is exact or safe."""
    seconds = {row: 1 / row.run_images_per_second for row in rows if row.label in HARMLESS}
    return prices.most_exact(seconds, lambda row: strategies.parse(row.sync))


def best_exact(rows: list[Row]) -> Row:
    return fastest([row for row in rows if row.label == "exact"])


def select_rows(rows: list[Row], requested: Strategy) -> list[Row]:
    """Return at most 12 rows for the table: one machine, and the best rows of all. For two and for
    all machines, add the best rows and the requested strategy."""
    chosen = [rows[0], best(rows), best_exact(rows), fastest(rows)]
    for nodes in {2, rows[-1].nodes} & {row.nodes for row in rows[1:]}:
        group = [row for row in rows if row.nodes == nodes]
        chosen += [best(group), best_exact(group), fastest(group)]
        chosen += [row for row in group if row.sync == requested.spec]
    return [row for row in rows if row in chosen]


def conclusion(rows: list[Row]) -> str:
    """Say which number of nodes and sync is best, and if more machines are worth it at all."""
    single, winner, nodes = rows[0], best(rows), rows[-1].nodes
    if nodes == 1:
        return f"One machine: {three_digits(single.images_per_second)} images/s."
    full = [row for row in rows if row.nodes == nodes]
    # The first row of each number of machines is all-reduce.
    exact, sentence = full[0], ""
    if exact.images_per_second < single.images_per_second:
        factor = single.images_per_second / exact.images_per_second
        sentence = (
            f"One machine is {factor:.1f} x as fast as {nodes} with sync {exact.sync}, "
            "because sending the gradients takes longer than computing a batch. "
        )
    if winner.nodes == 1:
        harmless = best(full)
        sentence += (
            "Train on one machine, or raise BATCH: even with the best strategy "
            f"({harmless.sync}), {nodes} machines are only {times_one(harmless, rows):.2f} x "
            "as fast as one. "
        )
    else:
        # If a faster strategy costs no accuracy either, the choice would look like a mistake.
        faster = fastest([row for row in rows if row.label in HARMLESS])
        reason = ""
        if faster != winner and faster.run_images_per_second > winner.run_images_per_second:
            reason = (
                ", the most exact strategy within 5 % of the fastest "
                f"({describe_row(faster, rows)})"
            )
        sentence += f"Best (*): {describe_row(winner, rows)}{reason}. Best exact (=): "
        sentence += f"{describe_row(best_exact(rows), rows)}. "
    winner = fastest(rows)
    if winner.label not in HARMLESS:
        accuracy = winner.label if winner.label == "not measured" else f"labelled {winner.label}"
        if winner.label == "costs samples":
            accuracy = (
                f"all-reduce's accuracy after {winner.samples:.2f} times as many images, "
                "which takes that much longer"
            )
        elif winner.label == SHORT:
            accuracy = "measured as safe in longer runs only"
        sentence += f"Fastest (+): {describe_row(winner, rows)}, whose accuracy is {accuracy}. "
    return sentence + "docs/slow-networks.md says what a strategy costs in accuracy."


def reading_sentence(
    basis: Basis, nodes: int, rate: Callable[[int], float], requested: Strategy, phases: Phases
) -> str:
    """Say by how much images of a share slow down the gradients on the same cable, and what would
    help. Return "" if that is little. A run that read from no share is taken to read ImageNet."""
    measured = basis.reading or Reading(IMAGENET, by_member=True)
    if nodes == 1 or (basis.image_size or 0) < LARGE_PIXELS:
        return ""

    def predict_speed(image_bytes: float) -> float:
        """Return the images/s if an image has `image_bytes` on the cable."""
        reading = replace(measured, image_bytes=image_bytes)
        rows = predict(replace(basis, reading=reading), nodes, rate, requested, phases)
        return best([row for row in rows if row.nodes == nodes]).images_per_second

    current, shrunk = predict_speed(measured.image_bytes), predict_speed(SHRUNK)
    cached = predict_speed(0.0)  # after the first epoch, each machine has all images
    if cached < MIN_READING_GAIN * current:
        return ""
    counted = "as the table counts" if basis.reading else "as in ImageNet (the table ignores this)"
    sentence = (
        "Images of a share use the same cable as gradients. With "
        f"{size(measured.image_bytes)} each, {counted}, {nodes} machines reach at most "
        f"{three_digits(current)} images/s. "
    )
    if shrunk > MIN_READING_GAIN * current:
        sentence += f"`make shrink SIZE=256` ({size(SHRUNK)} each) allows {three_digits(shrunk)}. "
    return sentence + (
        f"{CACHE} in group_vars/all.yml allows {three_digits(cached)} after the first epoch, "
        "because each machine then reads each image once."
    )


def describe_row(row: Row, rows: list[Row]) -> str:
    """Write a row: `one machine`, or `4 nodes with sync ef:5, 3.20 x one machine`."""
    if row.nodes == 1:
        return "one machine"
    factor = times_one(row, rows)
    return f"{pluralize(row.nodes, 'node')} with sync {row.sync}, {factor:.2f} x one machine"


def times_one(row: Row, rows: list[Row]) -> float:
    """Return the speed-up over one machine, over a whole run."""
    return row.run_images_per_second / rows[0].run_images_per_second
