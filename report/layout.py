"""Text in 80 columns: wrapped sentences and aligned tables."""

from __future__ import annotations

import textwrap
from typing import Any

COLUMNS = 80


def printable(text: str) -> str:
    """The text without control characters (colours in a log)."""
    return "".join(character for character in text if character.isprintable())


def wrap(sentence: str, indent: str = "  ", first: str | None = None) -> list[Any]:
    """Lines of at most 80 columns."""
    return textwrap.wrap(
        printable(sentence),
        COLUMNS,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
    )


def table(rows: list[Any]) -> list[Any]:
    """Rows of strings as aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        (
            "  "
            + "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            )
        ).rstrip()[:COLUMNS]
        for row in rows
    ]
