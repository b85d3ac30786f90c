"""A comparison for the terminal, in 80 columns; its tables are those of the page, too."""

from __future__ import annotations

from functools import partial

from report import layout
from report.compare import Comparison, Side, reached
from report.differences import Difference
from report.layout import printed, seconds, table, three_digits, wrap
from report.tables import UNKNOWN, Column, Table, known, made

# The parts of a step: the field of Step, its heading, and the category whose colour it has.
PARTS = (
    ("data", "images", "data"),
    ("h2d", "copy", "h2d"),
    ("forward", "forward", "forward"),
    ("backward", "backward", "backward"),
    ("network", "network", "sync_exposed"),
    ("peers", "slower", "peers"),
    ("optimizer", "optim.", "optimizer"),
    ("other", "other", "other"),
)
EPOCHS = 4  # columns of accuracy


def render_text(found: Comparison) -> str:
    blocks = (
        [f"Tandem compares {found.title}", *legend(found)],
        conclusion_lines(found),
        task_lines(found),
        difference_lines("SETTINGS THAT DIFFER", found.settings),
        difference_lines("MACHINES THAT DIFFER", found.machines),
        ["RESULTS", *shown(results(found), names=2), *result_notes(found)],
        ["THE MEAN STEP", *shown(steps(found))],
        ["TOP-1", *shown(accuracy(found))] if any(side.curve for side in found.sides) else [],
        ["VERDICTS", *verdict_lines(found)],
    )
    return "\n\n".join(printed(block) for block in blocks if block) + "\n"


def legend(found: Comparison) -> list[str]:
    return [
        line for side in found.sides for line in wrap(side.name, "       ", f"  {side.label:<3}  ")
    ]


def conclusion_lines(found: Comparison) -> list[str]:
    if not found.conclusion:
        return []
    typed = layout.command(found.command) if found.command else []
    return ["BEST", *wrap(found.conclusion), *typed]


def task_sentence(found: Comparison) -> str:
    """That the runs cannot be compared, where that is so; else ""."""
    if not found.other_task:
        return ""
    named = "; ".join(f"{one.name}: {one.words()}" for one in found.other_task)
    return (
        "These runs did not do the same, so neither the speed nor the accuracy of one says how "
        f"good the settings of another are. {named}."
    )


def task_lines(found: Comparison) -> list[str]:
    return ["NOT COMPARABLE", *wrap(task_sentence(found))] if found.other_task else []


def difference_lines(title: str, found: list[Difference]) -> list[str]:
    if not found:
        return [title, "  none"]
    width = min(24, max(len(one.name) for one in found))
    lines = [title]
    for one in found:
        lines += wrap(one.words(), " " * (width + 4), f"  {one.name:<{width}}  ")
    return lines


def shown(made_table: Table, names: int = 1) -> list[str]:
    return table([made_table.heads, *made_table.rows], names)


def results(found: Comparison) -> Table:
    """Speed first; `x A` is how many times as fast as the first that has a speed."""
    first = next((side for side in found.sides if side.images_per_second), None)
    columns = [
        Column("", lambda side: side.label),
        Column("status", status),
        Column("images/s", lambda side: known(side.images_per_second, three_digits)),
    ]
    if any(side.spread is not None for side in found.sides):
        columns.append(Column("spread", lambda side: known(side.spread, spread)))
    if first is not None:
        base, head = first.images_per_second or 1.0, f"x {first.label}"
        columns.append(
            Column(head, lambda side: known(side.images_per_second, lambda v: f"{v / base:.2f}"))
        )
    columns += [
        Column("100 epochs", lambda side: known(side.hundred_epochs, seconds)),
        Column("this run", lambda side: known(side.wall, seconds)),
    ]
    return made(tuple(columns), found.sides)


def spread(part: float) -> str:
    return f"+-{100 * part:.1f} %"


def status(side: Side) -> str:
    if not side.runs:
        return side.cause.partition(":")[0] if ":" in side.cause else "no run"
    worst = next((r for r in side.runs if r.summary["status"] != "finished"), side.runs[0])
    return str(worst.summary["status"]) + (", short" if side.short else "")


ONE_PC = "The machines of a demo are processes of one PC: nothing here holds for a network."


def result_notes(found: Comparison) -> list[str]:
    """Why a row has no figures, and which figures are mostly warming up."""
    lines = []
    for side in found.sides:
        if side.cause:
            lines += wrap(f"{side.label}: {side.cause}")
    short = [side.label for side in found.sides if side.short]
    if short:
        lines += wrap(
            f"Too short to judge: {', '.join(short)}. Less than 30 s of steps is mostly warming up."
        )
    return lines + (wrap(ONE_PC) if found.one_pc else [])


def steps(found: Comparison) -> Table:
    """The parts of the mean step, side by side; none that is nothing everywhere."""
    sides = [side for side in found.sides if side.part("seconds")]
    used = [
        (name, head)
        for name, head, _ in PARTS
        if any((side.part(name) or 0.0) >= 0.0005 for side in sides)
    ]
    columns = [Column("", lambda side: side.label)]
    columns += [Column("step", lambda side: known(side.part("seconds"), seconds))]
    columns += [Column(head, partial(part_of, name)) for name, head in used]
    return made(tuple(columns), sides)


def accuracy(found: Comparison) -> Table:
    """The best top-1, the time to what all reached, and top-1 after some epochs."""
    sides = [side for side in found.sides if side.curve]
    level = found.level
    columns = [
        Column("", lambda side: side.label),
        Column("best", lambda side: known(side.best_top1, top1)),
        Column("at the end", lambda side: known(side.curve[-1].top1, top1)),
    ]
    if level:
        columns.append(Column(f"to {top1(level)}", lambda side: time_to(side, level)))
    for epoch in some_epochs(sides):
        columns.append(Column(f"epoch {epoch}", partial(after, epoch)))
    return made(tuple(columns), sides)


def top1(value: float) -> str:
    return f"{100 * value:.1f} %"


def time_to(side: Side, level: float) -> str:
    epoch = reached(side.curve, level)
    return seconds(epoch.seconds) if epoch else UNKNOWN


def part_of(name: str, side: Side) -> str:
    return known(side.part(name), seconds)


def after(number: int, side: Side) -> str:
    score = next((epoch.top1 for epoch in side.curve if epoch.epoch == number), None)
    return known(score, top1)


def some_epochs(sides: list[Side]) -> list[int]:
    """At most EPOCHS of those that were evaluated, the first and the last among them."""
    every = sorted({epoch.epoch for side in sides for epoch in side.curve})
    if len(every) <= EPOCHS:
        return every
    return [every[round(i * (len(every) - 1) / (EPOCHS - 1))] for i in range(EPOCHS)]


def verdict_lines(found: Comparison) -> list[str]:
    return [
        line
        for side in found.sides
        if side.runs
        for line in wrap(side.runs[0].headline, "       ", f"  {side.label:<3}  ")
    ]
