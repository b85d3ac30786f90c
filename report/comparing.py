"""The commands that compare runs, or those of a sweep; both write compare.html.

python -m report compare RUN RUN ...
python -m report sweep FOLDER
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from contract.command_line import verb_words
from contract.errors import UserError
from contract.text import pluralize, three_digits
from report.cli import find_run, write
from report.compare import (
    LEAST,
    MOST,
    Comparison,
    Side,
    compare,
    rounded_top1,
    status,
    view_of,
)
from report.files import Entry, dicts, read_object, text
from report.page import render_page
from report.run_view import PARTS
from report.text import printed, render_text

HOW = '`make compare RUNS="latest latest~1"`'


def compare_main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    words = verb_words("compare", argv, "python -m report compare")
    folders = find_runs(words.get("runs", []))
    rows = [(folder.resolve().name, [folder], "") for folder in folders]
    page = folders[0].resolve().parent / "compare.html"
    comparison = compare(f"{len(rows)} runs", rows, page)
    show(comparison, page, words.get("json", False))
    return 0


def show(comparison: Comparison, page: Path, as_json: bool = False) -> None:
    """Prints it, and writes the page."""
    view = view_of(comparison)
    write(page, render_page(view))
    if as_json:
        print(json.dumps(figures(comparison), indent=1))
    else:
        print(render_text(view), end="")
        print(printed(["", f"Comparison: {page}"]))


def find_runs(names: list[str]) -> list[Path]:
    """The folders of the runs. Raises UserError."""
    if not LEAST <= len(names) <= MOST:
        problem = f"RUNS names {pluralize(len(names), 'run')}" if names else "RUNS is missing"
        raise UserError(f"{problem}: {LEAST} to {MOST} can be compared, as in {HOW}.")
    folders = [find_run(name) for name in names]
    names_by_folder: dict[Path, str] = {}
    for name, folder in zip(names, folders):
        other = names_by_folder.setdefault(folder.resolve(), name)
        if other is not name:
            raise UserError(f"RUNS has the same run twice: {other} and {name}; leave one out.")
    return folders


def figures(comparison: Comparison) -> dict[str, object]:
    """The comparison as JSON values, for scripts."""
    return {
        "same_task": not comparison.other_task,
        "settings": {setting.name: by_label(setting.values) for setting in comparison.settings},
        "machines": {machine.name: by_label(machine.values) for machine in comparison.machines},
        "runs": [side_figures(side) for side in comparison.sides],
    }


def by_label(values: list[tuple[str, list[str]]]) -> dict[str, str]:
    return {label: value for value, labels in values for label in labels}


def side_figures(side: Side) -> dict[str, object]:
    parts = ("seconds", *PARTS)
    return {
        "label": side.label,
        "name": side.name,
        "runs": [run.name for run in side.runs],
        "status": status(side),
        "cause": side.cause or None,
        "images_per_second": side.images_per_second,
        "spread": side.spread,
        "hundred_epochs_seconds": side.hundred_epochs,
        "step": {name: side.part(name) for name in parts},
        "best_top1": side.best_top1,
        "top1": [[epoch.epoch, epoch.seconds, epoch.top1] for epoch in side.curve],
        "too_short": bool(side.missing_for_verdict),
    }


MOST_CELLS = 2000
TOO_SHORT = "The runs were too short to say which is fastest: more EPOCHS make them longer."


@dataclass(frozen=True)
class Cell:
    name: str
    command: str
    runs: list[Path]
    cause: str


def sweep_main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    folder = Path(argv[0])  # from make sweep alone
    cells = read_cells(folder)
    rows = [(cell.name, cell.runs, cell.cause) for cell in cells]
    page = folder / "compare.html"
    title = f"{pluralize(len(cells), 'setting')} of sweep {folder.resolve().name}"
    show(with_conclusion(compare(title, rows, page), cells), page)
    return 0


def read_cells(folder: Path) -> list[Cell]:
    """Raises UserError where there is no sweep."""
    missing: list[str] = []
    state = read_object(folder / "sweep.json", missing)
    cells = dicts(state.get("cells"))[:MOST_CELLS]
    if not cells:
        raise UserError(f"{folder} is no sweep: {' '.join(missing) or 'it has no cells.'}")
    runs = dicts(state.get("runs"))
    of_cell = [[run for run in runs if run.get("cell") == at] for at in range(len(cells))]
    return [read_cell(folder, *both) for both in zip(cells, of_cell)]


def read_cell(folder: Path, cell: Entry, runs: list[Entry]) -> Cell:
    """A run's name is one below runs/, never a path."""
    names = [Path(name).name for run in runs if (name := text(run.get("run")))]
    causes = [cause for run in runs if (cause := text(run.get("cause")))]
    folders = [folder.resolve().parents[1] / name for name in names]
    name, command = text(cell.get("name")) or "?", text(cell.get("command")) or ""
    return Cell(name, command, folders, causes[-1] if causes else "" if names else "not run yet")


def with_conclusion(comparison: Comparison, cells: list[Cell]) -> Comparison:
    """The comparison with its best setting in words, and the command that trains with it."""
    best, sentences, command = comparison.fastest, [TOO_SHORT], ""
    if not any(side.speeds for side in comparison.sides):
        sentences = ["No setting has a result."]
    if best is not None:
        speed = three_digits(best.images_per_second or 0.0)
        sentences = [f"Fastest: {best.label}, {best.name}: {speed} images/s."]
        others = [side for side in comparison.sides if side is not best]
        near = [side.label for side in others if overlap(side, best)]
        sentences += [f"Within the spread of its runs as fast: {', '.join(near)}."] if near else []
        command = next(cell.command for cell, side in zip(cells, comparison.sides) if side is best)
    scored = [side for side in comparison.sides if side.best_top1 is not None]
    if scored:
        most = max(scored, key=lambda side: side.best_top1 or 0.0)
        top1 = rounded_top1(most.best_top1 or 0.0)
        sentences.append(f"Highest top-1: {most.label}, {top1}.")
    return replace(comparison, conclusion=" ".join(sentences), command=command)


def overlap(side: Side, best: Side) -> bool:
    """Whether the fastest run of one is as fast as the slowest of the best."""
    return bool(side.speeds) and len(best.speeds) > 1 and max(side.speeds) >= min(best.speeds)
