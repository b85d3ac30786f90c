"""A comparison as one offline page, made of the same parts as report.html."""

from __future__ import annotations

from collections.abc import Callable

from report import charts, compare_text
from report.compare import Comparison, Side
from report.layout import seconds, three_digits
from report.page import over_time, render
from report.progress import POINTS, Epoch
from report.windows import thin

CURVES = 8  # sides that have a colour


def render_page(found: Comparison) -> str:
    return render(
        "compare.html.j2",
        found=found,
        task=compare_text.task_sentence(found),
        results=compare_text.results(found),
        steps=compare_text.steps(found),
        accuracy=compare_text.accuracy(found),
        one_pc=compare_text.ONE_PC if found.one_pc else "",
        parts=[(head, colour) for _, head, colour in compare_text.PARTS],
        curves=curves(found),
        charts={
            "speed": speed_chart(found),
            "step": step_chart(found),
            "epochs": epoch_chart(found),
            "time": time_chart(found),
        },
    )


def curves(found: Comparison) -> list[Side]:
    """The sides whose accuracy is drawn."""
    return [side for side in found.sides if len(side.curve) > 1][:CURVES]


def speed_chart(found: Comparison) -> str:
    sides = [side for side in found.sides if side.images_per_second]
    if not sides:
        return ""
    rows = [(side.label, side.images_per_second or 0.0, "forward") for side in sides]
    said = ", ".join(f"{label} {three_digits(value)}" for label, value, _ in rows)
    return charts.bars(rows, "/s", f"Images per second: {said}.")


def step_chart(found: Comparison) -> str:
    rows = []
    for side in found.sides:
        if side.part("seconds"):
            parts = [(colour, side.part(name) or 0.0) for name, _, colour in compare_text.PARTS]
            rows.append((side.label, [(colour, 1000 * value) for colour, value in parts]))
    if not rows:
        return ""
    most = max(sum(value for _, value in parts) for _, parts in rows)
    told = ((label, sum(value for _, value in parts) / 1000) for label, parts in rows)
    said = ", ".join(f"{label} {seconds(value)}" for label, value in told)
    return charts.stacked_bars(rows, most, "ms", f"The mean step: {said}.")


def epoch_chart(found: Comparison) -> str:
    series = drawn(found, lambda epoch: float(epoch.epoch))
    if not series:
        return ""
    said = f"Top-1 after each epoch. {ends(curves(found))}"
    return charts.lines(series, "%", said, "epochs", top=100.0)


def time_chart(found: Comparison) -> str:
    series = drawn(found, lambda epoch: epoch.seconds)
    if not series:
        return ""
    return over_time(series, "%", f"Top-1 over time. {ends(curves(found))}", top=100.0)


def drawn(found: Comparison, across: Callable[[Epoch], float]) -> list[tuple[str, charts.Points]]:
    """(colour, points) of each side's top-1 in percent."""
    return [
        (f"n{i}", thin([(across(epoch), 100 * (epoch.top1 or 0)) for epoch in side.curve], POINTS))
        for i, side in enumerate(curves(found))
    ]


def ends(sides: list[Side]) -> str:
    told = (f"{side.label} {compare_text.top1(side.curve[-1].top1 or 0.0)}" for side in sides)
    return "At the end: " + ", ".join(told) + "."
