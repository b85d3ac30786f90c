"""Compare several runs: their differences and their results, as a View.

comparing.py calls `compare` and `view_of` for `make compare` and `make sweep`. A row of the
comparison is a run, or all runs of a sweep with the same settings (Side).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from contract.errors import UserError
from contract.runs import RECORD
from contract.text import seconds, three_digits
from report import differences, view
from report.analysis import analyse
from report.bottleneck import ExplainedWait, last_rank_causes
from report.coverage import NAMES
from report.differences import Difference
from report.files import Entry
from report.measure import Step, mean_or_none
from report.progress import Epoch
from report.run_view import PARTS
from report.view import Bar, Bars, Column, Fact, Facts, Item, Paragraph, Section, or_unknown


class ComparedRow(NamedTuple):
    """A row to compare: a name, and the folders of its runs. `cause`: why a row has no run."""

    name: str
    folders: list[Path]
    cause: str = ""


@dataclass(frozen=True)
class ComparedRun:
    """The part of a run that is compared, without its steps, which may be millions."""

    name: str
    settings: dict[str, str]
    machines: dict[str, str]
    summary: Entry  # as in summary.json
    step: Step | None
    curve: list[Epoch]
    hundred_epochs: float | None  # seconds
    headline: str  # the verdict in one sentence
    # The waits of the last rank of a step, by their names; {} if they are unknown.
    last_rank: dict[str, ExplainedWait]

    @property
    def images_per_second(self) -> float | None:
        speed: float | None = self.summary["images_per_second"]
        return speed


@dataclass(frozen=True)
class Side:
    """A row with the mean figures of its runs, which have the same settings."""

    label: str  # A, B, ...
    name: str
    runs: tuple[ComparedRun, ...]
    cause: str = ""  # why there is no run
    link: str = ""  # to the report of its first run

    @property
    def speeds(self) -> list[float]:
        return [run.images_per_second for run in self.runs if run.images_per_second is not None]

    @property
    def images_per_second(self) -> float | None:
        return mean_or_none(self.speeds)

    @property
    def spread(self) -> float | None:
        """Half the range of the runs' speeds, as a fraction of their mean; None for one run."""
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

    def seconds_of(self, field: str) -> float | None:
        """Return the mean seconds of a field of Step."""
        return mean_or_none([getattr(run.step, field) for run in self.runs if run.step])

    def changes_from(self, base: Side) -> dict[str, float]:
        """Return by how many seconds the last rank of a step is slower in this row than in `base`:
        {cause: seconds}, the largest change first, without changes below CHANGED."""
        # Means over all ranks would hide what delays the last rank, because the other ranks only
        # wait for the last rank.
        base_runs = [run.last_rank for run in base.runs if run.last_rank]
        runs = [run.last_rank for run in self.runs if run.last_rank]
        changes: dict[str, float] = {}  # by cause
        # All runs have the same waits. A row without any has no changes.
        for wait in base_runs[0] if base_runs and runs else ():
            base_seconds = statistics.fmean(waits[wait].seconds for waits in base_runs)
            row_seconds = statistics.fmean(waits[wait].seconds for waits in runs)
            # A change has the cause of the longer wait, taken from the row's first run.
            longer = runs if row_seconds > base_seconds else base_runs
            cause = longer[0][wait].cause
            changes[cause] = changes.get(cause, 0.0) + row_seconds - base_seconds
        least = CHANGED * (base.seconds_of("seconds") or 0.0)
        largest_first = sorted(changes, key=lambda cause: -abs(changes[cause]))
        return {cause: changes[cause] for cause in largest_first if abs(changes[cause]) >= least}

    @property
    def curve(self) -> list[Epoch]:
        """The learning curve of the first run that was evaluated."""
        curves = ([e for e in run.curve if e.top1 is not None] for run in self.runs)
        return next(filter(None, curves), [])

    @property
    def missing_for_verdict(self) -> str:
        """A clause on what a run of this row lacks for a verdict; "" if all runs can be judged."""
        clauses = (run.step.missing_for_verdict for run in self.runs if run.step)
        return next(filter(None, clauses), "")


