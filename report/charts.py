"""Charts as inline SVG, without scripts. Colours are CSS classes of the page."""

from __future__ import annotations

import math
from html import escape

from report.layout import three_digits

Parts = list[tuple[str, float]]  # (category, value)
Points = list[tuple[float, float]]  # (x, y)

WIDTH = 720
LEFT, RIGHT = 76, 12


def stacked_bars(rows: list[tuple[str, Parts]], total: float, unit: str, description: str) -> str:
    """Horizontal bars, each made of parts from left to right.

    `rows`: (label, [(category, value)]), category being the CSS class too; `total`: right edge.
    """
    height, step, left = 22, 34, 120
    scale = (WIDTH - left - RIGHT) / total if total > 0 else 0.0
    marks = []
    for index, (label, parts) in enumerate(rows):
        y, x = index * step + 4, float(left)
        marks.append(f'<text x="{left - 8}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        for category, value in parts:
            width = max(0.0, value * scale)
            if width < 0.05:
                continue
            title = f"{category}: {three_digits(value)} {unit}"
            marks.append(
                f'<rect class="c-{category}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
                f'height="{height}"><title>{escape(title)}</title></rect>'
            )
            x += width
    base = len(rows) * step + 4
    marks += axis_x(left, base, total or 1.0, unit)
    return svg(base + 26, description, marks)


def lines(
    series: list[tuple[str, Points]],
    unit: str,
    description: str,
    x_unit: str,
    top: float | None = None,
) -> str:
    """A line chart from zero. `series`: (css class, [(x, y)]). `top` fixes the upper edge."""
    points = [point for _, values in series for point in values]
    if not points:
        return ""
    end = max(x for x, _ in points) or 1.0
    ceiling = top or nice(max(y for _, y in points))
    height, base = 170, 184

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / end * (WIDTH - LEFT - RIGHT)
        return across, base - min(y, ceiling) / ceiling * height

    marks = grid(ceiling, base, height, unit)
    for name, values in series:
        places = [place(x, y) for x, y in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        marks.append(f'<polyline class="l-{name}" points="{path}"/>')
        if len(places) <= 40:
            marks += [
                f'<circle class="d-{name}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in places
            ]
    marks += axis_x(LEFT, base, end, x_unit)
    return svg(base + 26, description, marks)


def bars(
    rows: list[tuple[str, float, str]], unit: str, description: str, limit: float | None = None
) -> str:
    """Horizontal bars with their figures. `rows`: (label, value, css class); `limit`: where to draw
    a line."""
    left, right, step = 120, WIDTH - 120, 32
    most = max([value for _, value, _ in rows] + ([limit] if limit else [])) or 1.0
    scale = (right - left) / most
    marks = []
    for index, (label, value, name) in enumerate(rows):
        y = index * step + 4
        marks.append(
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>'
            f'<rect class="c-{name}" x="{left}" y="{y}" width="{value * scale:.1f}" height="20"/>'
            f'<text x="{WIDTH - RIGHT}" y="{y + 15}" text-anchor="end">'
            f"{three_digits(value)} {unit}</text>"
        )
    height = len(rows) * step + 4
    if limit:
        x = left + limit * scale
        marks.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    return svg(height, description, marks)


def grid(ceiling: float, base: int, height: int, unit: str) -> list[str]:
    """Horizontal lines with their figures on the left."""
    marks = []
    for value in ticks(ceiling):
        y = base - height * value / ceiling
        label = f"{value:,g}" + (f" {unit}" if value == ceiling and len(unit) == 1 else "")
        marks.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    return marks


def axis_x(left: int, base: float, end: float, unit: str) -> list[str]:
    """The x axis from zero to `end`, with its unit on the right; epochs are whole numbers."""
    marks = [f'<line class="axis" x1="{left}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>']
    for value in ticks(end, 1.0 if unit == "epochs" else 0.0):
        x = left + (WIDTH - left - RIGHT) * value / end
        if x < WIDTH - RIGHT - 140:  # the unit stands there, in letters of up to 22 px
            marks.append(
                f'<text x="{x:.1f}" y="{base + 19}" text-anchor="middle">{value:,g}</text>'
            )
    marks.append(
        f'<text x="{WIDTH - RIGHT}" y="{base + 19}" text-anchor="end">{end:.4g} {unit}</text>'
    )
    return marks


def ticks(end: float, least: float = 0.0) -> list[float]:
    """Round figures from 0 to `end`, four to eight of them but never closer than `least`."""
    power = 10.0 ** math.floor(math.log10(end / 4))
    step = max(least, *(power * factor for factor in (1, 2, 5) if power * factor <= end / 4))
    return [round(step * index, 12) for index in range(int(end / step + 1e-9) + 1)]


def nice(value: float) -> float:
    """The next round figure at or above `value`; 1 when that is not positive."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        power * step for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if power * step >= value
    )


def svg(height: float, description: str, marks: list[str]) -> str:
    """The element, with its text alternative; it scales with the page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
        f"{''.join(marks)}</svg>"
    )
