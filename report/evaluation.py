"""python -m report evaluation FILE [TITLE]: show the file that --evaluate wrote, and write
evaluation.html, classes.csv and confused.csv next to it."""

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
from report.view import Column, Item, Paragraph, Section, View, or_unknown, table, top1

WEAKEST = 10  # classes that the terminal shows
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
    """Print an evaluation, and write its files. Returns the exit code; raises UserError."""
    if not 1 <= len(argv) <= 2:
        raise UserError("type the file that --evaluate wrote: python -m report evaluation FILE.")
    file = Path(argv[0])
    evaluation = read_evaluation(file)
    title = argv[1] if len(argv) > 1 else file.name
    page = file.with_name("evaluation.html")
    # The files hold all classes, the terminal only the weakest.
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
    print(printed(["", f"Evaluation: {page}", "In its folder: classes.csv, confused.csv"]))
    return 0


def read_evaluation(file: Path) -> EvaluationFile:
    """Read the file that --evaluate wrote. Raises UserError."""
    try:
        # The file may be somebody else's, so all of its fields are checked.
        evaluation: EvaluationFile = decode(read_text(file), EvaluationFile, "it")
        return evaluation
    except (OSError, ValueError, Invalid) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{file} is no evaluation ({reason}): make another one by --evaluate."
        ) from None


def as_csv(heads: str, rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads.split(), *rows])
    return text.getvalue()


def view_of(evaluation: EvaluationFile, title: str, limit: int) -> View:
    """Return a view with at most `limit` classes, the weakest first."""
    notes: list[Item] = []
    all_images = ""
    if evaluation.unreadable:
        unreadable = pluralize(evaluation.unreadable, "image")
        notes.append(Paragraph(f"{unreadable} could not be read, and are not counted.", "note"))
        all_images = f" of {evaluation.images + evaluation.unreadable:,}"
    # Classes without images have no score, and come last.
    weakest = sorted(evaluation.classes, key=lambda row: 2.0 if row.top1 is None else row.top1)
    aside = f"the weakest first{f', {limit} of {len(weakest)}' if limit < len(weakest) else ''}"
    confused = table("Confused classes", CONFUSED, evaluation.confused)
    none_confused = Paragraph("The model put no image into a wrong class.")
    return View(
        brand="Tandem evaluation",
        title=title,
        setup=[
            f"{evaluation.model} on {evaluation.data}",
            evaluation.precision,
            f"{evaluation.image_size} px",
        ],
        facts=[
            (top1(evaluation.top1), "top-1"),
            (top1(evaluation.top5), "top-5"),
            (f"{evaluation.loss:.4f}", "loss"),
            (f"{evaluation.images:,}", "images" + all_images),
        ],
        sections=[
            Section("Result", notes),
            Section("Confused most", [confused if evaluation.confused else none_confused]),
            Section("Classes", [table("Classes", COLUMNS, weakest[:limit], names=1)], aside),
        ],
        links=(("classes.csv", "all classes"), ("confused.csv", "confused pairs")),
    )
