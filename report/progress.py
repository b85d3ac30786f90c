"""How the run progressed: throughput over time, top-1 over epochs, and how long 100 epochs take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from boundary.run_files import RankStart
from report.accounting import Accounting, attempt_numbers, wall_seconds
from report.measure import (
    has_later_steps,
    longest_attempt,
    steady_seconds,
    steps_of,
    warm_step,
    warm_steps,
)
from report.read import RankRecord, Run

POINTS = 240  # of a time line: more could not be told apart
SPANS, PER_SPAN = 120, 20  # slices of a loop; steps in one, of which one in twenty is the p95


@dataclass(frozen=True)
class Epoch:
    """Evaluation after one epoch (counted from 1). top1 and top5 in [0, 1] and the loss on
    validation images, and the means over the epoch's training steps. `seconds`: since the run
    began, without the time between attempts. `part`: ` over 7 of 60 images`, if not all could be
    read."""

    epoch: int
    top1: float | None
    top5: float | None
    loss: float | None
    train_loss: float | None
    seconds: float
    train_top1: float | None = None
    part: str = ""


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


def learning_curve(run: Run, last: bool = False) -> list[Epoch]:
    """One Epoch per evaluated epoch; after a restart the later attempt counts. `last`: only what
    each rank evaluated last."""
    epochs: dict[int, Epoch] = {}
    began = beginnings(run)
    for record in run.ranks:
        for clock, line in record.evaluations[-1:] if last else record.evaluations:
            if line.epoch is not None:
                seconds = began[record.attempt] + loop_began(record) + clock
                part, images = "", record.start.eval_images
                if images and line.samples is not None and line.samples < images:
                    part = f" over {line.samples} of {images} images"
                scores = (line.top1, line.top5, line.loss, line.train_loss)
                epochs[line.epoch] = Epoch(line.epoch + 1, *scores, seconds, line.train_top1, part)
    return [epochs[epoch] for epoch in sorted(epochs)]


def beginnings(run: Run) -> dict[int, float]:
    """Attempt -> seconds that the attempts before it took."""
    starts, passed = {}, 0.0
    for attempt in attempt_numbers(run):
        starts[attempt] = passed
        records = [record for record in run.ranks if record.attempt == attempt]
        passed += wall_seconds(run, attempt, records)
    return starts


def loop_began(record: RankRecord) -> float:
    """Seconds from the start of an attempt to its first step."""
    started, began = record.start.mono_process, record.start.mono
    return 0.0 if started is None or began is None else max(0.0, began - started)


def time_line(run: Run) -> list[TimePoint]:
    """At most POINTS equal slices of the longest attempt; one without a step has no point."""
    records = longest_attempt(run.ranks)
    end = max((record.steps.clock[-1] for record in records), default=0.0)
    if end <= 0:
        return []
    lines = max(len(record.steps) for record in records)
    slices = max(1, min(POINTS, lines // 3))
    width = end / slices
    images, spent, data, sync = ([0.0] * slices for _ in range(4))
    for record in records:
        columns = record.steps
        waits = columns.seconds["data"], columns.seconds["sync_exposed"]
        for index, (clock, total) in enumerate(zip(columns.clock, columns.total)):
            at = min(slices - 1, int((clock - total / 2) / width))
            images[at] += columns.samples[index]
            spent[at] += total
            data[at] += waits[0][index]
            sync[at] += waits[1][index]
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
    """At most SPANS slices of the longest attempt, each with PER_SPAN lines of a rank or more; the
    first step, which warms up, is left out. Of a line of several steps their mean and the longest
    are known."""
    records = longest_attempt(run.ranks)
    lines = min((len(record.steps) for record in records), default=0) - 1
    if lines < 2 * PER_SPAN:
        return []
    size = max(PER_SPAN, -(-lines // SPANS))
    means = [
        [total / steps for total, steps in zip(record.steps.total, record.steps.count)]
        for record in records
    ]
    spans = []
    for begin in range(1, lines + 2 - size, size):
        part = slice(begin, begin + size)
        half = statistics.median(length for own in means for length in own[part])
        longest = sorted(length for record in records for length in record.steps.longest[part])
        middle = records[0].steps.clock[begin + size // 2]
        spans.append(Span(middle, half, longest[int(0.95 * (len(longest) - 1))]))
    return spans


def time_left(records: Sequence[RankRecord], step: int | None, steps: int | None) -> float | None:
    """The steps that are left, each as long as those so far with what was beside them, as the
    trainer's own lines say it."""
    if step is None or steps is None:
        return None
    return max(0, steps - step) * max(record.clock / steps_of(record) for record in records)


def steps_of_run(start: RankStart) -> int | None:
    """The number of steps of the whole run; None where it is not known, as for a trial."""
    per_epoch, epochs = start.steps_per_epoch, start.epochs
    if not per_epoch or not epochs or start.options.get("trial"):
        return None
    return int(per_epoch * epochs)


def hundred_epochs(run: Run, accounting: Accounting) -> float | None:
    """Seconds that 100 epochs like the measured ones take.

    100 x (steps per epoch x mean step without the first, + evaluation, saving and the rest per
    epoch) + start and stop; the warm-up of a strategy counts once. None where no epoch's length is
    known.
    """
    records = longest_attempt(run.ranks)
    per_epoch = records[0].start.steps_per_epoch if records else None
    if not per_epoch:
        return None
    epochs = statistics.fmean(map(steps_of, records)) / per_epoch
    later = has_later_steps(records)
    step = statistics.fmean(sum(steady_seconds(record, later).values()) for record in records)
    warm = statistics.fmean(map(warm_steps, records)) if later else 0
    warming = warm * (warm_step(records) - step) if warm else 0.0
    beside = statistics.fmean(record.clock - sum(record.steps.total) for record in records)
    attempts = max(1, len({time.attempt for time in accounting.ranks}))
    once = warming + accounting.seconds["start_stop"] / attempts
    return 100 * (per_epoch * step + beside / epochs) + once
