"""A view for the terminal, in plain ASCII: wrapped sentences and aligned tables, 80 columns wide
unless there is more room."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from report.view import (
    Bars,
    Charts,
    Choices,
    Command,
    Facts,
    Item,
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


def render_text(view: View) -> str:
    """Ends with a newline."""
    facts = ", ".join(f"{figure} {what}" for figure, what in view.facts)
    head = [f"{view.brand} {view.title}", *wrap(", ".join(view.setup))]
    head += wrap(f"{view.state}: {facts}" if view.state and facts else view.state or facts)
    blocks = [head, *filter(None, map(section_lines, view.sections))]
    return "\n\n".join(map(printed, blocks)) + "\n"


def section_lines(section: Section, width: int = COLUMNS) -> list[str]:
    """The lines of a section; [] where all its items are charts."""
    lines = [line for item in section.items for line in item_lines(item, width)]
    aside = f"  ({section.aside})" if section.aside else ""
    return [section.title.upper() + aside, *lines] if lines and section.title else lines


def item_lines(item: Item, width: int = COLUMNS) -> list[str]:
    return PRINTERS[type(item)](item, width)


def wrap(
    sentence: str, indent: str = "  ", first: str | None = None, width: int = COLUMNS
) -> list[str]:
    return textwrap.wrap(
        printable(sentence),
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
    )


def say_lines(item: Paragraph, width: int) -> list[str]:
    return wrap(item.text, width=width)


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
    return [row for line in item.lines for row in wrap(line, "    |   ", "    | ", width)]


def choice_lines(item: Choices, width: int) -> list[str]:
    lines = []
    for choice in item.rows:
        money = " (costs money)" if choice.money else ""
        lines += wrap(f"{choice.text}{money}", " " * 5, f"  {choice.mark:<2} ", width)
        lines += command_lines(Command(choice.command), width) if choice.command else []
    return lines


def fact_lines(item: Facts, width: int) -> list[str]:
    names = min(24, max((len(fact.name) for fact in item.rows), default=0))
    return [
        line
        for fact in item.rows
        for line in wrap(fact.value, " " * (names + 4), f"  {fact.name:<{names}}  ", width)
    ]


def bar_lines(item: Bars, width: int) -> list[str]:
    """A line for each key that has a figure; other bars have a table beside them."""
    keys = [key for key in item.keys if key.figure]
    names, figures = (max((len(getattr(k, of)) for k in keys), default=0) for of in KEY)
    return [
        f"  {key.name:<{names}}  {key.figure:>{figures}}  "
        f"{'#' * round(max(0.0, min(1.0, key.fraction)) * BAR)}".rstrip()[:width]
        for key in keys
    ]


KEY = ("name", "figure")


def table_lines(item: Table, width: int = COLUMNS) -> list[str]:
    return aligned([item.heads, *item.rows], item.names, width) if item.rows else []


def aligned(
    rows: Sequence[Sequence[str]], names: int = 1, width: int = COLUMNS, gap: int = 2
) -> list[str]:
    """Rows of strings as columns: the first `names` flush left, the others flush right. Where there
    is no room, long names are cut, never figures, and then the last columns left out."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    over = 2 + sum(widths) + gap * (len(widths) - 1) - width
    for i in reversed(range(names)):
        cut = min(max(over, 0), max(widths[i] - len(cells[0][i]), 0))
        widths[i], over = widths[i] - cut, over - cut
    while over > 0 and len(widths) > names:
        over -= widths.pop() + gap
    return [
        (
            "  "
            + (" " * gap).join(
                cell[:room].ljust(room) if i < names else cell.rjust(room)
                for i, (cell, room) in enumerate(zip(row, widths))
            )
        ).rstrip()[:width]
        for row in cells
    ]


PRINTERS: dict[type, Callable[[Any, int], list[str]]] = {
    Paragraph: say_lines,
    Command: command_lines,
    Log: log_lines,
    Choices: choice_lines,
    Facts: fact_lines,
    Bars: bar_lines,
    Table: table_lines,
    Charts: lambda item, width: [],
}
