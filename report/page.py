"""The report as one offline page: charts are inline SVG, and nothing is loaded from anywhere."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import jinja2

from contract.records import CATEGORIES
from report import charts, differences, formulas, tables
from report.analysis import Analysis, uses_in_attempt
from report.files import number
from report.layout import link, percent, seconds, size, three_digits
from report.overtime import Recorded, first_per_host, recorded
from report.progress import POINTS
from report.rerun import train_line
from report.text import QUEUED, WORDS, setup, unequal_parts
from report.windows import thin

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
        unequal_parts=unequal_parts(analysis.step) if analysis.step else "",
        name=analysis.run.folder.resolve().name,
        setup=" · ".join(setup(analysis)),
        tiles=tiles(analysis),
        words=WORDS,
        time_parts=time_parts(analysis),
        charts=all_charts(analysis),
        tables=tables,
        queued=QUEUED.replace("`", ""),
        recorded=[(one, recorded_chart(one)) for one in recorded(analysis)],
        details=details(analysis),
        command=train_line(analysis.run),
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
    if summary["wall_seconds"]:
        found.append((seconds(summary["wall_seconds"]), "wall time"))
    if analysis.hundred_epochs:
        found.append((seconds(analysis.hundred_epochs), "for 100 epochs like these"))
    return found


def time_parts(analysis: Analysis) -> list[tuple[str, float, float]]:
    """(category, seconds, fraction of wall time), the gap last, for the legend."""
    accounting = analysis.accounting
    if accounting.wall <= 0 or analysis.run.untimed:
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
        "network": network_chart(analysis),
        "curve": curve_chart(analysis),
        "loss": loss_chart(analysis),
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
    if accounting.wall <= 0 or analysis.run.untimed:
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


def network_chart(analysis: Analysis) -> str:
    """MB/s sent per node, with the line rate."""
    uses = first_per_host(uses_in_attempt(analysis.step, analysis.networks))[:MOST_RANKS]
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


def recorded_chart(one: Recorded) -> str:
    drawn = one.drawn()
    means = ((name, sum(y for _, y in points) / len(points)) for name, _, points in drawn)
    told = ", ".join(f"{name} {three_digits(mean)}" for name, mean in means)
    said = f"{one.title}, mean{f' in {one.unit}' if one.unit else ''}: {told}."
    return over_time([(colour, points) for _, colour, points in drawn], one.unit, said, one.top)


def loss_chart(analysis: Analysis) -> str:
    """The mean loss of each epoch in training, and on the validation images after it."""
    epochs = analysis.curve
    train = [(float(e.epoch), e.train_loss) for e in epochs if e.train_loss is not None]
    validation = [(float(e.epoch), e.loss) for e in epochs if e.loss is not None]
    series = [("data", thin(train, POINTS)), ("forward", thin(validation, POINTS))]
    shown = [(colour, points) for colour, points in series if len(points) > 1]
    if not shown:
        return ""
    said = "Loss after each epoch, at the end: " + " and ".join(
        f"{three_digits(points[-1][1])} {'in training' if colour == 'data' else 'on validation'}"
        for colour, points in shown
    )
    return charts.lines(shown, "", said + ".", "epochs")


def details(analysis: Analysis) -> tables.Table:
    """What it takes to do the same again: when, which code, and on what."""
    run = analysis.run
    unix = number(run.plan.get("created_unix")) or number(analysis.start.get("unix"))
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix)) if unix else ""
    code = differences.code_of(run.plan) if run.plan.get("code_sha256") else ""
    rows = {"started": when, "revision": code, **differences.machines(analysis)}
    return tables.Table(
        ("", "value"), tuple((name, value) for name, value in rows.items() if value)
    )


def curve_chart(analysis: Analysis) -> str:
    """Top-1 in percent after each epoch."""
    points = [(float(e.epoch), 100 * e.top1) for e in analysis.curve if e.top1 is not None]
    if len(points) < 2:
        return ""
    said = f"Top-1 after each epoch, from {points[0][1]:.1f} % to {points[-1][1]:.1f} %."
    return charts.lines([("forward", thin(points, POINTS))], "%", said, "epochs", top=100.0)


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


def render(template: str, **values: Any) -> str:
    """The HTML document."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        seconds=seconds, size=size, percent=percent, link=link, digits=three_digits, bound=bound
    )
    return environment.get_template(template).render(**values)


def bound(sentence: str) -> str:
    """The sentence with its figures bound to their units by no-break spaces."""
    units = r"%|ms|s|min|h|d|kB|MB|GB|MB/s|[GM]bit/s|images/s|px|MHz|W|C"
    return re.sub(rf"(?<=\d) (?=(?:{units})(?![\w/]))|(?<=<) (?=\d)", "\u00a0", sentence)
