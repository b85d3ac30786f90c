"""Charts as inline SVG, without scripts. Colours are CSS classes of the page."""

from __future__ import annotations

from html import escape

from report.units import three_digits

WIDTH = 720
LEFT, RIGHT = 56, 12


def stacked_bars(rows: list, total: float, unit: str, description: str) -> str:
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
    marks += axis_x(left, base, 0.0, total, unit)
    return svg(base + 26, description, marks)


def lines(series: list, unit: str, description: str, x_unit: str, top: float | None = None) -> str:
    """A line chart from zero. `series`: (css class, [(x, y)]). `top` fixes the upper edge."""
    points = [point for _, values in series for point in values]
    if not points:
        return ""
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    ceiling = top or nice(max(y for _, y in points))
    height, base = 170, 180

    def place(x: float, y: float) -> str:
        across = (x - low) / (high - low) if high > low else 0.5
        px = LEFT + across * (WIDTH - LEFT - RIGHT)
        return f"{px:.1f},{base - min(y, ceiling) / ceiling * height:.1f}"

    marks = grid(ceiling, base, height, unit)
    for name, values in series:
        path = " ".join(place(x, y) for x, y in values)
        if len(values) > 1:
            marks.append(f'<polyline class="l-{name}" points="{path}"/>')
        if len(values) <= 40:
            for x, y in values:
                px, py = place(x, y).split(",")
                marks.append(f'<circle class="d-{name}" cx="{px}" cy="{py}" r="3.5"/>')
    marks += axis_x(LEFT, base, low, high, x_unit)
    return svg(base + 26, description, marks)


def bars(rows: list, unit: str, description: str, limit: float | None = None) -> str:
    """Horizontal bars with their figure. `rows`: (label, value, css class); `limit`: a line."""
    left, step = 120, 32
    most = nice(max([value for _, value, _ in rows] + ([limit] if limit else []), default=1.0))
    scale = (WIDTH - left - 110) / most
    marks = []
    for index, (label, value, name) in enumerate(rows):
        y = index * step + 4
        width = value * scale
        marks.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(label)}</text>')
        marks.append(
            f'<rect class="c-{name}" x="{left}" y="{y}" width="{width:.1f}" height="20"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 15}">{three_digits(value)} {unit}</text>'
        )
    height = len(rows) * step + 6
    if limit:
        x = left + limit * scale
        marks.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    return svg(height, description, marks)


def grid(ceiling: float, base: int, height: int, unit: str) -> list:
    """Horizontal lines with their figures at the left."""
    marks = []
    for quarter in range(5):
        y = base - height * quarter / 4
        label = three_digits(ceiling * quarter / 4) if quarter else "0"
        if quarter == 4:
            label = f"{label} {unit}" if len(label) + len(unit) < 7 else label
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    return marks


def axis_x(left: int, base: float, low: float, high: float, unit: str) -> list:
    """The foot of a chart: five figures from `low` to `high`, the last with its unit."""
    marks = [f'<line class="axis" x1="{left}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>']
    for quarter in range(5):
        value = low + (high - low) * quarter / 4
        x = left + (WIDTH - left - RIGHT) * quarter / 4
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        label = ("0" if value == 0 else three_digits(value)) + (f" {unit}" if quarter == 4 else "")
        marks.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="{anchor}">{label}</text>')
    return marks


def nice(value: float) -> float:
    """The next 1, 2, 4, 5, 8 or 10 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value:
        power /= 10
    return next(
        power * step for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 20) if power * step >= value
    )


def svg(height: float, description: str, marks: list) -> str:
    """The element, with its text alternative; it scales with the page."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}">'
        f"{''.join(marks)}</svg>"
    )
