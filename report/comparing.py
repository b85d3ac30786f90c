"""python -m report compare RUN RUN ...: prints a comparison and writes compare.html beside them."""

from __future__ import annotations

import json
from pathlib import Path

from contract.errors import UserError
from contract.text import counted
from report import compare_page, compare_text
from report.compare import LEAST, MOST, Comparison, Side, compare
from report.errors import Parser
from report.finding import find_run
from report.layout import printed
from report.writing import write

HOW = '`make compare RUNS="latest latest~1"`'


def compare_main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    parser = Parser(prog="python -m report compare", description="Sets runs side by side.")
    parser.add_argument("runs", nargs="*", help="2 to 8 runs, as in RUNS='latest latest~1'")
    parser.add_argument("--json", action="store_true", help="print the figures instead")
    options = parser.parse_args(argv)
    folders = named(options.runs)
    rows = [(folder.resolve().name, [folder], "") for folder in folders]
    found = compare(f"{len(rows)} runs", rows)
    page = folders[0].resolve().parent / "compare.html"
    write(page, compare_page.render_page(found))
    if options.json:
        print(json.dumps(figures(found), indent=1))
    else:
        print(compare_text.render_text(found), end="")
        print(printed(["", f"Comparison: {page}"]))
    return 0


def named(names: list[str]) -> list[Path]:
    """The folders of the runs. Raises UserError."""
    if not LEAST <= len(names) <= MOST:
        said = f"RUNS names {counted(len(names), 'run')}" if names else "RUNS is missing"
        raise UserError(f"{said}: {LEAST} to {MOST} can be compared, as in {HOW}.")
    folders = [find_run(name) for name in names]
    seen: dict[Path, str] = {}
    for name, folder in zip(names, folders):
        other = seen.setdefault(folder.resolve(), name)
        if other is not name:
            raise UserError(f"RUNS has the same run twice: {other} and {name}; leave one out.")
    return folders


def figures(found: Comparison) -> dict[str, object]:
    """For scripts."""
    return {
        "same_task": not found.other_task,
        "settings": {one.name: by_label(one.values) for one in found.settings},
        "machines": {one.name: by_label(one.values) for one in found.machines},
        "runs": [of_side(side) for side in found.sides],
    }


def by_label(values: list[tuple[str, list[str]]]) -> dict[str, str]:
    return {label: value for value, labels in values for label in labels}


def of_side(side: Side) -> dict[str, object]:
    parts = ("seconds", *(name for name, _, _ in compare_text.PARTS))
    return {
        "label": side.label,
        "name": side.name,
        "runs": [one.name for one in side.runs],
        "status": compare_text.status(side),
        "cause": side.cause or None,
        "images_per_second": side.images_per_second,
        "spread": side.spread,
        "hundred_epochs_seconds": side.hundred_epochs,
        "step": {name: side.part(name) for name in parts},
        "best_top1": side.best_top1,
        "top1": [[epoch.epoch, epoch.seconds, epoch.top1] for epoch in side.curve],
        "too_short": side.short,
    }
