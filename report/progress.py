"""How the run progressed: throughput over time, top-1 over epochs, and how long 100 epochs take."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from report.accounting import Accounting, attempt_numbers, wall_seconds
from report.files import number
from report.measure import goes_on, longest_attempt, steady_seconds, warm_step
from report.records import RankRecord, Run

POINTS = 240  # of a time line: more could not be told apart
SPANS, PER_SPAN = 120, 20  # slices of a loop; steps in one, of which one in twenty is the p95


@dataclass(frozen=True)
class Epoch:
    """Evaluation after one epoch (counted from 1). top1 and top5 in [0, 1]; the loss on
    validation images, and the mean over the epoch's training steps. `seconds`: since the run began,
    without the time between attempts."""

    epoch: int
    top1: float | None
    top5: float | None
    loss: float | None
    train_loss: float | None
    seconds: float


@dataclass(frozen=True)
class Span:
    """Steps of all ranks in a slice of the loop: when, how long half of them took at most, and how
    long 95 of 100."""

    seconds: float
    half: float
    most: float


@dataclass(frozen=True)
class TimePoint:
    """A slice of the loop: seconds since it began, the rate of all ranks, and the fractions spent
    waiting."""

    seconds: float
    images_per_second: float
    data_share: float
    sync_share: float


def learning_curve(run: Run) -> list[Epoch]:
    """One Epoch per evaluated epoch; after a restart the later attempt counts."""
    found: dict[int, Epoch] = {}
    began = beginnings(run)
    for record in run.ranks:
        for line in record.evaluations:
            epoch = number(line.get("epoch"))
            if epoch is not None:
                top1, top5 = (share_of(line.get(key)) for key in ("top1", "top5"))
                loss, trained = (number(line.get(key)) for key in ("loss", "train_loss"))
                seconds = began[record.attempt] + loop_began(record) + line["clock"]
                found[int(epoch)] = Epoch(int(epoch) + 1, top1, top5, loss, trained, seconds)
    return [found[epoch] for epoch in sorted(found)]


def beginnings(run: Run) -> dict[int, float]:
    """Attempt -> seconds that the attempts before it took."""
    found, passed = {}, 0.0
    for attempt in attempt_numbers(run):
        found[attempt] = passed
        records = [record for record in run.ranks if record.attempt == attempt]
        passed += wall_seconds(run, attempt, records)
    return found


def loop_began(record: RankRecord) -> float:
    """Seconds from the start of an attempt to its first step."""
    started, began = record.start.get("mono_process"), record.start.get("mono")
    return 0.0 if started is None or began is None else max(0.0, began - started)


def share_of(value: object) -> float | None:
    """The value when it is in [0, 1], else None."""
    value = number(value)
    return value if value is not None and 0 <= value <= 1 else None


def time_line(run: Run) -> list[TimePoint]:
    """At most POINTS equal slices of the longest attempt; one without a step has no point."""
    records = longest_attempt(run.ranks)
    end = max((record.steps.clock[-1] for record in records), default=0.0)
    if end <= 0:
        return []
    steps = max(len(record.steps) for record in records)
    slices = max(1, min(POINTS, steps // 3))
    width = end / slices
    images, spent, data, sync = ([0.0] * slices for _ in range(4))
    for record in records:
        columns = record.steps
        for index, clock in enumerate(columns.clock):
            at = min(slices - 1, int((clock - columns.total[index] / 2) / width))
            images[at] += columns.samples[index]
            spent[at] += columns.total[index]
            data[at] += columns.data[index]
            sync[at] += columns.sync[index]
    return [
        TimePoint(
            (at + 0.5) * width,
            images[at] * len(records) / spent[at],
            data[at] / spent[at],
            sync[at] / spent[at],
        )
        for at in range(slices)
        if spent[at] > 0
    ]


def step_spans(run: Run) -> list[Span]:
    """At most SPANS slices of the longest attempt, each with PER_SPAN steps of a rank or more; the
    first step, which warms up, is left out."""
    records = longest_attempt(run.ranks)
    steps = min((len(record.steps) for record in records), default=0) - 1
    if steps < 2 * PER_SPAN:
        return []
    size = max(PER_SPAN, -(-steps // SPANS))
    found = []
    for begin in range(1, steps + 2 - size, size):
        slices = [record.steps.total[begin : begin + size] for record in records]
        lengths = sorted(length for one in slices for length in one)
        middle = records[0].steps.clock[begin + size // 2]
        half, most = (lengths[int(part * (len(lengths) - 1))] for part in (0.5, 0.95))
        found.append(Span(middle, half, most))
    return found


def images_per_second(run: Run) -> float | None:
    """Training images of all ranks over the time of the step lines (mean over ranks)."""
    images, seconds = images_and_seconds(run)
    return images / seconds if seconds > 0 else None


def images_and_seconds(run: Run) -> tuple[float, float]:
    """How many images all ranks trained on in all attempts, and how long their steps took."""
    images = seconds = 0.0
    for attempt in {record.attempt for record in run.ranks}:
        records = [r for r in run.ranks if r.attempt == attempt and len(r.steps)]
        if records:
            world = max(len(records), int(number(records[0].start.get("world_size")) or 0))
            images += world * statistics.fmean(sum(record.steps.samples) for record in records)
            seconds += statistics.fmean(sum(record.steps.total) for record in records)
    return images, seconds


def hundred_epochs(run: Run, accounting: Accounting) -> float | None:
    """Seconds that 100 epochs like the measured ones take.

    100 x (steps per epoch x mean step without the first, + evaluation, saving and the rest per
    epoch) + start and stop; the warm-up of a strategy counts once. None where no epoch's length is
    known.
    """
    records = longest_attempt(run.ranks)
    per_epoch = number(records[0].start.get("steps_per_epoch")) if records else None
    if not per_epoch:
        return None
    epochs = statistics.fmean(len(record.steps) for record in records) / per_epoch
    later = goes_on(records)
    step = statistics.fmean(sum(steady_seconds(record, later).values()) for record in records)
    warm = statistics.fmean(sum(record.steps.exact) for record in records) if later else 0
    warming = warm * (warm_step(records) - step) if warm else 0.0
    beside = statistics.fmean(
        sum(record.seconds.values()) - sum(record.step_seconds.values()) - record.steps.beyond
        for record in records
    )
    attempts = max(1, len({time.attempt for time in accounting.ranks}))
    once = warming + accounting.seconds["start_stop"] / attempts
    return 100 * (per_epoch * step + beside / epochs) + once
