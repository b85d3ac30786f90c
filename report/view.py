"""What is shown of one run or of several: a View, made once of their figures, in the words that
people read. text.py prints it and page.py draws it, so that both say the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from report.windows import Points

UNKNOWN = "?"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `role`: headline, or note, which is said quietly."""

    text: str
    role: str = ""


@dataclass(frozen=True)
class Command:
    """A command line of a shell."""

    text: str


@dataclass(frozen=True)
class Log:
    """Lines of a log, as they were."""

    lines: list[str]


class Choice(NamedTuple):
    """One of several things to do; `mark`: its number."""

    mark: str
    text: str
    command: str | None = None
    money: bool = False


@dataclass(frozen=True)
class Choices:
    rows: list[Choice]


@dataclass(frozen=True)
class Table:
    """`rows` are as wide as `heads`; the first `names` columns are names, the others figures."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 2


class Fact(NamedTuple):
    name: str
    value: str
    link: str = ""


@dataclass(frozen=True)
class Facts:
    caption: str
    rows: list[Fact]


class Bar(NamedTuple):
    """A row of parts: (colour, value). `spread`: how far its runs are from their mean."""

    label: str
    parts: list[tuple[str, float]]
    figure: str
    spread: float = 0.0
    link: str = ""


class Key(NamedTuple):
    """The meaning of a colour; where it has a figure, that and its fraction of the total."""

    colour: str
    name: str
    figure: str = ""
    fraction: float = 0.0


@dataclass(frozen=True)
class Bars:
    """Bars of parts above an axis, or where the parts have no key, of one figure each. `limit`:
    what cannot be exceeded. The text has the keys that have figures alone."""

    caption: str
    rows: list[Bar]
    unit: str
    keys: list[Key]
    limit: float | None = None


class Line(NamedTuple):
    name: str
    colour: str
    points: Points


class Mark(NamedTuple):
    """Something that happened at `x`."""

    x: float
    words: str


@dataclass(frozen=True)
class Curve:
    """Lines over time or epochs. `top`: the upper edge, where that is fixed. `steady`: a few points
    far above the others, as a loss gone astray, do not set the scale. The page alone has it."""

    title: str
    unit: str
    lines: list[Line]
    x_unit: str = "s"
    top: float | None = None
    note: str = ""
    steady: bool = False
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Charts:
    curves: list[Curve]


Item = Paragraph | Command | Log | Choices | Table | Facts | Bars | Charts


@dataclass(frozen=True)
class Section:
    """`aside`: what its figures are of, behind the title."""

    title: str
    items: list[Item]
    aside: str = ""


@dataclass(frozen=True)
class View:
    """`facts`: (figure, of what) pairs. The first section is the one that matters; `bad`: it tells
    of a failure."""

    brand: str
    title: str
    setup: list[str]
    facts: list[tuple[str, str]]
    sections: list[Section]
    state: str = ""
    bad: bool = False
    links: tuple[tuple[str, str], ...] = ()


class Column(NamedTuple):
    """`words` gives the cell of a row."""

    head: str
    words: Callable[[Any], str]


def table(caption: str, columns: Sequence[Column], uses: Sequence[Any], names: int = 2) -> Table:
    """One row for each of `uses`."""
    rows = (tuple(column.words(use) for column in columns) for use in uses)
    return Table(caption, tuple(column.head for column in columns), tuple(rows), names)


def or_unknown(value: float | None, words: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else words(value)


def time_unit(longest: float) -> tuple[str, int]:
    """The unit of a time axis, and its length in seconds."""
    return ("s", 1) if longest < 300 else ("min", 60) if longest < 10800 else ("h", 3600)


def top1(value: float) -> str:
    return f"{100 * value:.2f} %"
