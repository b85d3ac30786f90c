"""What was recorded over the time of a run, as one list: the page draws it, series.csv has it."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from report.analysis import Analysis, Use, uses_in_attempt
from report.devices import GpuUse
from report.windows import Points, thin

LINES = 8  # as many as there are colours
DRAWN = 120  # points of a line


@dataclass(frozen=True)
class Recorded:
    """One chart: `lines` by name (a machine, a GPU, or what is drawn where there is one line for
    all). `top`: its upper edge, where that is fixed. `colours`: of lines that are no machines."""

    title: str
    unit: str
    lines: dict[str, Points]
    top: float | None = None
    colours: tuple[str, ...] = ()
    note: str = ""

    def drawn(self) -> list[tuple[str, str, Points]]:
        """(name, colour, points) of the first LINES lines."""
        shown = list(self.lines.items())[:LINES]
        colours = self.colours or tuple(f"n{index}" for index in range(len(shown)))
        return [(n, c, thin(points, DRAWN)) for (n, points), c in zip(shown, colours)]


def recorded(analysis: Analysis) -> list[Recorded]:
    """The charts of which there is something: a line needs two points."""
    found = [
        *step_charts(analysis),
        *machine_charts(analysis),
        *gpu_charts(analysis.gpus, analysis),
    ]
    kept = []
    for one in found:
        lines = {name: points for name, points in one.lines.items() if len(points) > 1}
        if lines:
            kept.append(Recorded(one.title, one.unit, lines, one.top, one.colours, one.note))
    return kept


def step_charts(analysis: Analysis) -> list[Recorded]:
    line, spans = analysis.line, analysis.spans
    speed = [(point.seconds, point.images_per_second) for point in line]
    images = [(point.seconds, 100 * point.data_share) for point in line]
    gradients = [(point.seconds, 100 * point.sync_share) for point in line]
    half = [(span.seconds, 1000 * span.half) for span in spans]
    most = [(span.seconds, 1000 * span.most) for span in spans]
    return [
        Recorded("Images per second", "", {"all": speed}, colours=("forward",)),
        Recorded(
            "One step",
            "ms",
            {"half are shorter (p50)": half, "95 of 100 are shorter (p95)": most},
            colours=("forward", "sync_exposed"),
        ),
        Recorded(
            "Share of the steps that waits",
            "%",
            {"for images": images, "for gradients": gradients},
            100.0,
            ("data", "sync_exposed"),
        ),
    ]


def first_per_host(uses: list[Use]) -> list[Use]:
    """One use per host (disks come sorted: the data disk first)."""
    found: dict[str, Use] = {}
    for use in uses:
        found.setdefault(use.host, use)
    return list(found.values())


def machine_charts(analysis: Analysis) -> list[Recorded]:
    cards = first_per_host(uses_in_attempt(analysis.step, analysis.networks))
    disks = first_per_host(uses_in_attempt(analysis.step, analysis.disks))
    sent = {use.host: [(at, rate / 1e6) for at, rate in use.series] for use in cards}
    read = {use.host: [(at, rate) for at, rate, _ in use.series] for use in disks}
    busy = {use.host: [(at, util) for at, _, util in use.series] for use in disks}
    machines = uses_in_attempt(analysis.step, analysis.machines)

    def lines(name: str, only_if_any: bool = False) -> dict[str, Points]:
        found = {use.host: list(use.series.get(name, ())) for use in machines}
        some = any(value > 0 for points in found.values() for _, value in points)
        return found if some or not only_if_any else {}

    return [
        Recorded("Network card, sent", "MB/s", sent),
        Recorded("Disk, read", "MB/s", read),
        Recorded("Disk, busy", "%", busy, 100.0),
        Recorded("Processors, busy", "%", lines("cpu"), 100.0),
        Recorded("Waits for a processor", "%", lines("queued"), 100.0, note=QUEUED),
        Recorded("Memory, used", "%", lines("memory"), 100.0),
        Recorded("Swap, in and out", "MB/s", lines("swap", only_if_any=True)),
        Recorded("Memory, pressure", "%", lines("pressure", only_if_any=True), 100.0),
    ]


QUEUED = "Of the time in which this run's threads wanted one."
RESIDENT = "A GPU that waits for gradients reads 100 %, too: no evidence."


def gpu_charts(gpus: list[GpuUse], analysis: Analysis) -> list[Recorded]:
    attempt = analysis.step.attempt if analysis.step else None
    cards = [use for use in gpus if use.attempt == attempt]
    several = len({use.host for use in cards}) < len(cards)

    def lines(name: str) -> dict[str, Points]:
        named = ((f"{use.host} {use.index}" if several else use.host, use) for use in cards)
        return {label: list(use.series.get(name, ())) for label, use in named}

    return [
        Recorded("GPU, resident", "%", lines("utilization"), 100.0, note=RESIDENT),
        Recorded("GPU, clock", "MHz", lines("clock_sm")),
        Recorded("GPU, power", "W", lines("power")),
        Recorded("GPU, temperature", "C", lines("temperature")),
    ]


def as_csv(analysis: Analysis) -> str:
    """Every point of every line: what, of whom, seconds since the loop began, value, unit; and what
    was evaluated, by seconds since the run began."""
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(("what", "of", "seconds", "value", "unit"))
    for one in recorded(analysis):
        for name, points in one.lines.items():
            for seconds, value in points:
                write((one.title, name, f"{seconds:.3f}", f"{value:.6g}", one.unit))
    for epoch in analysis.curve:
        scores = (("top-1", epoch.top1), ("loss, training", epoch.train_loss))
        for what, score in (*scores, ("loss, validation", epoch.loss)):
            if score is not None:
                write((what, f"epoch {epoch.epoch}", f"{epoch.seconds:.3f}", f"{score:.6g}", ""))
    return file.getvalue()