@dataclass(frozen=True)
class Comparison:
    """The rows, what differs between them, and for a sweep its best setting."""

    title: str
    sides: tuple[Side, ...]
    other_task: list[Difference]  # differences of the task, which make runs incomparable
    settings: list[Difference]
    machines: list[Difference]
    conclusion: str = ""  # a sentence on the best setting of a sweep
    command: str = ""  # `make train ...` with the best setting

    @property
    def one_pc(self) -> bool:
        """True if a run's machines are processes of one PC."""
        runs = [run for side in self.sides for run in side.runs]
        return any(run.step.shared_machine for run in runs if run.step)

    @property
    def fastest(self) -> Side | None:
        """The fastest of the sides whose runs were long enough to judge."""
        judged = [s for s in self.sides if s.images_per_second and not s.missing_for_verdict]
        return max(judged, key=lambda side: side.images_per_second or 0.0, default=None)

    @property
    def common_top1(self) -> float | None:
        """The top-1 that each evaluated side reached, rounded down to a tenth of a percent."""
        # After rounding up, a side might never have reached the printed value.
        best = [max(epoch.top1 or 0.0 for epoch in side.curve) for side in self.sides if side.curve]
        return int(min(best) * 1000) / 1000 if len(best) > 1 else None


def compare(title: str, rows: list[ComparedRow], page: Path) -> Comparison:
    """Read the runs of all rows. `page`: the file that will show them and link to their reports.
    Raises UserError for a folder that is no run, or whose record has another version."""
    sides = []
    for index, row in enumerate(rows):
        # A, B, ... Z, 27, 28, ...
        label = chr(ord("A") + index) if index < 26 else str(index + 1)
        link, report = "", row.folders[0].resolve() / "report.html" if row.folders else None
        runs = tuple(read_compared_run(folder) for folder in row.folders)
        # A row without a run has no report (None), and a run may not have been reported yet.
        if report and report.is_file():
            link = quote(os.path.relpath(report, page.resolve().parent))
        sides.append(Side(label, row.name, runs, row.cause, link))
    # All runs of a row have the same settings, so the first run stands for its row.
    first_runs = {side.label: side.runs[0] for side in sides if side.runs}
    settings = differences.differences({key: run.settings for key, run in first_runs.items()})
    return Comparison(
        title=title,
        sides=tuple(sides),
        other_task=[setting for setting in settings if setting.name in differences.TASK],
        settings=settings,
        machines=differences.differences({key: run.machines for key, run in first_runs.items()}),
    )


def read_compared_run(folder: Path) -> ComparedRun:
    """Analyse a run. Raises UserError for a folder that is no run, or of another record version."""
    analysis = analyse(folder)
    name, step = analysis.run.folder.resolve().name, analysis.step
    # A record of another version may lack settings, or mean something else by them.
    other_versions = {r.start.record for r in analysis.run.ranks if r.start} - {RECORD}
    if other_versions:
        raise UserError(
            f"{name} has version {min(other_versions)} of the record, but only runs of version "
            f"{RECORD} can be compared: `make report RUN={name}` shows it alone. Compare a "
            "new run with the same settings."
        )
    last_rank = last_rank_causes(step, analysis.evidence) if step and step.last_rank else {}
    # A failed run may have a verdict as well, so the headline may have two sentences.
    sentences = [analysis.failure or ""]
    sentences += [analysis.too_short.headline] if analysis.too_short else []
    sentences += [analysis.verdict.headline] if analysis.verdict else []
    return ComparedRun(
        name=name,
        settings=differences.settings(analysis),
        machines=differences.machines(analysis),
        summary=analysis.summary,
        step=step and replace(step, ranks=()),  # a comparison shows no ranks
        curve=analysis.curve,
        hundred_epochs=analysis.hundred_epochs,
        headline=" ".join(filter(None, sentences)),
        last_rank=last_rank,
    )


MOST_EPOCHS = 4  # columns of accuracy
MOST_CURVES = 8  # sides that have a colour
ONE_PC = (
    "The nodes of a demo are processes on one PC, so these numbers say nothing about a network."
)
OTHER_TASK = (
    "These runs did different work, so their speeds and accuracies do not show which "
    "settings are better. "
)
CHANGED = 0.1  # smaller changes, as a fraction of the first row's mean step, are not shown
NOTE = (
    "`network`: how long the rank that finishes last waits; `slower`: how much longer the other "
    "ranks wait."
)


