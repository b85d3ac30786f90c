"""Several runs side by side: what differs between them, and what came of it."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from contract.errors import UserError
from contract.runs import RECORD
from report import differences
from report.analysis import Analysis, analyse
from report.differences import Difference
from report.files import Entry
from report.measure import Step, mean_or_none
from report.progress import Epoch

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
    versions = {r.start.get("record", 1) for r in analysis.run.ranks if r.start} - {RECORD}
    if versions:
        name = analysis.run.folder.resolve().name
        raise UserError(
            f"{name} has version {min(versions)} of the record, and runs of version {RECORD} can "
            f"be compared: `make report RUN={name}` reports on it alone, and a new run of the same "
            "settings can be compared."
        )
