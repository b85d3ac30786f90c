"""Make the charts over the time of a run: page.py draws them, and series.csv has their points."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from contract.text import csv_cell, seconds
from report.analysis import Analysis
from report.figures import DISK, FIGURES, GPU, INTERFACE, MACHINE
from report.hang import SHORTEST
from report.measure import longest_attempt
from report.read import Stalled
from report.usage import Usage
from report.view import Curve, Line, Mark
from report.windows import Points, thin

STALL_SLICE = 10.0  # seconds; the stalls of all ranks in such a slice get one mark
MOST_MARKS = 8
MOST_LOSSES = 1000  # of a rank


def charts_of(analysis: Analysis) -> list[Curve]:
    """Return all charts that have a line, with the marks of restarts, stalls and a failure."""
    # A script chooses the scalars that it records, so those charts come first.
    charts = [
        replace(curve_of(name, "", {"mean of the ranks": points}), steady=True)
        for name, points in analysis.scalars.items()
    ]
    charts += [*step_charts(analysis), *machine_charts(analysis)]
    records = longest_attempt(analysis.run.ranks)
    if not records:
        return [curve for curve in charts if curve.lines]
    attempt = records[0].attempt
    marks = [Mark(0.0, "restart")] if attempt > 1 else []
    # All ranks stall at about the same time, so only the longest stall of a slice gets a mark.
    longest: dict[int, Stalled] = {}  # by the index of the slice
    for stall in (stall for record in records for stall in record.stalls):
        index = round(stall.clock / STALL_SLICE)
        if stall.seconds >= max(SHORTEST, longest[index].seconds if index in longest else 0.0):
            longest[index] = stall
    marks += [Mark(s.clock, f"no step for {seconds(s.seconds)}") for s in longest.values()]
    if any(e.attempt == attempt and e.status == "failed" for e in analysis.run.attempts):
        marks.append(Mark(max(record.clock for record in records), "failure"))
    shown = tuple(sorted(marks)[:MOST_MARKS])
    return [replace(curve, marks=shown) for curve in charts if curve.lines]


def curve_of(
    title: str,
    unit: str,
    points_by_name: Mapping[str, Points],
    top: float | None = None,
    colours: tuple[str, ...] = (),
    note: str = "",
) -> Curve:
    """Return a curve with a line for each name that has two points or more. `top`: the upper edge,
    if it is fixed. The lines get `colours`, or by default the colours n0, n1, ..."""
    drawn = {name: points for name, points in points_by_name.items() if len(points) > 1}
    lines = [
        Line(name, colours[index] if colours else f"n{index}", points)
        for index, (name, points) in enumerate(drawn.items())
    ]
    return Curve(title, unit, lines, top=top, note=note)


def step_charts(analysis: Analysis) -> list[Curve]:
    """Return the charts of speed, step time and waits."""
    time_line, spans = analysis.time_line, analysis.spans
    speed = [(point.seconds, point.images_per_second) for point in time_line]
    if not any(value for _, value in speed):  # samples were not counted
        speed = []
    samples = analysis.run.samples
    step = {
        "half are shorter (p50)": [(span.seconds, 1000 * span.p50) for span in spans],
        "95 of 100 are shorter (p95)": [(span.seconds, 1000 * span.p95) for span in spans],
    }
    waits = {
        f"for {samples}": [(point.seconds, 100 * point.data_share) for point in time_line],
        "for gradients": [(point.seconds, 100 * point.sync_share) for point in time_line],
    }
    wait_colours = ("data", "sync_exposed")
    return [
        curve_of(f"{samples.capitalize()} per second", "", {"all": speed}, colours=("forward",)),
        curve_of("One step", "ms", step, colours=("forward", "sync_exposed")),
        curve_of("Share of the steps that waits", "%", waits, 100.0, wait_colours),
    ]


def machine_charts(analysis: Analysis) -> list[Curve]:
    """Return the chart of each figure that has one, with a line for each machine or GPU."""
    usage = analysis.evidence
    # Only the first disk of each host is drawn, which is the disk with the data if that is known.
    # The dictionary keeps the last disk that it gets for a host, so it gets them in reverse.
    disks = list({use.host: use for use in reversed(usage.disks)}.values())[::-1]
    kinds: list[tuple[str, Sequence[Usage]]] = [
        *((INTERFACE, usage.networks), (DISK, disks), (MACHINE, usage.machines), (GPU, usage.gpus))
    ]
    charts = []
    for kind, uses in kinds:
        # A host with several GPUs needs their indices in the names of the lines.
        has_several = len({use.host for use in uses}) < len(uses)
        named_uses = {f"{use.host} {use.name}" if has_several else use.host: use for use in uses}
        for figure in FIGURES[kind]:
            lines = {name: use.points(figure) for name, use in named_uses.items()}
            above_zero = any(y > 0 for points in lines.values() for _, y in points)
            if figure.chart and (figure.drawn_at_zero or above_zero):
                unit = figure.unit.symbol
                top = 100.0 if unit == "%" else None
                charts.append(curve_of(figure.chart, unit, lines, top, note=figure.note))
    return charts


def as_csv(analysis: Analysis) -> str:
    """Return series.csv: all points of lines with their units, the losses and the evaluations."""
    # Seconds count from the start of the loop; those of evaluations from the start of the run.
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(("what", "of", "seconds", "value", "unit"))
    for curve in charts_of(analysis):
        for line in curve.lines:
            names = csv_cell(curve.title), csv_cell(line.name)
            for clock, value in line.points:
                write((*names, f"{clock:.3f}", f"{value:.6g}", curve.unit))
    # The loss of each log point: the mean over the ranks. `by_step`: the clock and loss of each
    # rank, by the step.
    by_step: dict[int, list[tuple[float, float]]] = {}
    for rank in longest_attempt(analysis.run.ranks):
        rows = zip(rank.steps.step, rank.steps.clock, rank.steps.loss)
        logged = [(step, clock, loss) for step, clock, loss in rows if not math.isnan(loss)]
        for step, clock, loss in thin(logged, MOST_LOSSES):
            by_step.setdefault(step, []).append((clock, loss))
    for step, losses in sorted(by_step.items()):
        first_clock, _ = losses[0]  # of the first rank
        mean = fmean(loss for _, loss in losses)
        write(("loss", f"step {step}", f"{first_clock:.3f}", f"{mean:.6g}", ""))
    for epoch in analysis.curve:
        scores = {
            "top-1": epoch.top1,
            "top-1, training": epoch.train_top1,
            "loss, training": epoch.train_loss,
            "loss, validation": epoch.loss,
        }
        for name, score in scores.items():
            if score is not None:
                write((name, f"epoch {epoch.epoch}", f"{epoch.seconds:.3f}", f"{score:.6g}", ""))
    return file.getvalue()
