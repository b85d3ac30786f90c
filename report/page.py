"""Draw a View as one HTML page that loads nothing from the network.

The template is templates/page.html.j2. This module draws bars and curves as inline SVG; their
colours are CSS classes of the page. `make report`, `make compare` and evaluations call it.
"""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from contract.records import CATEGORIES, DERIVED
from contract.text import drop_controls, three_digits
from report.view import Bars, Curve, View, time_unit
from report.windows import Points, thin


def render_page(view: View) -> str:
    """Return the HTML document: some 100 KB at most, however long the run was."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        prose=prose, kind=lambda item: type(item).__name__, bars=bars, curve=curve
    )
    template = environment.get_template("page.html.j2")
    page = template.render(view=view, categories={**CATEGORIES, **DERIVED})
    # Names in a view may come from strangers, and control characters turn the direction of text.
    return drop_controls(page)


def prose(sentence: str) -> Markup:
    """Bind figures to their units by no-break spaces, and mark text in backticks as code."""
    # The first pattern matches the space in `12 ms` and `940 Mbit/s`, the second in `< 1 %`.
    units = r"%|ms|s|min|h|d|kB|MB|GB|MB/s|[GM]bit/s|[a-z]+s/s|px|MHz|W|C"
    sentence = re.sub(rf"(?<=\d) (?=(?:{units})(?![\w/]))|(?<=<) (?=\d)", "\u00a0", sentence)
    # The pieces with odd indices stood between two backticks. An odd number of backticks, as in an
    # error message of another program, marks no code.
    pieces = sentence.split("`")
    if len(pieces) % 2 == 0:
        return escape(sentence)
    code = Markup("<code>{}</code>")
    marked = (code.format(text) if index % 2 else escape(text) for index, text in enumerate(pieces))
    return Markup().join(marked)


# Lengths of a chart in px: its width, and the margins of its curves.
WIDTH = 720
LEFT, RIGHT = 76, 12
LETTER = 12  # px; the width of a letter of up to 22 px
MOST_LINES = 8  # as many as there are colours
DRAWN = 120  # points of a line; a chart of this width cannot show more
GAP = 4.0  # a line is broken at so many times the usual distance of its points
ASTRAY = 50.0  # a value beyond so many times the ninth decile does not set the scale


def bars(item: Bars) -> str:
    """Draw horizontal bars, each with its segments from left to right."""
    axis_left, has_one_figure = 120, not item.keys
    # The figure is written behind its bar. Bars with keys have an axis instead.
    right, row_height = WIDTH - (120 if has_one_figure else RIGHT), 32
    sums = [sum(max(0.0, value) for _, value in bar.segments) + bar.spread for bar in item.rows]
    longest = max([*sums, item.limit or 0.0]) or 1.0
    scale = (right - axis_left) / longest
    marks = []
    for index, bar in enumerate(item.rows):
        y, x = index * row_height + 4, float(axis_left)
        label = text(axis_left - 8, y + 15, "end", bar.label)
        marks.append(f'<a href="{escape(bar.link)}">{label}</a>' if bar.link else label)
        for colour, value in bar.segments:
            width = max(0.0, value * scale)
            if width >= 0.05:
                title = f"{colour.replace('_', ' ')}: {three_digits(value)} {item.unit}"
                marks.append(
                    f'<rect class="c-{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                    f'height="20"><title>{escape(title)}</title></rect>'
                )
            x += width
        if bar.spread:
            ends = x - bar.spread * scale, x + bar.spread * scale
            marks.append(rule("spread", ends[0], ends[1], y + 10, y + 10))
        if has_one_figure:
            marks.append(text(WIDTH - RIGHT, y + 15, "end", f"{bar.figure} {item.unit}"))
    base = len(item.rows) * row_height + 4
    if item.limit:
        x = axis_left + item.limit * scale
        marks.append(rule("limit", x, x, 0, base))
    marks += [] if has_one_figure else axis_x(axis_left, base, longest, item.unit)
    figures = ", ".join(f"{bar.label} {bar.figure}".strip() for bar in item.rows)
    keys = ", ".join(f"{key.name} {key.figure}".strip() for key in item.keys if key.figure)
    return svg(base + (0 if has_one_figure else 26), f"{item.caption}: {keys or figures}.", marks)


def curve(item: Curve) -> str:
    """Draw a line chart from zero, or from the lowest value if that is negative. A line is broken
    if nothing was recorded for long."""
    lines = [line._replace(points=thin(line.points, DRAWN)) for line in item.lines[:MOST_LINES]]
    points = [point for line in lines for point in line.points]
    longest = max((x for x, _ in points), default=0.0) or 1.0
    x_unit, unit_length = time_unit(longest) if item.x_unit == "s" else (item.x_unit, 1)
    end, values = longest / unit_length, sorted(y for _, y in points)
    # On the scale of one loss that diverged, all other losses would look like a flat line.
    floor = -nice(-values[0]) if values[0] < 0 else 0.0
    top = highest(values) if item.steady and not floor else values[-1]
    ceiling = item.top or (nice(top) if top > 0 or not floor else 0.0)
    height, base = 170, 184
    marks = grid(floor, ceiling, base, height, item.unit)
    for _, colour, series in lines:
        for unbroken in split_at_gaps(series):
            positions = [
                (
                    LEFT + x / unit_length / end * (WIDTH - LEFT - RIGHT),
                    base - (min(y, ceiling) - floor) / (ceiling - floor) * height,
                )
                for x, y in unbroken
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
            marks.append(f'<polyline class="l-{colour}" points="{path}"/>')
            if len(series) <= 40 or len(positions) == 1:
                marks += [
                    f'<circle class="d-{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
                    for x, y in positions
                ]
    for mark in item.marks:
        x = LEFT + min(1.0, mark.x / unit_length / end) * (WIDTH - LEFT - RIGHT)
        # The words are on the side of the mark that has more room.
        anchor, words_x = ("end", x - 5) if x > WIDTH / 2 else ("start", x + 5)
        marks += [rule("mark", x, x, base - height, base), text(words_x, 30, anchor, mark.words)]
    # A value above the chart is written into the chart.
    if values[-1] > ceiling:
        marks.append(
            text(WIDTH - RIGHT, 36, "end", f"the highest of all: {three_digits(values[-1])}")
        )
    marks += axis_x(LEFT, base, end, x_unit)
    means = ((line.name, sum(y for _, y in line.points) / len(line.points)) for line in lines)
    averages = ", ".join(f"{name} {three_digits(mean)}" for name, mean in means)
    unit = f" in {item.unit}" if item.unit else ""
    return svg(base + 26, f"{item.title}, mean{unit}: {averages}.", marks)


def highest(values: list[float]) -> float:
    """Return the largest value that is not ASTRAY; `values` are sorted."""
    usual = values[9 * (len(values) - 1) // 10]
    return max((value for value in values if value <= ASTRAY * usual), default=values[-1])


def split_at_gaps(points: Points) -> list[Points]:
    """Cut a line into pieces without gaps."""
    distances = [end - start for (start, _), (end, _) in zip(points, points[1:])]
    usual, pieces = statistics.median(distances) if distances else 0.0, [points[:1]]
    for point, distance in zip(points[1:], distances):
        if distance > GAP * usual:
            pieces.append([])
        pieces[-1].append(point)
    return pieces


def grid(floor: float, ceiling: float, base: int, height: int, unit: str) -> list[str]:
    """Draw horizontal lines with their figures on the left."""
    marks = []
    values = ticks(max(ceiling, -floor))
    for value in sorted({*values, *(-value for value in values)}):
        if not floor <= value <= ceiling:
            continue
        y = base - height * (value - floor) / (ceiling - floor)
        label = f"{value:,g}" + (f" {unit}" if value == ceiling and len(unit) == 1 else "")
        marks.append(rule("grid", LEFT, WIDTH - RIGHT, y, y))
        marks.append(text(LEFT - 6, y + 4, "end", label))
    return marks


def axis_x(axis_left: int, base: float, end: float, unit: str) -> list[str]:
    """Draw the x axis from zero to `end`, with round figures. Epochs are whole numbers."""
    marks = [rule("axis", axis_left, WIDTH - RIGHT, base, base)]
    values = ticks(end, integers=unit == "epochs")
    # A figure is left out if it would overlap the figure on its right. The loop begins on the
    # right, because the last figure, which has the unit, must be there.
    free = float(WIDTH)
    for value in reversed(values):
        x = axis_left + (WIDTH - axis_left - RIGHT) * value / end
        label = f"{value:,g}" + (f" {unit}" if value == values[-1] else "")
        width = LETTER * len(label)
        x = min(x, WIDTH - width / 2)
        if x + width / 2 <= free:
            marks.append(text(x, base + 19, "middle", label))
            free = x - width / 2
    return marks


def ticks(end: float, integers: bool = False) -> list[float]:
    """Return five or more round figures from 0 to `end`, or fewer if they must be `integers`."""
    # Their distance is the largest of 1, 2 and 5 times a power of ten that fits into `end` 4 times.
    power = 10.0 ** math.floor(math.log10(end / 4))
    step = max(float(integers), *(power * f for f in (1, 2, 5) if power * f <= end / 4))
    return [round(step * index, 12) for index in range(int(end / step + 1e-9) + 1)]


def nice(value: float) -> float:
    """Return the next round figure at or above `value`; 1 if that is not positive."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        power * step for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if power * step >= value
    )


def text(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def rule(name: str, x1: float, x2: float, y1: float, y2: float) -> str:
    """Return a straight line; `name` is its CSS class."""
    return f'<line class="{name}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def svg(height: float, description: str, marks: list[str]) -> str:
    """Return an SVG element with its text alternative; it scales with the page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
        f"{''.join(marks)}</svg>"
    )
