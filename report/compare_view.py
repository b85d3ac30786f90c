"""A comparison as a View."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from contract.text import seconds, three_digits
from report.compare import Comparison, Side, epoch_reaching
from report.differences import Difference
from report.progress import Epoch
from report.run_view import PARTS
from report.view import (
    UNKNOWN,
    Bar,
    Bars,
    Charts,
    Column,
    Command,
    Curve,
    Fact,
    Facts,
    Item,
    Key,
    Line,
    Paragraph,
    Section,
    Table,
    View,
    or_unknown,
    table,
)

EPOCHS = 4  # columns of accuracy
CURVES = 8  # sides that have a colour
ONE_PC = "The machines of a demo are processes of one PC: nothing here holds for a network."
OTHER_TASK = (
    "These runs did not do the same, so neither the speed nor the accuracy of one says how good "
    "the settings of another are. "
)


def view_of(comparison: Comparison) -> View:
    sides = comparison.sides
    makers = (
        task_section,
        sides_section,
        best_section,
        lambda of: difference_section("Settings that differ", of.settings),
        lambda of: difference_section("Machines that differ", of.machines),
        result_section,
        step_section,
        accuracy_section,
    )
    headlines = [Fact(side.label, side.runs[0].headline) for side in sides if side.runs]
    sections = [section for make in makers if (section := make(comparison)).items]
    sections.append(Section("Verdicts", [Facts("What each report says", headlines)]))
    return View(
        brand="Tandem compares",
        title=comparison.title,
        setup=[],
        facts=[],
        sections=sections,
        bad=bool(comparison.other_task),
    )


def sides_section(comparison: Comparison) -> Section:
    rows = [Fact(side.label, side.name, side.link) for side in comparison.sides]
    return Section("Runs", [Facts("What is compared", rows)])


def best_section(comparison: Comparison) -> Section:
    items: list[Item] = []
    if comparison.conclusion:
        items.append(Paragraph(comparison.conclusion, "headline"))
    if comparison.command:
        items.append(Command(comparison.command))
    return Section("Best", items)


def task_section(comparison: Comparison) -> Section:
    """Says that the runs cannot be compared; empty where they can."""
    named = "; ".join(f"{task.name}: {task.words()}" for task in comparison.other_task)
    items: list[Item] = [Paragraph(f"{OTHER_TASK}{named}.", "headline")] if named else []
    return Section("Not comparable", items)


def difference_section(title: str, differences: list[Difference]) -> Section:
    rows = [Fact(difference.name, difference.words()) for difference in differences]
    return Section(title, [Facts(title, rows)] if rows else [Paragraph("none")])


def result_section(comparison: Comparison) -> Section:
    """Speed first; `x A` is how many times as fast as the first that has a speed. Then why a row
    has no figures, and which figures are mostly warming up."""
    sides = [side for side in comparison.sides if side.images_per_second]
    bars = [
        Bar(
            side.label,
            [("forward", speed)],
            or_unknown(speed, three_digits),
            (side.spread or 0.0) * speed,
            side.link,
        )
        for side in sides
        for speed in [side.images_per_second or 0.0]
    ]
    items: list[Item] = []
    if bars:
        items.append(Bars("Images per second", bars, "/s", []))
    items.append(results(comparison))
    items += [Paragraph(f"{side.label}: {side.cause}") for side in comparison.sides if side.cause]
    items += [
        Paragraph(f"{side.label}: too short to judge: {side.missing_for_verdict}.")
        for side in comparison.sides
        if side.missing_for_verdict
    ]
    items += [Paragraph(ONE_PC)] if comparison.one_pc else []
    return Section("Results", items)


def results(comparison: Comparison) -> Table:
    first = next((side for side in comparison.sides if side.images_per_second), None)
    columns = [
        Column("", lambda side: side.label),
        Column("status", status),
        Column("images/s", lambda side: or_unknown(side.images_per_second, three_digits)),
    ]
    if any(side.spread is not None for side in comparison.sides):
        columns.append(Column("spread", lambda side: or_unknown(side.spread, spread)))
    if first is not None:
        base, head = first.images_per_second or 1.0, f"x {first.label}"
        columns.append(
            Column(
                head, lambda side: or_unknown(side.images_per_second, lambda v: f"{v / base:.2f}")
            )
        )
    columns += [
        Column("100 epochs", lambda side: or_unknown(side.hundred_epochs, seconds)),
        Column("this run", lambda side: or_unknown(side.wall, seconds)),
    ]
    return table("Speed", columns, comparison.sides)


def spread(part: float) -> str:
    return f"+-{100 * part:.1f} %"


def status(side: Side) -> str:
    if not side.runs:
        return side.cause.partition(":")[0] if ":" in side.cause else "no run"
    worst = next((r for r in side.runs if r.summary["status"] != "finished"), side.runs[0])
    return str(worst.summary["status"]) + (", short" if side.missing_for_verdict else "")


def step_section(comparison: Comparison) -> Section:
    """The parts of the mean step, side by side; none that is nothing everywhere."""
    sides = [side for side in comparison.sides if side.part("seconds")]
    if not sides:
        return Section("The mean step", [])
    used = [name for name in PARTS if any((side.part(name) or 0.0) >= 0.0005 for side in sides)]
    bars = [
        Bar(
            side.label,
            [(name, 1000 * (side.part(name) or 0.0)) for name in used],
            or_unknown(side.part("seconds"), seconds),
            link=side.link,
        )
        for side in sides
    ]
    keys = [Key(name, PARTS[name].short) for name in used]
    columns = [Column("", lambda side: side.label)]
    columns += [Column("step", lambda side: or_unknown(side.part("seconds"), seconds))]
    columns += [Column(PARTS[name].short, partial(part_of, name)) for name in used]
    return Section(
        "The mean step",
        [
            Bars("The mean step", bars, "ms", keys),
            table("Parts of the mean step", columns, sides, 1),
            Paragraph(WAITS, "note"),
        ],
    )


WAITS = "`network`: what even the last rank waits for; `slower`: how much longer the others do."


def part_of(field: str, side: Side) -> str:
    return or_unknown(side.part(field), seconds)


def accuracy_section(comparison: Comparison) -> Section:
    """The best top-1, the time to what all reached, and top-1 after some epochs."""
    sides = [side for side in comparison.sides if side.curve]
    if not sides:
        return Section("Top-1", [])
    drawn = [side for side in sides if len(side.curve) > 1][:CURVES]
    epochs = lines(drawn, lambda epoch: float(epoch.epoch))
    times = lines(drawn, lambda epoch: epoch.seconds)
    curves = [
        Curve("After each epoch", "%", epochs, "epochs", 100.0),
        Curve("Over time", "%", times, top=100.0),
    ]
    level = comparison.level
    columns = [
        Column("", lambda side: side.label),
        Column("best", lambda side: or_unknown(side.best_top1, top1)),
        Column("at the end", lambda side: or_unknown(side.curve[-1].top1, top1)),
    ]
    if level:
        columns.append(Column(f"to {top1(level)}", lambda side: time_to(side, level)))
    columns += [Column(f"epoch {epoch}", partial(after, epoch)) for epoch in some_epochs(sides)]
    rows = table("Top-1 on the validation images", columns, sides, 1)
    return Section("Top-1", [Charts(curves if drawn else []), rows])


def lines(sides: list[Side], across: Callable[[Epoch], float]) -> list[Line]:
    """Top-1 in percent."""
    return [
        Line(side.label, f"n{place}", [(across(e), 100 * (e.top1 or 0)) for e in side.curve])
        for place, side in enumerate(sides)
    ]


def top1(value: float) -> str:
    return f"{100 * value:.1f} %"


def time_to(side: Side, level: float) -> str:
    epoch = epoch_reaching(side.curve, level)
    return seconds(epoch.seconds) if epoch else UNKNOWN


def after(number: int, side: Side) -> str:
    score = next((epoch.top1 for epoch in side.curve if epoch.epoch == number), None)
    return or_unknown(score, top1)


def some_epochs(sides: list[Side]) -> list[int]:
    """At most EPOCHS of those that were evaluated, the first and the last among them."""
    epochs = sorted({epoch.epoch for side in sides for epoch in side.curve})
    if len(epochs) <= EPOCHS:
        return epochs
    return [epochs[round(i * (len(epochs) - 1) / (EPOCHS - 1))] for i in range(EPOCHS)]
