"""Compute the course of a run: throughput over time, top-1 over epochs, the time of 100 epochs.

analysis.py and status.py call this module; time_charts.py and run_view.py draw its results.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from boundary.run_files import RankStart
from report import measure
from report.accounting import Accounting, attempt_numbers, wall_seconds
from report.measure import longest_attempt
from report.read import RankRecord, RunRecord
from report.windows import Points

POINTS = 240  # of a time line; a chart cannot show more
# Slices of a loop, and the fewest lines of a slice. A 95th percentile needs 20 values.
SPANS, PER_SPAN = 120, 20


@dataclass(frozen=True)
class Epoch:
    """The scores after one epoch. `make status JSON=1` prints these fields."""

    epoch: int  # from 1
    top1: float | None  # of validation images, in [0, 1], like top5
    top5: float | None
    loss: float | None  # of validation images
    train_loss: float | None  # mean over the epoch's steps, like train_top1
    seconds: float  # since the run began, without the time between attempts
    train_top1: float | None = None
    part: str = ""  # ` over 7 of 60 images`, if some images could not be read


@dataclass(frozen=True)
class Span:
    """The steps of all ranks in a slice of the loop. All values are seconds."""

    seconds: float  # since the loop began
    p50: float  # half of the steps were shorter
    p95: float


@dataclass(frozen=True)
class TimePoint:
    """A slice of the loop: the rate of all ranks, and the fractions of time spent waiting."""

    seconds: float  # since the loop began
    images_per_second: float
    data_share: float
    sync_share: float


def learning_curve(run: RunRecord, newest_only: bool = False) -> list[Epoch]:
    """Return the evaluated epochs in order. If two attempts evaluated an epoch, the later attempt
    counts. `newest_only`: read only the last evaluation of each rank."""
    # The seconds of all attempts before an attempt, by its number.
    starts, passed = {}, 0.0
    for attempt in attempt_numbers(run):
        starts[attempt] = passed
        passed += wall_seconds(run, attempt, run.ranks_in(attempt))
    epochs: dict[int, Epoch] = {}
    for record in run.ranks:
        # The process starts before the loop, and clocks of evaluations count from the loop.
        began, loop = record.start.mono_process, record.start.mono
        to_loop = 0.0 if began is None or loop is None else max(0.0, loop - began)
        for timed in record.evaluations[-1:] if newest_only else record.evaluations:
            scores, images, part = timed.scores, record.start.eval_images, ""
            if scores.epoch is None:
                continue
            # A score over some images must not look like a score over all images.
            if images and scores.samples is not None and scores.samples < images:
                part = f" over {scores.samples} of {images} images"
            epochs[scores.epoch] = Epoch(
                epoch=scores.epoch + 1,
                top1=scores.top1,
                top5=scores.top5,
                loss=scores.loss,
                train_loss=scores.train_loss,
                seconds=starts[record.attempt] + to_loop + timed.clock,
                train_top1=scores.train_top1,
                part=part,
            )
    return [epochs[epoch] for epoch in sorted(epochs)]


def time_line(run: RunRecord) -> list[TimePoint]:
    """Cut the longest attempt into at most POINTS equal slices. Omit slices without steps."""
    records = longest_attempt(run.ranks)
    end = max((record.steps.clock[-1] for record in records), default=0.0)
    if end <= 0:
        return []
    lines = max(len(record.steps) for record in records)
    # With fewer than three lines, the rate of a slice would depend on where its ends are.
    slices = max(1, min(POINTS, lines // 3))
    width = end / slices
    images, spent, data, sync = ([0.0] * slices for _ in range(4))
    for record in records:
        columns = record.steps
        data_waits, sync_waits = columns.seconds["data"], columns.seconds["sync_exposed"]
        for line, (clock, total) in enumerate(zip(columns.clock, columns.total)):
            # A line belongs to the slice that contains its middle.
            index = min(slices - 1, int((clock - total / 2) / width))
            images[index] += columns.samples[line]
            spent[index] += total
            data[index] += data_waits[line]
            sync[index] += sync_waits[line]
    return [
        TimePoint(
            seconds=(index + 0.5) * width,
            # `spent` has the seconds of all ranks, which train at the same time.
            images_per_second=images[index] * len(records) / spent[index],
            data_share=data[index] / spent[index],
            sync_share=sync[index] / spent[index],
        )
        for index in range(slices)
        if spent[index] > 0
    ]


def scalar_lines(run: RunRecord) -> dict[str, Points]:
    """Return at most POINTS points of each scalar of the longest attempt, by seconds of the loop. A
    point is the mean over all ranks and over neighbouring lines of steps."""
    records = longest_attempt(run.ranks)
    points_by_name: dict[str, Points] = {}  # of all ranks
    for columns in (record.steps for record in records):
        for name, values in columns.scalars.items():
            recorded = [(clock, v) for clock, v in zip(columns.clock, values) if not math.isnan(v)]
            points_by_name.setdefault(name, []).extend(recorded)
    lines = {}
    for name, points in points_by_name.items():
        points.sort()
        # A group of neighbouring points has a point of each rank, or more.
        size = max(len(records), -(-len(points) // POINTS))
        groups = (points[begin : begin + size] for begin in range(0, len(points), size))
        lines[name] = [
            (statistics.fmean(clocks), statistics.fmean(values))
            for clocks, values in (zip(*group) for group in groups)
        ]
    return lines


def step_spans(run: RunRecord) -> list[Span]:
    """Cut the longest attempt into at most SPANS slices of PER_SPAN lines or more."""
    # The first line, whose step warms up, is omitted. A line of several steps records only their
    # mean and their longest step, so p50 is taken from the means, and p95 from the longest steps.
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
        span = slice(begin, begin + size)
        p50 = statistics.median(mean for rank in means for mean in rank[span])
        longest = sorted(length for record in records for length in record.steps.longest[span])
        middle = records[0].steps.clock[begin + size // 2]
        p95 = longest[int(0.95 * (len(longest) - 1))]
        spans.append(Span(seconds=middle, p50=p50, p95=p95))
    return spans


def seconds_left(
    records: Sequence[RankRecord], step: int | None, steps: int | None
) -> float | None:
    """Return the seconds of the remaining steps, with evaluation and saving as often as before.
    Return None if a number of steps is unknown."""
    if step is None or steps is None:
        return None
    return max(0, steps - step) * max(record.clock / record.step_count for record in records)


def steps_of_run(start: RankStart) -> int | None:
    """Return the number of steps of the whole run; None if it is unknown, as for a trial."""
    steps = None if start.options.get("trial") else measure.count_planned_steps(start)
    return None if steps is None else int(steps)


def hundred_epochs(run: RunRecord, accounting: Accounting) -> float | None:
    """Return the seconds of one run of 100 epochs like the measured ones; None if unknown."""
    records = longest_attempt(run.ranks)
    # Without the length of an epoch there is nothing to multiply.
    per_epoch = records[0].start.steps_per_epoch if records else None
    if not per_epoch:
        return None
    epochs = statistics.fmean(record.step_count for record in records) / per_epoch
    skip_warm_up = measure.has_steps_after_warm_up(records)
    step_seconds = statistics.fmean(
        sum(measure.mean_step_seconds(record, skip_warm_up).values()) for record in records
    )
    # Evaluation, saving and other work between steps happens in each epoch.
    other_seconds = statistics.fmean(record.clock - sum(record.steps.total) for record in records)
    # The warm-up of a strategy, start and stop happen once, however many epochs a run has. Only
    # what the warm-up takes longer than other steps is added.
    warm_steps = statistics.fmean(map(measure.count_warm_up_steps, records)) if skip_warm_up else 0
    added = measure.measure_warm_up_step(records) - step_seconds if warm_steps else 0.0
    # `start_stop` is the sum over all attempts, but a run without failures has a single attempt.
    attempts = max(1, len({time.attempt for time in accounting.ranks}))
    once = warm_steps * added + accounting.seconds["start_stop"] / attempts
    return 100 * (per_epoch * step_seconds + other_seconds / epochs) + once
