"""A view for the terminal, in plain ASCII, drawn by rich: wrapped sentences and aligned tables, 80
columns wide unless there is more room."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from report.view import (
    Bars,
    Charts,
    Choices,
    Command,
    Facts,
    Log,
    Paragraph,
    Section,
    Table,
    View,
)

COLUMNS = 80
BAR = 30


def printable(text: str) -> str:
    """The text without what a terminal would obey (titles, the clipboard, colours, the direction of
    writing), and without halves of surrogates, which it could not be given."""
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def printed(lines: Iterable[str]) -> str:
    """Lines as they leave this program, whatever names and words of machines are in them."""
    return "\n".join(map(printable, lines))


def drawn(what: RenderableType, width: int) -> list[str]:
    """As lines of plain text."""
    console = Console(
        file=io.StringIO(), width=max(1, width), color_system=None, legacy_windows=False
    )
    rows = console.render_lines(what, pad=False)
    return ["".join(segment.text for segment in row).rstrip() for row in rows]


def wrap(text: str, first: str = "  ", rest: str | None = None, width: int = COLUMNS) -> list[str]:
    """A paragraph behind `first`, its other lines behind `rest`, else below it."""
    indent = " " * cell_len(first) if rest is None else rest
    lines = drawn(Text(printable(text)), width - cell_len(indent)) if text.strip() else []
    return [f"{indent if place else first}{line}" for place, line in enumerate(lines)]


def render_text(view: View) -> str:
    """Ends with a newline."""
    facts = ", ".join(f"{figure} {what}" for figure, what in view.facts)
    head = [f"{view.brand} {view.title}", *wrap(", ".join(view.setup))]
    head += wrap(f"{view.state}: {facts}" if view.state and facts else view.state or facts)
    blocks = [head, *filter(None, map(section_lines, view.sections))]
    return "\n\n".join(map(printed, blocks)) + "\n"


def section_lines(section: Section, width: int = COLUMNS) -> list[str]:
    """The lines of a section; [] where all its items are charts."""
    lines = [line for item in section.items for line in PRINTERS[type(item)](item, width)]
    aside = f"  ({section.aside})" if section.aside else ""
    return [section.title.upper() + aside, *lines] if lines and section.title else lines


def command_lines(item: Command, width: int = COLUMNS) -> list[str]:
    """The lines of a shell, which can be copied together: no value is broken in two, and each line
    but the last one ends with a backslash."""
    lines, indent = [""], "    "
    for word in re.findall(r"(?:'[^']*'|\S)+", printable(item.text)):
        if lines[-1] and len(f"{indent}{lines[-1]} {word} \\") > width:
            lines.append("  " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
    return [f"{indent}{line} \\" for line in lines[:-1]] + [indent + lines[-1]]


def log_lines(item: Log, width: int) -> list[str]:
    return [row for line in item.lines for row in wrap(line, "    | ", "    |   ", width)]


def choice_lines(item: Choices, width: int) -> list[str]:
    lines = []
    for choice in item.rows:
        money = " (costs money)" if choice.money else ""
        lines += wrap(f"{choice.text}{money}", f"  {choice.mark:<2} ", width=width)
        lines += command_lines(Command(choice.command), width) if choice.command else []
    return lines


def fact_lines(item: Facts, width: int) -> list[str]:
    names = min(24, max((len(fact.name) for fact in item.rows), default=0))
    return [
        line
        for fact in item.rows
        for line in wrap(fact.value, f"  {fact.name:<{names}}  ", " " * (names + 4), width)
    ]


def bar_lines(item: Bars, width: int) -> list[str]:
    """A line for each key that has a figure; other bars have a table beside them."""
    keys = [key for key in item.keys if key.figure]
    lengths = (round(max(0.0, min(1.0, key.fraction)) * BAR) for key in keys)
    rows = [(key.name, key.figure, "#" * length) for key, length in zip(keys, lengths)]
    return aligned(rows, "lrl", width) if rows else []


def table_lines(item: Table, width: int = COLUMNS) -> list[str]:
    return aligned([item.heads, *item.rows], "l" * item.names, width) if item.rows else []


def aligned(rows: Sequence[Sequence[str]], sides: str = "l", width: int = COLUMNS) -> list[str]:
    """Rows of strings as columns: names flush left (l), figures (r, as all that `sides` does not
    name) flush right. Where there is no room, long names are cut, never figures, and then the last
    columns left out."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells)]
    sides = sides.ljust(len(widths), "r")
    over = sum(widths) + GAP * len(widths) - width
    for i in reversed(range(len(widths))):
        if sides[i] == "l":
            cut = min(max(over, 0), max(widths[i] - cell_len(cells[0][i]), 0))
            widths[i], over = widths[i] - cut, over - cut
    while over > 0 and sides[len(widths) - 1] == "r":
        over -= widths.pop() + GAP
    grid = Grid.grid(padding=(0, GAP, 0, 0))
    for room, side in zip(widths, sides):
        justify: Any = "left" if side == "l" else "right"
        grid.add_column(width=room, justify=justify, no_wrap=True, overflow="crop")
    for row in cells:
        grid.add_row(*map(Text, row[: len(widths)]))
    return [f"  {line}" for line in drawn(grid, width)]


GAP = 2  # before each column
PRINTERS: dict[type, Callable[[Any, int], list[str]]] = {
    Paragraph: lambda item, width: wrap(item.text, width=width),
    Command: command_lines,
    Log: log_lines,
    Choices: choice_lines,
    Facts: fact_lines,
    Bars: bar_lines,
    Table: table_lines,
    Charts: lambda item, width: [],
}
