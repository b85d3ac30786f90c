"""Carry out the commands that compare runs, or the runs of a sweep. Both write compare.html.

python -m report compare RUN RUN ...
python -m report sweep FOLDER

compare.py compares the runs; this module reads the command line, prints and writes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from boundary.run_files import SweepList
from boundary.schema import convert_what_fits
from contract.command_line import verb_words
from contract.errors import UserError
from contract.text import pluralize, three_digits
from report.cli import find_run, write
from report.compare import ComparedRow, Comparison, compare, rounded_top1, status, view_of
from report.differences import Difference
from report.files import read_object
from report.page import render_page
from report.run_view import PARTS
from report.text import printed, render_text

HOW = '`make compare RUNS="latest latest~1"`'
LEAST, MOST = 2, 8  # runs
TOO_SHORT = "The runs were too short to say which is fastest: more EPOCHS make them longer."


def compare_main(argv: list[str]) -> int:
    """Compare the runs that the user names. Returns the exit code; raises UserError."""
    words = verb_words("compare", argv, "python -m report compare")
    names = words.get("runs", [])
    if not LEAST <= len(names) <= MOST:
        problem = f"RUNS names {pluralize(len(names), 'run')}" if names else "RUNS is missing"
        raise UserError(f"{problem}: {LEAST} to {MOST} can be compared, as in {HOW}.")
    folders = [find_run(name) for name in names]
    names_by_folder: dict[Path, str] = {}
    for name, folder in zip(names, folders):
        # Two names may lead to the same folder, for example by the link `latest`. The comparison is
        # by identity, because the user may type a name twice.
        earlier = names_by_folder.setdefault(folder.resolve(), name)
        if earlier is not name:
            raise UserError(f"RUNS has the same run twice: {earlier} and {name}. Remove one.")
    rows = [ComparedRow(folder.resolve().name, [folder]) for folder in folders]
    page = folders[0].resolve().parent / "compare.html"
    comparison = compare(f"{len(rows)} runs", rows, page)
    show(comparison, page, words.get("json", False))
    return 0


def show(comparison: Comparison, page: Path, as_json: bool = False) -> None:
    """Print the comparison as text or as JSON, and write the page."""
    view = view_of(comparison)
    write(page, render_page(view))
    if as_json:
        document = {
            "same_task": not comparison.other_task,
            "settings": values_by_label(comparison.settings),
            "machines": values_by_label(comparison.machines),
            "runs": [
                {
                    "label": side.label,
                    "name": side.name,
                    "runs": [run.name for run in side.runs],
                    "status": status(side),
                    "cause": side.cause or None,
                    "images_per_second": side.images_per_second,
                    "spread": side.spread,
                    "hundred_epochs_seconds": side.hundred_epochs,
                    "step": {name: side.seconds_of(name) for name in ("seconds", *PARTS)},
                    "changes": side.changes_from(comparison.sides[0]),
                    "best_top1": side.best_top1,
                    "top1": [[epoch.epoch, epoch.seconds, epoch.top1] for epoch in side.curve],
                    "too_short": bool(side.missing_for_verdict),
                }
                for side in comparison.sides
            ],
        }
        print(json.dumps(document, indent=1))
    else:
        print(render_text(view), end="")
        print(printed(["", f"Comparison: {page}"]))


def values_by_label(differences: list[Difference]) -> dict[str, dict[str, str]]:
    """Return setting -> label of a run -> value."""
    return {
        difference.name: {label: value for value, labels in difference.values for label in labels}
        for difference in differences
    }


class SweepCell(NamedTuple):
    row: ComparedRow
    command: str  # that trains with the row's setting


def sweep_main(argv: list[str]) -> int:
    """Compare the settings of a sweep; only `make sweep` calls this. Returns the exit code."""
    folder = Path(argv[0])
    cells = read_cells(folder)
    page = folder / "compare.html"
    title = f"{pluralize(len(cells), 'setting')} of sweep {folder.resolve().name}"
    comparison = compare(title, [cell.row for cell in cells], page)
    # The best setting in words, and the command that trains with it.
    best, sentences, command = comparison.fastest, [TOO_SHORT], ""
    # If no run has a speed, longer runs would not help.
    if not any(side.speeds for side in comparison.sides):
        sentences = ["No setting has a result."]
    if best is not None:
        speed = three_digits(best.images_per_second or 0.0)
        sentences = [f"Fastest: {best.label}, {best.name}: {speed} images/s."]
        # A single run has no spread, so nothing can be said about settings that are nearly as fast.
        equal = [
            side.label
            for side in comparison.sides
            if side is not best and side.speeds and len(best.speeds) > 1
            if max(side.speeds) >= min(best.speeds)
        ]
        if equal:
            sentences.append(f"Not measurably slower: {', '.join(equal)}.")
        command = next(cell.command for cell, side in zip(cells, comparison.sides) if side is best)
    scored = [side for side in comparison.sides if side.best_top1 is not None]
    if scored:
        highest = max(scored, key=lambda side: side.best_top1 or 0.0)
        top1 = rounded_top1(highest.best_top1 or 0.0)
        sentences.append(f"Highest top-1: {highest.label}, {top1}.")
    comparison = replace(comparison, conclusion=" ".join(sentences), command=command)
    show(comparison, page)
    return 0


def read_cells(folder: Path) -> list[SweepCell]:
    """Read the cells of a sweep. Raises UserError if there are none."""
    missing: list[str] = []
    sweep: SweepList = convert_what_fits(read_object(folder / "sweep.json", missing), SweepList)
    if not sweep.cells:
        raise UserError(f"{folder} is not a sweep: {' '.join(missing) or 'it has no cells.'}")
    cells = []
    for index, cell in enumerate(sweep.cells):
        runs = [run for run in sweep.runs if run.cell == index]
        # The name of a run is a name below runs/; a path in it must not lead out of there.
        folders = [folder.resolve().parents[1] / Path(run.run).name for run in runs if run.run]
        causes = [run.cause for run in runs if run.cause]
        cause = causes[-1] if causes else "" if folders else "not run yet"
        cells.append(SweepCell(ComparedRow(cell.name or "?", folders, cause), cell.command or ""))
    return cells
