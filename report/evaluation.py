"""python -m report evaluation FILE [TITLE]: of what --evaluate wrote, a page and two tables beside
it: evaluation.html, classes.csv, confused.csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from boundary.run_files import EvaluationFile
from boundary.schema import Invalid, decode
from contract.errors import UserError
from contract.text import csv_cell, pluralize, read_text
from report.cli import write
from report.page import render_page
from report.text import printed, render_text
from report.view import Column, Paragraph, Section, View, or_unknown, table, top1

WEAKEST = 10  # classes that the terminal shows
NONE = "No image was taken for another class."
COLUMNS = (
    Column("class", lambda row: row.name),
    Column("images", lambda row: f"{row.images:,}"),
    Column("top-1", lambda row: or_unknown(row.top1, top1)),
    Column("top-5", lambda row: or_unknown(row.top5, top1)),
    Column("loss", lambda row: or_unknown(row.loss, "{:.4f}".format)),
)
CONFUSED = (
    Column("class", lambda row: row.name),
    Column("taken for", lambda row: row.predicted),
    Column("images", lambda row: f"{row.images:,}"),
)


def evaluation_main(argv: list[str]) -> int:
    """Returns the exit code. Raises UserError."""
    if not 1 <= len(argv) <= 2:
        raise UserError("give the file that --evaluate wrote: python -m report evaluation FILE.")
    file = Path(argv[0])
    evaluation = read(file)
    title = argv[1] if len(argv) > 1 else file.name
    page = file.with_name("evaluation.html")
    figures = [
        [csv_cell(row.name), row.images, row.top1, row.top5, row.loss] for row in evaluation.classes
    ]
    write(file.with_name("classes.csv"), as_csv("class images top1 top5 loss", figures))
    pairs = [
        [csv_cell(row.name), csv_cell(row.predicted), row.images] for row in evaluation.confused
    ]
    write(file.with_name("confused.csv"), as_csv("class predicted images", pairs))
    write(page, render_page(view_of(evaluation, title, len(evaluation.classes))))
    print(render_text(view_of(evaluation, title, WEAKEST)), end="")
    print(printed(["", f"Evaluation: {page}", "Beside it: classes.csv, confused.csv"]))
    return 0


def read(file: Path) -> EvaluationFile:
    """Raises UserError."""
    try:
        evaluation: EvaluationFile = decode(read_text(file), EvaluationFile, "it")
        return evaluation
    except (OSError, ValueError, Invalid) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{file} is no evaluation ({why}): make it anew by --evaluate.") from None


def as_csv(heads: str, rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads.split(), *rows])
    return text.getvalue()


def view_of(evaluation: EvaluationFile, title: str, most: int) -> View:
    """With so many of the classes, the weakest first."""
    lost = pluralize(evaluation.unreadable, "image")
    total = evaluation.images + evaluation.unreadable
    of_all = f" of {total:,}" if evaluation.unreadable else ""
    note = Paragraph(f"{lost} could not be read, and do not count.", "note")
    weakest = sorted(evaluation.classes, key=lambda row: 2.0 if row.top1 is None else row.top1)
    aside = f"the weakest first{f', {most} of {len(weakest)}' if most < len(weakest) else ''}"
    confused = table("Confused classes", CONFUSED, evaluation.confused)
    return View(
        brand="Tandem evaluation",
        title=title,
        setup=[
            f"{evaluation.model} on {evaluation.data}",
            *(evaluation.precision, f"{evaluation.image_size} px"),
        ],
        facts=[
            (top1(evaluation.top1), "top-1"),
            (top1(evaluation.top5), "top-5"),
            (f"{evaluation.loss:.4f}", "loss"),
            (f"{evaluation.images:,}", "images" + of_all),
        ],
        sections=[
            Section("Result", [note] if evaluation.unreadable else []),
            Section("Confused most", [confused if evaluation.confused else Paragraph(NONE)]),
            Section("Classes", [table("Classes", COLUMNS, weakest[:most], names=1)], aside),
        ],
        links=(("classes.csv", "all classes"), ("confused.csv", "confused pairs")),
    )
