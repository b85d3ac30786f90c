"""Text in 80 columns: figures in words, wrapped sentences and aligned tables. The page spells its
figures in the same way."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from contract.text import link as link
from contract.text import millions as millions
from contract.text import percent as percent
from contract.text import seconds as seconds
from contract.text import size as size
from contract.text import three_digits as three_digits

COLUMNS = 80


def printable(text: str) -> str:
    """The text without what a terminal would obey (titles, the clipboard, colours, the direction of
    writing), and without halves of surrogates, which it could not be given."""
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def printed(lines: Iterable[str]) -> str:
    """Lines as they leave this program, whatever names and words of machines are in them."""
    return "\n".join(map(printable, lines))


def wrap(sentence: str, indent: str = "  ", first: str | None = None) -> list[str]:
    """Lines of at most 80 columns."""
    return textwrap.wrap(
        printable(sentence),
        COLUMNS,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
    )


def command(text: str) -> list[str]:
    """A command as the lines of a shell, which can be copied together: no value is broken in two,
    and each line but the last one ends with a backslash."""
    lines, indent = [""], "    "
    for word in re.findall(r"(?:'[^']*'|\S)+", printable(text)):
        if lines[-1] and len(f"{indent}{lines[-1]} {word} \\") > COLUMNS:
            lines.append("  " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
    return [f"{indent}{line} \\" for line in lines[:-1]] + [indent + lines[-1]]


def table(rows: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    """Rows of strings as aligned columns: the first `names` columns flush left, the others flush
    right.

    Where 80 columns are too few, long names are cut, never figures."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    over = 2 + sum(widths) + 2 * (len(widths) - 1) - COLUMNS
    for i in reversed(range(names)):
        cut = min(max(over, 0), max(widths[i] - len(rows[0][i]), 0))
        widths[i], over = widths[i] - cut, over - cut
    return [
        (
            "  "
            + "  ".join(
                cell[:width].ljust(width) if i < names else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            )
        ).rstrip()[:COLUMNS]
        for row in rows
    ]
