"""The charts over the time of a run: the page draws them, and series.csv has their points."""

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
from report.usage import Usage
from report.view import Curve, Line, Mark
from report.windows import Points


def charts_of(analysis: Analysis) -> list[Curve]:
    """All charts that have a line; a line needs two points."""
    charts = [*step_charts(analysis), *machine_charts(analysis)]
    marks = marks_of(analysis)
    return [replace(curve, marks=marks) for curve in charts if curve.lines]


def marks_of(analysis: Analysis) -> tuple[Mark, ...]:
    """A restart, stalls and a failure, by seconds of the loop that is drawn."""
    records = longest_attempt(analysis.run.ranks)
    if not records:
        return ()
    attempt = records[0].attempt
    marks = [Mark(0.0, "restart")] if attempt > 1 else []
    longest: dict[int, tuple[float, float]] = {}  # of all ranks, which stand at about one time
    for clock, length in (stall for record in records for stall in record.stalls):
        _, before = longest.get(round(clock / NEAR), (0.0, 0.0))
        if length >= max(SHORTEST, before):
            longest[round(clock / NEAR)] = clock, length
    marks += [Mark(clock, f"no step for {seconds(length)}") for clock, length in longest.values()]
    if any(e.attempt == attempt and e.status == "failed" for e in analysis.run.attempts):
        marks.append(Mark(max(record.clock for record in records), "failure"))
    return tuple(sorted(marks)[:MOST_MARKS])


NEAR = 10.0  # seconds
MOST_MARKS = 8
MOST_LOSSES = 1000  # of a rank


def curve(
    title: str,
    unit: str,
    lines: Mapping[str, Points],
    top: float | None = None,
    colours: tuple[str, ...] = (),
    note: str = "",
) -> Curve:
    """`lines` by name: a machine, a GPU, or what is drawn where there is one line for all."""
    drawn = [(name, points) for name, points in lines.items() if len(points) > 1]
    named = [
        Line(name, colours[place] if colours else f"n{place}", points)
        for place, (name, points) in enumerate(drawn)
    ]
    return Curve(title, unit, named, top=top, note=note)


def step_charts(analysis: Analysis) -> list[Curve]:
    line, spans = analysis.line, analysis.spans
    speed = [(point.seconds, point.images_per_second) for point in line]
    if not any(value for _, value in speed):  # samples were not counted
        speed = []
    images = [(point.seconds, 100 * point.data_share) for point in line]
    gradients = [(point.seconds, 100 * point.sync_share) for point in line]
    half = [(span.seconds, 1000 * span.half) for span in spans]
    most = [(span.seconds, 1000 * span.most) for span in spans]
    step = {"half are shorter (p50)": half, "95 of 100 are shorter (p95)": most}
    samples = analysis.run.samples
    waits = {f"for {samples}": images, "for gradients": gradients}
    return [
        curve(f"{samples.capitalize()} per second", "", {"all": speed}, colours=("forward",)),
        curve("One step", "ms", step, colours=("forward", "sync_exposed")),
        curve("Share of the steps that waits", "%", waits, 100.0, ("data", "sync_exposed")),
    ]


def machine_charts(analysis: Analysis) -> list[Curve]:
    """Of each figure that has one, with a line a machine or a GPU."""
    usage = analysis.evidence
    # One disk of each host, the one with the data, which comes first.
    disks = list({use.host: use for use in reversed(usage.disks)}.values())[::-1]
    kinds: list[tuple[str, Sequence[Usage]]] = [
        *((INTERFACE, usage.networks), (DISK, disks), (MACHINE, usage.machines), (GPU, usage.gpus))
    ]
    charts = []
    for kind, uses in kinds:
        several = len({use.host for use in uses}) < len(uses)
        named = {f"{use.host} {use.name}" if several else use.host: use for use in uses}
        for figure in FIGURES[kind]:
            lines = {name: use.points(figure) for name, use in named.items()}
            if figure.chart and (figure.drawn_at_zero or any_above_zero(lines)):
                unit = figure.unit.symbol
                top = 100.0 if unit == "%" else None
                charts.append(curve(figure.chart, unit, lines, top, note=figure.note))
    return charts


def any_above_zero(lines: Mapping[str, Points]) -> bool:
    return any(y > 0 for points in lines.values() for _, y in points)


def as_csv(analysis: Analysis) -> str:
    """Every point of every line: what, of whom, seconds since the loop began, value, unit; losses
    of log points; and what was evaluated, by seconds since the run began."""
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(("what", "of", "seconds", "value", "unit"))
    for curve in charts_of(analysis):
        for name, _, points in curve.lines:
            names = csv_cell(curve.title), csv_cell(name)
            for at, value in points:
                write((*names, f"{at:.3f}", f"{value:.6g}", curve.unit))
    for step, (at, loss) in losses(analysis).items():
        write(("loss", f"step {step}", f"{at:.3f}", f"{loss:.6g}", ""))
    for epoch in analysis.curve:
        scores = (
            *(("top-1", epoch.top1), ("top-1, training", epoch.train_top1)),
            ("loss, training", epoch.train_loss),
        )
        for what, score in (*scores, ("loss, validation", epoch.loss)):
            if score is not None:
                write((what, f"epoch {epoch.epoch}", f"{epoch.seconds:.3f}", f"{score:.6g}", ""))
    return file.getvalue()


def losses(analysis: Analysis) -> dict[int, tuple[float, float]]:
    """By step the seconds of a log point and its loss, mean over the ranks."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for rank in longest_attempt(analysis.run.ranks):
        rows = zip(rank.steps.step, rank.steps.clock, rank.steps.loss)
        logged = [row for row in rows if not math.isnan(row[2])]
        for step, at, loss in logged[:: -(-len(logged) // MOST_LOSSES) or 1]:
            by_step.setdefault(step, []).append((at, loss))
    return {step: (of[0][0], fmean(loss for _, loss in of)) for step, of in sorted(by_step.items())}
