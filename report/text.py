"""Draw a View as lines of plain text, by rich: wrapped sentences and aligned tables. The lines are
80 columns wide, or as wide as `make top` has room for. page.py draws the same View as HTML."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from report import view
from report.view import Section, View

COLUMNS = 80
BAR = 30  # characters of a bar that stands for the whole
GAP = 2  # blanks before each column
Print = Callable[[Any, int], list[str]]
PRINTERS: dict[type, Print] = {}  # by the class of the item


def prints(item: type) -> Callable[[Print], Print]:
    """Register a function that returns the lines of such an item, `width` columns wide."""

    def register(function: Print) -> Print:
        PRINTERS[item] = function
        return function

    return register


def printable(text: str) -> str:
    """Remove control characters and surrogates. By control characters, text from a machine could
    change a terminal's title, clipboard or direction of writing; surrogates cannot be encoded."""
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def printed(lines: Iterable[str]) -> str:
    """Join lines for the terminal; names and words of machines in them may be hostile."""
    return "\n".join(map(printable, lines))


def draw(item: RenderableType, width: int) -> list[str]:
    """Draw an item of rich as lines of plain text."""
    console = Console(
        file=io.StringIO(), width=max(1, width), color_system=None, legacy_windows=False
    )
    rows = console.render_lines(item, pad=False)
    return ["".join(segment.text for segment in row).rstrip() for row in rows]


def wrap(
    text: str, indent: str = "  ", hanging: str | None = None, width: int = COLUMNS
) -> list[str]:
    """Wrap a paragraph: the first line behind `indent`, the other lines behind `hanging`. By
    default `hanging` has as many blanks as `indent` is wide."""
    blanks = " " * cell_len(indent) if hanging is None else hanging
    lines = draw(Text(printable(text)), width - cell_len(blanks)) if text.strip() else []
    return [f"{blanks if index else indent}{line}" for index, line in enumerate(lines)]


def render_text(view: View) -> str:
    """Return the view as text that ends with a newline."""
    facts = ", ".join(f"{figure} {meaning}" for figure, meaning in view.facts)
    head = [f"{view.brand} {view.title}", *wrap(", ".join(view.setup))]
    head += wrap(f"{view.state}: {facts}" if view.state and facts else view.state or facts)
    blocks = [head, *filter(None, map(section_lines, view.sections))]
    return "\n\n".join(map(printed, blocks)) + "\n"


def section_lines(section: Section, width: int = COLUMNS) -> list[str]:
    """Return the lines of a section; [] if it holds only charts, which text does not show."""
    lines = [
        line
        for item in section.items
        if type(item) in PRINTERS
        for line in PRINTERS[type(item)](item, width)
    ]
    aside = f"  ({section.aside})" if section.aside else ""
    return [section.title.upper() + aside, *lines] if lines and section.title else lines


@prints(view.Paragraph)
def paragraph_lines(item: view.Paragraph, width: int) -> list[str]:
    return wrap(item.text, width=width)


@prints(view.Command)
def command_lines(item: view.Command, width: int = COLUMNS) -> list[str]:
    """Break a command at words, with backslashes, so that it can be copied into a shell."""
    lines, indent = [""], "    "
    # The first line begins with the command, and each other line with two blanks more.
    # A quoted value stays whole, however long it is: `ARGS='--lr 0.1'` is one word.
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", printable(item.text)):
        if lines[-1] and len(f"{indent}{lines[-1]} {word} \\") > width:
            lines.append("  " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
    return [f"{indent}{line} \\" for line in lines[:-1]] + [indent + lines[-1]]


@prints(view.Log)
def log_lines(item: view.Log, width: int) -> list[str]:
    return [row for line in item.lines for row in wrap(line, "    | ", "    |   ", width)]


@prints(view.Choices)
def choice_lines(item: view.Choices, width: int) -> list[str]:
    lines = []
    for choice in item.rows:
        money = " (costs money)" if choice.money else ""
        lines += wrap(f"{choice.text}{money}", f"  {choice.mark:<2} ", width=width)
        if choice.command:
            lines += command_lines(view.Command(choice.command), width)
    return lines


@prints(view.Facts)
def fact_lines(item: view.Facts, width: int) -> list[str]:
    names = min(24, max((len(fact.name) for fact in item.rows), default=0))
    return [
        line
        for fact in item.rows
        for line in wrap(fact.value, f"  {fact.name:<{names}}  ", " " * (names + 4), width)
    ]


@prints(view.Bars)
def bar_lines(item: view.Bars, width: int) -> list[str]:
    """Return a line for each key that has a figure. Bars without such keys have a table, too."""
    keys = [key for key in item.keys if key.figure]
    lengths = (round(max(0.0, min(1.0, key.fraction)) * BAR) for key in keys)
    rows = [(key.name, key.figure, "#" * length) for key, length in zip(keys, lengths)]
    return aligned(rows, "lrl", width) if rows else []


@prints(view.Table)
def table_lines(item: view.Table, width: int = COLUMNS) -> list[str]:
    return aligned([item.heads, *item.rows], "l" * item.names, width) if item.rows else []


def aligned(rows: Sequence[Sequence[str]], sides: str = "l", width: int = COLUMNS) -> list[str]:
    """Align rows of strings as columns. `sides` has a letter for each column: l (a name, flush
    left) or r (a figure, flush right); columns without a letter have r."""
    # If there is too little room, long names are cut first, and then the last columns are left out.
    # No figure is cut, because it would be read as another figure.
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells)]
    sides = sides.ljust(len(widths), "r")
    excess = sum(widths) + GAP * len(widths) - width
    for i in reversed(range(len(widths))):
        if sides[i] == "l":
            # A name keeps at least the width of its heading.
            cut = min(max(excess, 0), max(widths[i] - cell_len(cells[0][i]), 0))
            widths[i], excess = widths[i] - cut, excess - cut
    while excess > 0 and sides[len(widths) - 1] == "r":
        excess -= widths.pop() + GAP
    grid = Grid.grid(padding=(0, GAP, 0, 0))
    for column_width, side in zip(widths, sides):
        justify: Any = "left" if side == "l" else "right"
        grid.add_column(width=column_width, justify=justify, no_wrap=True, overflow="crop")
    for row in cells:
        grid.add_row(*map(Text, row[: len(widths)]))
    return [f"  {line}" for line in draw(grid, width)]
