"""Several runs side by side: what differs between them and what came of it, then as a View."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

from contract.errors import UserError
from contract.runs import RECORD
from contract.text import seconds, three_digits
from report import differences
from report.analysis import Analysis, analyse
from report.differences import Difference
from report.files import Entry
from report.measure import Step, mean_or_none
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

LEAST, MOST = 2, 8


@dataclass(frozen=True)
class Figures:
    """What a comparison needs of a run, without its steps, which may be millions."""

    name: str
    settings: dict[str, str]
    machines: dict[str, str]
    summary: Entry
    step: Step | None
    curve: list[Epoch]
    hundred_epochs: float | None
    headline: str  # the verdict in one sentence

    @property
    def images_per_second(self) -> float | None:
        speed: float | None = self.summary["images_per_second"]
        return speed


@dataclass(frozen=True)
class Side:
    """One row of the comparison: a run, or runs of the same settings, whose mean counts. `cause`:
    why there is none."""

    label: str
    name: str
    runs: tuple[Figures, ...]
    cause: str = ""
    link: str = ""  # to the report of its first run

    @property
    def speeds(self) -> list[float]:
        return [run.images_per_second for run in self.runs if run.images_per_second is not None]

    @property
    def images_per_second(self) -> float | None:
        return mean_or_none(self.speeds)

    @property
    def spread(self) -> float | None:
        """Half of what is between the slowest and the fastest of its runs, as a part of their
        mean; None with fewer than two."""
        if len(self.speeds) < 2:
            return None
        return (max(self.speeds) - min(self.speeds)) / 2 / statistics.fmean(self.speeds)

    @property
    def hundred_epochs(self) -> float | None:
        return mean_or_none([run.hundred_epochs for run in self.runs])

    @property
    def wall(self) -> float | None:
        return mean_or_none([run.summary["wall_seconds"] for run in self.runs])

    @property
    def best_top1(self) -> float | None:
        return mean_or_none([run.summary["best_top1"] for run in self.runs])

    def part(self, name: str) -> float | None:
        """Mean seconds of a part of the step, by its name in Step."""
        return mean_or_none([getattr(run.step, name) for run in self.runs if run.step])

    @property
    def curve(self) -> list[Epoch]:
        """The learning curve of the first run that was evaluated."""
        return next((scored for run in self.runs if (scored := scores(run.curve))), [])

    @property
    def missing_for_verdict(self) -> str:
        """What the first of its runs that is too short to judge lacks."""
        lacks = (run.step.missing_for_verdict for run in self.runs if run.step)
        return next(filter(None, lacks), "")


@dataclass(frozen=True)
class Comparison:
    title: str
    sides: tuple[Side, ...]
    other_task: list[Difference]  # in which the runs are not comparable
    settings: list[Difference]
    machines: list[Difference]
    conclusion: str = ""  # of a sweep: which is best
    command: str = ""  # how to train with it

    @property
    def one_pc(self) -> bool:
        """Whether a run's machines are processes of one PC."""
        runs = [run for side in self.sides for run in side.runs]
        return any(run.step.shared_machine for run in runs if run.step)

    @property
    def fastest(self) -> Side | None:
        """The fastest of the sides whose runs were long enough to judge."""
        judged = [side for side in self.sides if not side.missing_for_verdict]
        known = [side for side in judged if side.images_per_second]
        return max(known, key=lambda side: side.images_per_second or 0.0, default=None)

    @property
    def level(self) -> float | None:
        """The top-1 that each evaluated side reached, rounded down to a tenth of a percent."""
        best = [max(epoch.top1 or 0.0 for epoch in side.curve) for side in self.sides if side.curve]
        return int(min(best) * 1000) / 1000 if len(best) > 1 else None


def scores(curve: list[Epoch]) -> list[Epoch]:
    return [epoch for epoch in curve if epoch.top1 is not None]


def epoch_reaching(curve: list[Epoch], level: float) -> Epoch | None:
    """The first epoch after which top-1 was at least so high."""
    return next((epoch for epoch in curve if (epoch.top1 or 0.0) >= level), None)