def view_of(comparison: Comparison) -> view.View:
    """Return the page of a comparison, without empty sections."""
    sides = comparison.sides
    problem: list[Item] = []
    best: list[Item] = []
    if comparison.other_task:
        tasks = "; ".join(f"{task.name}: {task.words()}" for task in comparison.other_task)
        problem.append(Paragraph(f"{OTHER_TASK}{tasks}.", "headline"))
    if comparison.conclusion:
        best.append(Paragraph(comparison.conclusion, "headline"))
    if comparison.command:
        best.append(view.Command(comparison.command))
    names = [Fact(side.label, side.name, side.link) for side in sides]
    headlines = [Fact(side.label, side.runs[0].headline) for side in sides if side.runs]
    sections = (
        Section("Not comparable", problem),
        Section("Runs", [Facts("What is compared", names)]),
        Section("Best", best),
        difference_section("Settings that differ", comparison.settings),
        difference_section("Machines that differ", comparison.machines),
        result_section(comparison),
        step_section(comparison),
        accuracy_section(comparison),
        Section("Verdicts", [Facts("What each report says", headlines)]),
    )
    return view.View(
        brand="Tandem compares",
        title=comparison.title,
        setup=[],
        facts=[],
        sections=[section for section in sections if section.items],
        bad=bool(comparison.other_task),
    )


def difference_section(title: str, differences: list[Difference]) -> Section:
    """Show each value of each setting with the labels of the runs that have it."""
    rows = [Fact(difference.name, difference.words()) for difference in differences]
    return Section(title, [Facts(title, rows)] if rows else [Paragraph("none")])


def result_section(comparison: Comparison) -> Section:
    """Show the speeds, then why a row has no speed, and which runs were too short."""
    # A row without a speed has no bar. The bars have the colour of `forward`.
    bars = []
    for side in comparison.sides:
        if speed := side.images_per_second:
            spread, segments = (side.spread or 0.0) * speed, [("forward", speed)]
            bars.append(Bar(side.label, segments, three_digits(speed), spread, side.link))
    items: list[Item] = [Bars("Images per second", bars, "/s", [])] if bars else []
    columns = [
        Column("", lambda side: side.label),
        Column("status", status),
        Column("images/s", lambda side: or_unknown(side.images_per_second, three_digits)),
    ]
    # Only sweeps run a setting several times.
    if any(side.spread is not None for side in comparison.sides):
        columns.append(
            Column("spread", lambda side: or_unknown(side.spread, lambda v: f"+-{100 * v:.1f} %"))
        )
    # The column `x A` has multiples of A's speed.
    base = next((side for side in comparison.sides if side.images_per_second), None)
    if base is not None:
        base_speed = base.images_per_second or 1.0

        def factor(side: Side) -> str:
            return or_unknown(side.images_per_second, lambda v: f"{v / base_speed:.2f}")

        columns.append(Column(f"x {base.label}", factor))
    columns += [
        Column("100 epochs", lambda side: or_unknown(side.hundred_epochs, seconds)),
        Column("this run", lambda side: or_unknown(side.wall, seconds)),
    ]
    items.append(view.table("Speed", columns, comparison.sides))
    items += [Paragraph(f"{side.label}: {side.cause}") for side in comparison.sides if side.cause]
    items += [
        Paragraph(f"{side.label}: too short to judge: {side.missing_for_verdict}.")
        for side in comparison.sides
        if side.missing_for_verdict
    ]
    items += [Paragraph(ONE_PC)] if comparison.one_pc else []
    return Section("Results", items)


def status(side: Side) -> str:
    """Return a row's status: `finished`, or the status of a run that did not finish."""
    # A cause begins with a status, as in `failed: ...`.
    if not side.runs:
        return side.cause.partition(":")[0] if ":" in side.cause else "no run"
    # One run that did not finish makes the mean of its row doubtful.
    worst = next((r for r in side.runs if r.summary["status"] != "finished"), side.runs[0])
    return str(worst.summary["status"]) + (", short" if side.missing_for_verdict else "")


