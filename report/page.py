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


# Lengths in px. A chart's width, and the margins of its curves.
WIDTH = 720
LEFT, RIGHT = 76, 12
# Of a chart of bars: the room for labels on the left and for figures on the right, the distance of
# two bars, and a bar's height.
LABEL_WIDTH, ROW_HEIGHT, BAR_HEIGHT = 120, 32, 20
# The height of the plot of a curve, its base line from the top, and the room for an axis below it.
PLOT_HEIGHT, BASE_Y, AXIS_HEIGHT = 170, 184, 26
LETTER = 12  # the width of a letter in a font of up to 22 px
MOST_LINES = 8  # as many as there are colours
DRAWN = 120  # points of a line; a chart of this width cannot show more
GAP = 4.0  # a line is broken between points at so many times their usual distance
ASTRAY = 50.0  # a value beyond so many times the ninth decile does not set the scale


def bars(item: Bars) -> str:
    """Draw horizontal bars, each with its segments from left to right."""
    has_one_figure = not item.keys
    # The figure is written behind its bar. Bars with keys have an axis instead.
    right = WIDTH - (LABEL_WIDTH if has_one_figure else RIGHT)
    sums = [sum(max(0.0, value) for _, value in bar.segments) + bar.spread for bar in item.rows]
    longest = max([*sums, item.limit or 0.0]) or 1.0
    scale = (right - LABEL_WIDTH) / longest
    elements = []
    for index, bar in enumerate(item.rows):
        y, x = index * ROW_HEIGHT + 4, float(LABEL_WIDTH)
        label = text(LABEL_WIDTH - 8, y + 15, "end", bar.label)
        elements.append(f'<a href="{escape(bar.link)}">{label}</a>' if bar.link else label)
        for colour, value in bar.segments:
            width = max(0.0, value * scale)
            if width >= 0.05:
                title = f"{colour.replace('_', ' ')}: {three_digits(value)} {item.unit}"
                elements.append(
                    f'<rect class="c-{colour}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                    f'height="{BAR_HEIGHT}"><title>{escape(title)}</title></rect>'
                )
            x += width
        if bar.spread:
            half, middle = bar.spread * scale, y + BAR_HEIGHT / 2
            elements.append(rule("spread", x - half, x + half, middle, middle))
        if has_one_figure:
            elements.append(text(WIDTH - RIGHT, y + 15, "end", f"{bar.figure} {item.unit}"))
    base = len(item.rows) * ROW_HEIGHT + 4
    if item.limit:
        x = LABEL_WIDTH + item.limit * scale
        elements.append(rule("limit", x, x, 0, base))
    elements += [] if has_one_figure else axis_x(LABEL_WIDTH, base, longest, item.unit)
    figures = ", ".join(f"{bar.label} {bar.figure}".strip() for bar in item.rows)
    keys = ", ".join(f"{key.name} {key.figure}".strip() for key in item.keys if key.figure)
    return svg(
        base + (0 if has_one_figure else AXIS_HEIGHT),
        f"{item.caption}: {keys or figures}.",
        elements,
    )


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
    elements = grid(floor, ceiling, item.unit)
    for _, colour, series in lines:
        for unbroken in split_at_gaps(series):
            positions = [
                (
                    LEFT + x / unit_length / end * (WIDTH - LEFT - RIGHT),
                    BASE_Y - (min(y, ceiling) - floor) / (ceiling - floor) * PLOT_HEIGHT,
                )
                for x, y in unbroken
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
            elements.append(f'<polyline class="l-{colour}" points="{path}"/>')
            if len(series) <= 40 or len(positions) == 1:
                elements += [
                    f'<circle class="d-{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
                    for x, y in positions
                ]
    for mark in item.marks:
        x = LEFT + min(1.0, mark.x / unit_length / end) * (WIDTH - LEFT - RIGHT)
        # The words are on the side of the mark that has more room.
        anchor, words_x = ("end", x - 5) if x > WIDTH / 2 else ("start", x + 5)
        elements += [
            rule("mark", x, x, BASE_Y - PLOT_HEIGHT, BASE_Y),
            text(words_x, 30, anchor, mark.words),
        ]
    # A value above the chart is written into the chart.
    if values[-1] > ceiling:
        elements.append(
            text(WIDTH - RIGHT, 36, "end", f"the highest of all: {three_digits(values[-1])}")
        )
    elements += axis_x(LEFT, BASE_Y, end, x_unit)
    means = ((line.name, sum(y for _, y in line.points) / len(line.points)) for line in lines)
    averages = ", ".join(f"{name} {three_digits(mean)}" for name, mean in means)
    unit = f" in {item.unit}" if item.unit else ""
    return svg(BASE_Y + AXIS_HEIGHT, f"{item.title}, mean{unit}: {averages}.", elements)


def highest(values: list[float]) -> float:
    """Return the largest value that is not ASTRAY; `values` are sorted, the smallest first."""
    usual = values[9 * (len(values) - 1) // 10]  # the ninth decile
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


def grid(floor: float, ceiling: float, unit: str) -> list[str]:
    """Draw horizontal lines with their figures on the left."""
    elements = []
    values = ticks(max(ceiling, -floor))
    for value in sorted({*values, *(-value for value in values)}):
        if not floor <= value <= ceiling:
            continue
        y = BASE_Y - PLOT_HEIGHT * (value - floor) / (ceiling - floor)
        label = f"{value:,g}" + (f" {unit}" if value == ceiling and len(unit) == 1 else "")
        elements.append(rule("grid", LEFT, WIDTH - RIGHT, y, y))
        elements.append(text(LEFT - 6, y + 4, "end", label))
    return elements


def axis_x(axis_left: int, base: float, end: float, unit: str) -> list[str]:
    """Draw the x axis from zero to `end`, with round figures. Epochs are whole numbers."""
    elements = [rule("axis", axis_left, WIDTH - RIGHT, base, base)]
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
            elements.append(text(x, base + 19, "middle", label))
            free = x - width / 2
    return elements


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


def svg(height: float, description: str, elements: list[str]) -> str:
    """Return an SVG element with its text alternative; it scales with the page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
        f"{''.join(elements)}</svg>"
    )