def label(index: int) -> str:
    """A to Z, then 27 and so on."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def compare(title: str, rows: list[tuple[str, list[Path], str]], page: Path) -> Comparison:
    """`rows`: what to call each, its runs' folders, and why there are none; `page` is to show it.
    Raises UserError for a folder that is no run, and for one of another version of the record."""
    sides = tuple(
        Side(
            label(index),
            name,
            tuple(figures(folder) for folder in folders),
            cause,
            link_of(folders[:1], page),
        )
        for index, (name, folders, cause) in enumerate(rows)
    )
    first_runs = {side.label: side.runs[0] for side in sides if side.runs}
    settings = differences.differences({key: run.settings for key, run in first_runs.items()})
    return Comparison(
        title=title,
        sides=sides,
        other_task=[setting for setting in settings if setting.name in differences.TASK],
        settings=settings,
        machines=differences.differences({key: run.machines for key, run in first_runs.items()}),
    )


def link_of(folders: list[Path], page: Path) -> str:
    """The relative link from the page to a run's report; "" where it has none."""
    reports = [folder.resolve() / "report.html" for folder in folders]
    here = page.resolve().parent
    return next((quote(os.path.relpath(path, here)) for path in reports if path.is_file()), "")


def figures(folder: Path) -> Figures:
    """Raises UserError."""
    analysis = analyse(folder)
    refuse_other_record(analysis)
    step = analysis.step
    return Figures(
        name=folder.resolve().name,
        settings=differences.settings(analysis),
        machines=differences.machines(analysis),
        summary=analysis.summary,
        step=step and replace(step, ranks=()),  # of whose means nothing is compared
        curve=analysis.curve,
        hundred_epochs=analysis.hundred_epochs,
        headline=headline(analysis),
    )


def headline(analysis: Analysis) -> str:
    sentences = [analysis.failure or ""]
    sentences += [analysis.too_short.headline] if analysis.too_short else []
    sentences += [analysis.verdict.headline] if analysis.verdict else []
    return " ".join(filter(None, sentences))


def refuse_other_record(analysis: Analysis) -> None:
    """Raises UserError for a run whose record may lack settings, or mean something else by them."""
    versions = {r.start.record for r in analysis.run.ranks if r.start} - {RECORD}
    if versions:
        name = analysis.run.folder.resolve().name
        raise UserError(
            f"{name} has version {min(versions)} of the record, and runs of version {RECORD} can "
            f"be compared: `make report RUN={name}` reports on it alone, and a new run of the same "
            "settings can be compared."
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
    titles = {name: PARTS[name].short.format("data") for name in used}  # whatever each trains on
    keys = [Key(name, title) for name, title in titles.items()]
    columns = [Column("", lambda side: side.label)]
    columns += [Column("step", lambda side: or_unknown(side.part("seconds"), seconds))]
    columns += [Column(title, partial(part_of, name)) for name, title in titles.items()]
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
        Column("best", lambda side: or_unknown(side.best_top1, rounded_top1)),
        Column("at the end", lambda side: or_unknown(side.curve[-1].top1, rounded_top1)),
    ]
    if level:
        columns.append(Column(f"to {rounded_top1(level)}", lambda side: time_to(side, level)))
    columns += [Column(f"epoch {epoch}", partial(after, epoch)) for epoch in some_epochs(sides)]
    rows = table("Top-1 on the validation images", columns, sides, 1)
    return Section("Top-1", [Charts(curves if drawn else []), rows])


def lines(sides: list[Side], across: Callable[[Epoch], float]) -> list[Line]:
    """Top-1 in percent."""
    return [
        Line(side.label, f"n{place}", [(across(e), 100 * (e.top1 or 0)) for e in side.curve])
        for place, side in enumerate(sides)
    ]


def rounded_top1(value: float) -> str:
    return f"{100 * value:.1f} %"


def time_to(side: Side, level: float) -> str:
    epoch = epoch_reaching(side.curve, level)
    return seconds(epoch.seconds) if epoch else UNKNOWN


def after(number: int, side: Side) -> str:
    score = next((epoch.top1 for epoch in side.curve if epoch.epoch == number), None)
    return or_unknown(score, rounded_top1)


def some_epochs(sides: list[Side]) -> list[int]:
    """At most EPOCHS of those that were evaluated, the first and the last among them."""
    epochs = sorted({epoch.epoch for side in sides for epoch in side.curve})
    if len(epochs) <= EPOCHS:
        return epochs
    return [epochs[round(i * (len(epochs) - 1) / (EPOCHS - 1))] for i in range(EPOCHS)]