def step_section(comparison: Comparison) -> Section:
    """Show the parts of the mean step of each side, without parts that take no time."""
    sides = [side for side in comparison.sides if side.seconds_of("seconds")]
    if not sides:
        return Section("The mean step", [])
    least = view.LEAST_SHOWN_SECONDS
    shown = [f for f in PARTS if any((side.seconds_of(f) or 0.0) >= least for side in sides)]
    bars = [
        Bar(
            side.label,
            [(field, 1000 * (side.seconds_of(field) or 0.0)) for field in shown],
            or_unknown(side.seconds_of("seconds"), seconds),
            link=side.link,
        )
        for side in sides
    ]

    def seconds_column(title: str, field: str) -> Column:
        return Column(title, lambda side: or_unknown(side.seconds_of(field), seconds))

    # The runs may call their samples by different words, so the column is called `data`.
    titles = {field: PARTS[field].short.format("data") for field in shown}
    keys = [view.Key(field, title) for field, title in titles.items()]
    columns = [Column("", lambda side: side.label), seconds_column("step", "seconds")]
    columns += [seconds_column(title, field) for field, title in titles.items()]
    # Which causes made the last rank slower or faster than in the first row.
    base = sides[0]
    changes: list[Paragraph] = []
    for side in sides[1:]:
        samples = next((run.step.samples for run in side.runs if run.step), "samples")
        causes = [
            f"{NAMES[cause].format(samples)} {'+' if change > 0 else '-'}{seconds(abs(change))}"
            for cause, change in side.changes_from(base).items()
        ]
        start = f"The last rank of a step, {side.label} against {base.label}: "
        if causes:
            changes.append(Paragraph(f"{start}{', '.join(causes)}."))
    return Section(
        "The mean step",
        [
            Bars("The mean step", bars, "ms", keys),
            view.table("Parts of the mean step", columns, sides, names=1),
            *changes,
            Paragraph(NOTE, "note"),
        ],
    )


def accuracy_section(comparison: Comparison) -> Section:
    """Show the best top-1, the time to the top-1 that all reached, and top-1 after some epochs."""
    sides = [side for side in comparison.sides if side.curve]
    if not sides:
        return Section("Top-1", [])
    # A line needs two points. The lines have the colours `n0`, `n1` and so on.
    drawn = [side for side in sides if len(side.curve) > 1][:MOST_CURVES]

    def draw_lines(x_of: Callable[[Epoch], float]) -> list[view.Line]:
        return [
            view.Line(s.label, f"n{index}", [(x_of(e), 100 * (e.top1 or 0)) for e in s.curve])
            for index, s in enumerate(drawn)
        ]

    epoch_lines, time_lines = draw_lines(lambda e: float(e.epoch)), draw_lines(lambda e: e.seconds)
    curves = [
        view.Curve("After each epoch", "%", epoch_lines, "epochs", top=100.0),
        view.Curve("Over time", "%", time_lines, top=100.0),
    ]
    columns = [
        Column("", lambda side: side.label),
        Column("best", lambda side: or_unknown(side.best_top1, rounded_top1)),
        Column("at the end", lambda side: or_unknown(side.curve[-1].top1, rounded_top1)),
    ]
    if common := comparison.common_top1:
        columns.append(
            Column(
                f"to {rounded_top1(common)}",
                lambda side: next(
                    (seconds(e.seconds) for e in side.curve if (e.top1 or 0.0) >= common),
                    view.UNKNOWN,
                ),
            )
        )
    # Of many epochs, the table shows MOST_EPOCHS, evenly spaced from the first to the last.
    epochs = sorted({epoch.epoch for side in sides for epoch in side.curve})
    if len(epochs) > MOST_EPOCHS:
        final = len(epochs) - 1
        epochs = [epochs[round(i * final / (MOST_EPOCHS - 1))] for i in range(MOST_EPOCHS)]
    for number in epochs:
        # The default binds the number of this column; a closure would see the last number.
        def score(side: Side, number: int = number) -> str:
            scores = (epoch.top1 for epoch in side.curve if epoch.epoch == number)
            return or_unknown(next(scores, None), rounded_top1)

        columns.append(Column(f"epoch {number}", score))
    rows = view.table("Top-1 on the validation images", columns, sides, names=1)
    return Section("Top-1", [view.Charts(curves if drawn else []), rows])


def rounded_top1(value: float) -> str:
    return f"{100 * value:.1f} %"
