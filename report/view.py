"""Define a View, which shows a run, a comparison or an evaluation in words for people.

run_view.py, compare.py and evaluation.py make Views. text.py prints a View and page.py draws the
same View, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from report.windows import Points

# An unknown figure is never shown as 0 or as an empty cell.
UNKNOWN = "?"
LEAST_SHOWN_SECONDS = 0.0005  # a shorter time would be printed as 0 ms


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `role`: headline, or note for small print."""

    text: str
    role: str = ""


@dataclass(frozen=True)
class Command:
    """A command line of a shell."""

    text: str


@dataclass(frozen=True)
class Log:
    """Unchanged lines of a log."""

    lines: list[str]


class Choice(NamedTuple):
    """An item of a list of things to do. `mark`: its number; `money`: True if it costs money."""

    mark: str
    text: str
    command: str | None = None
    money: bool = False


@dataclass(frozen=True)
class Choices:
    """A list of things to do, or of attempts."""

    rows: list[Choice]


@dataclass(frozen=True)
class Table:
    """A table with a cell for each of `heads` in each row. The first `names` columns have names,
    all other columns figures."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 2


class Fact(NamedTuple):
    """A row of names and values. `link`: to a page about the name."""

    name: str
    value: str
    link: str = ""


@dataclass(frozen=True)
class Facts:
    caption: str
    rows: list[Fact]


class Bar(NamedTuple):
    """A row of segments: (colour, value). `spread`: half the range of several runs."""

    label: str
    segments: list[tuple[str, float]]
    figure: str
    spread: float = 0.0
    link: str = ""


class Key(NamedTuple):
    """The meaning of a colour. A key may have a figure and its fraction of the total."""

    colour: str
    name: str
    figure: str = ""
    fraction: float = 0.0


@dataclass(frozen=True)
class Bars:
    """Bars of several segments with keys, or without keys, of one figure each."""

    caption: str
    rows: list[Bar]
    unit: str
    # The text shows only keys that have figures.
    keys: list[Key]
    limit: float | None = None  # the value of a dashed line


class Line(NamedTuple):
    name: str
    colour: str
    points: Points


class Mark(NamedTuple):
    """An event at `x`."""

    x: float
    words: str


@dataclass(frozen=True)
class Curve:
    """Lines over time or epochs; only the page shows them."""

    title: str
    unit: str
    lines: list[Line]
    x_unit: str = "s"
    top: float | None = None  # the upper edge if it is fixed
    note: str = ""
    # True if a few points far above all other points, as of a diverged loss, do not set the scale.
    steady: bool = False
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Charts:
    curves: list[Curve]


Item = Paragraph | Command | Log | Choices | Table | Facts | Bars | Charts


@dataclass(frozen=True)
class Section:
    """`aside`: a remark behind the title on what its figures are about."""

    title: str
    items: list[Item]
    aside: str = ""


@dataclass(frozen=True)
class View:
    """A page or a text, from top to bottom."""

    brand: str  # what the view is, such as `Tandem run`, in front of the title
    title: str
    setup: list[str]  # words on what was measured: the model, the machines
    facts: list[tuple[str, str]]  # (figure, its meaning) pairs
    sections: list[Section]  # the first one matters most
    state: str = ""  # the status of a run
    bad: bool = False  # True if it reports a failure
    links: tuple[tuple[str, str], ...] = ()  # (file, what it has) pairs


class Column(NamedTuple):
    """`words` returns the cell of a row."""

    head: str
    words: Callable[[Any], str]


def table(caption: str, columns: Sequence[Column], rows: Sequence[Any], names: int = 2) -> Table:
    """Return a table with a row for each of `rows`."""
    cells = tuple(tuple(column.words(row) for column in columns) for row in rows)
    return Table(caption, tuple(column.head for column in columns), cells, names)


def or_unknown(value: float | None, words: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else words(value)


def time_unit(longest: float) -> tuple[str, int]:
    """Return the unit of an axis of `longest` seconds, and the unit's length in seconds."""
    return ("s", 1) if longest < 300 else ("min", 60) if longest < 10800 else ("h", 3600)


def top1(value: float) -> str:
    """Write a top-1 or top-5 in [0, 1] as a percentage: `76.15 %`."""
    return f"{100 * value:.2f} %"
