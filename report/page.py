"""The report as one offline page: charts are inline SVG, and nothing is loaded from anywhere."""

from __future__ import annotations

from report import charts, formulas, tables
from report.analysis import Analysis, Use, of_attempt
from report.disk import DiskUse
from report.heading import setup
from report.progress import POINTS
from report.records import CATEGORIES
from report.templates import render
from report.text import WORDS
from report.units import percent, seconds, three_digits

MOST_RANKS = 16  # rows of a chart
STEP_PARTS = ("data", "h2d", "forward", "backward", "sync_exposed", "optimizer", "other")


def render_page(analysis: Analysis) -> str:
    """The HTML document, some 100 KB at most, however long the run was."""
    return render(
        "report.html.j2",
        analysis=analysis,
        summary=analysis.summary,
        start=analysis.start,
        step=analysis.step,
        name=analysis.run.folder.resolve().name,
        setup=" · ".join(setup(analysis)),
        tiles=tiles(analysis),
        words=WORDS,
        time_parts=time_parts(analysis),
        charts=all_charts(analysis),
        tables=tables,
        disk_hosts=[use.host for use in charted_disks(analysis)],
    )


def tiles(analysis: Analysis) -> list[tuple[str, str]]:
    """(figure, what it is) pairs beside the verdict."""
    summary, step = analysis.summary, analysis.step
    found = []
    if summary["images_per_second"]:
        found.append((three_digits(summary["images_per_second"]), "images per second"))
    if step:
        waited = (step.network + step.peers) / step.seconds
        found.append((seconds(step.seconds), "one step"))
        if step.world > 1:
            found.append((percent(waited), "of a step waits for others"))
        found.append((percent(step.data / step.seconds), "of a step waits for images"))
    if summary["final_top1"] is not None:
        found.append((f"{summary['final_top1']:.1%}".replace("%", " %"), "top-1 at the end"))
    found.append((seconds(summary["wall_seconds"]), "wall time"))
    if analysis.hundred_epochs:
        found.append((seconds(analysis.hundred_epochs), "for 100 epochs like these"))
    return found


def time_parts(analysis: Analysis) -> list[tuple[str, float, float]]:
    """(category, seconds, fraction of wall time), the gap last, for the legend."""
    accounting = analysis.accounting
    if accounting.wall <= 0:
        return []
    parts = [(name, accounting.seconds[name]) for name in CATEGORIES]
    parts = [part for part in parts if part[1] > 0]
    if abs(accounting.gap) >= 0.005 * accounting.wall:
        parts.append(("gap", accounting.gap))
    return [(name, value, value / accounting.wall) for name, value in parts]


def all_charts(analysis: Analysis) -> dict[str, str]:
    """Name -> SVG, "" where there is nothing to draw."""
    return {
        "time": time_chart(analysis),
        "ranks": rank_chart(analysis),
        "speed": speed_chart(analysis),
        "waits": waits_chart(analysis),
        "disks": disk_chart(analysis),
        "network": network_chart(analysis),
        "curve": curve_chart(analysis),
        "advice": advice_chart(analysis),
    }


def time_unit(longest: float) -> tuple[str, int]:
    """The unit of a time axis, and its length in seconds."""
    return ("s", 1) if longest < 300 else ("min", 60) if longest < 10800 else ("h", 3600)


def over_time(
    series: list[tuple[str, charts.Points]], unit: str, said: str, top: float | None = None
) -> str:
    """A line chart over time, in seconds."""
    x_unit, length = time_unit(max(x for _, points in series for x, _ in points))
    scaled = [(name, [(x / length, y) for x, y in points]) for name, points in series]
    return charts.lines(scaled, unit, said, x_unit, top)


def time_chart(analysis: Analysis) -> str:
    """All categories and the gap: the mean over ranks, then each rank of the last attempt."""
    accounting = analysis.accounting
    if accounting.wall <= 0:
        return ""
    rows = [("all", [*accounting.seconds.items(), ("gap", accounting.gap)])]
    newest = max((time.attempt for time in accounting.ranks), default=None)
    last = [time for time in accounting.ranks if time.attempt == newest]
    if len(last) > 1:
        rows += [
            (f"rank {time.rank}", [*time.seconds.items(), ("gap", time.gap)])
            for time in last[:MOST_RANKS]
        ]
    said = ", ".join(f"{WORDS[name]} {percent(part)}" for name, _, part in time_parts(analysis))
    right = max(accounting.wall, *(sum(max(0.0, v) for _, v in parts) for _, parts in rows))
    unit, length = time_unit(right)
    rows = [(label, [(name, value / length) for name, value in parts]) for label, parts in rows]
    return charts.stacked_bars(rows, right / length, unit, f"Where the wall time went: {said}.")


