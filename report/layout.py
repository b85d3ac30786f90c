"""Text in 80 columns: figures in words, wrapped sentences and aligned tables. The page spells its
figures in the same way."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

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


def seconds(value: float | None) -> str:
    """A duration: 85 ms, 1.41 s, 61 s, 4 min 5 s, 3 h 12 min, 2 d 4 h."""
    if value is None:
        return "unknown"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float) -> str:
    """Bytes: 512 B, 44.7 MB, 153 MB, 1.3 GB (powers of ten)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def three_digits(value: float) -> str:
    """Three significant digits at most, never an exponent: 153, 44.7, 1.23, 0.04."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def millions(number: float) -> str:
    """A large count: 25.6 M, 0.96 M."""
    return f"{three_digits(number / 1e6)} M"


def percent(fraction: float) -> str:
    """A fraction in [0, 1] as whole percent; small ones are not rounded to nothing."""
    return "< 1 %" if 0 < fraction < 0.005 else f"{fraction:.0%}".replace("%", " %")


def link(mbit: float) -> str:
    """The nominal speed of a link: 100 Mbit/s, 1 Gbit/s, 2.5 Gbit/s."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"