def rank_chart(analysis: Analysis) -> str:
    """The mean step of each rank, by category."""
    step = analysis.step
    if step is None:
        return ""
    ranks = sorted(step.ranks, key=lambda rank: -rank.own)[:MOST_RANKS]
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    rows = [
        (
            f"{rank.rank} {rank.host[:12]}",
            [(name, rank.seconds.get(name, 0.0) * 1000) for name in STEP_PARTS],
        )
        for rank in ranks
    ]
    said = ", ".join(f"rank {rank.rank} {seconds(rank.own)}" for rank in ranks)
    most = max(sum(value for _, value in parts) for _, parts in rows)
    return charts.stacked_bars(
        rows, most, "ms", f"One step of each rank. Own work, waiting for others excluded: {said}."
    )


def speed_chart(analysis: Analysis) -> str:
    """Images per second over the run."""
    points = [(point.seconds, point.images_per_second) for point in analysis.line]
    if len(points) < 2:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    said = f"Images per second over the run, between {three_digits(low)} and {three_digits(high)}."
    return over_time([("forward", points)], "", said)


def waits_chart(analysis: Analysis) -> str:
    """The fraction of the steps spent waiting, over the run."""
    if len(analysis.line) < 2:
        return ""
    data = [(point.seconds, 100 * point.data_share) for point in analysis.line]
    sync = [(point.seconds, 100 * point.sync_share) for point in analysis.line]
    said = (
        f"Share of the steps that waits: for images {sum(y for _, y in data) / len(data):.0f} % "
        f"and for gradients {sum(y for _, y in sync) / len(sync):.0f} % on average."
    )
    return over_time([("data", data), ("sync_exposed", sync)], "%", said, top=100.0)


def thin(points: charts.Points) -> charts.Points:
    """At most POINTS of them, evenly spaced."""
    stride = -(-len(points) // POINTS)
    return points[::stride] if stride > 1 else points


def first_per_host(uses: list[Use]) -> list[Use]:
    """One use per host (disks come sorted: the data disk first)."""
    found: dict[str, Use] = {}
    for use in uses:
        found.setdefault(use.host, use)
    return list(found.values())


def charted_disks(analysis: Analysis) -> list[DiskUse]:
    """The disks that have a line of their own: one per node, as many as there are colours."""
    return first_per_host(of_attempt(analysis.step, analysis.disks))[:8]


def disk_chart(analysis: Analysis) -> str:
    """MB/s read over the run, one line per node."""
    uses = charted_disks(analysis)
    if not any(len(use.series) > 1 for use in uses):
        return ""
    series = [
        (f"n{index}", thin([(time, read) for time, read, _ in use.series]))
        for index, use in enumerate(uses)
    ]
    said = "Read from disk in MB/s, mean: " + ", ".join(
        f"{use.host} {use.device} {three_digits(use.read)}" for use in uses
    )
    return over_time(series, "MB/s", said + ".")


def network_chart(analysis: Analysis) -> str:
    """MB/s sent per node, with the line rate."""
    uses = first_per_host(of_attempt(analysis.step, analysis.networks))[:MOST_RANKS]
    if not uses:
        return ""
    speeds = [use.speed_mbit for use in uses if use.speed_mbit and use.shared_by == 1]
    limit = formulas.line_rate(min(speeds)) / 1e6 if speeds else None
    if limit and limit > 50 * max(use.sent for use in uses) / 1e6:
        limit = None
    rows = [(use.host[:14], use.sent / 1e6, "sync_exposed") for use in uses]
    said = "Sent in MB/s, mean: " + ", ".join(
        f"{u.host} {three_digits(u.sent / 1e6)}" for u in uses
    )
    said += f"; the link carries {three_digits(limit)}." if limit else "."
    return charts.bars(rows, "MB/s", said, limit)


def curve_chart(analysis: Analysis) -> str:
    """Top-1 in percent after each epoch."""
    points = [(float(e.epoch), 100 * e.top1) for e in analysis.curve if e.top1 is not None]
    if len(points) < 2:
        return ""
    said = f"Top-1 after each epoch, from {points[0][1]:.1f} % to {points[-1][1]:.1f} %."
    return charts.lines([("forward", thin(points))], "%", said, "epochs", top=100.0)


def advice_chart(analysis: Analysis) -> str:
    """Images per second now, and what each change is predicted to give."""
    advice = analysis.summary["advice"]
    if not advice or analysis.step is None:
        return ""
    places = len(analysis.advice.remedies)
    rows = [("now", analysis.advice.now, "other")]
    rows += [
        (f"{i}." if i <= places else "together", item["predicted_images_per_second"], "forward")
        for i, item in enumerate(advice, 1)
    ]
    said = "Images per second: " + ", ".join(f"{name} {three_digits(v)}" for name, v, _ in rows)
    return charts.bars(rows, "/s", said + ".")
