"""Reads the inventory's settings for a PC at which somebody works: `owner=`, `hours=`,
`idle_minutes=` and `away_dir=` (docs/office.md). inventory.py reads the other settings."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY = 24 * 60  # minutes
YIELDS = "yields"
AWAY = "/var/lib/tandem/away"  # the folder in which the command `tandem away` writes
# {sign by which a machine's guard notices that somebody uses the machine: text for people}. The
# guard checks them in launcher/node/owner.py.
SIGNS = {
    "asked": "its user typed `tandem away`",
    "seat": "somebody uses it",
    "processors": "other people's programs use its processors",
    "card": "other people's programs use its GPU",
}


@dataclass(frozen=True)
class Hours:
    """Says when a machine may be used, by the control node's clock."""

    text: str  # as the user wrote it
    # (begin, end) in minutes since Monday 0:00. A span that begins on Sunday may end on the next
    # Monday, after more than 7 days.
    spans: tuple[tuple[int, int], ...]

    def has(self, day: datetime) -> bool:
        """Return whether the machine may be used at this moment."""
        minute = (day.weekday() * 24 + day.hour) * 60 + day.minute
        # Monday's early hours may belong to a span that began on the Sunday before.
        times = (minute, minute + 7 * DAY)
        return any(begin <= time < end for begin, end in self.spans for time in times)


@dataclass(frozen=True)
class Owner:
    """Holds the settings of a machine that has an owner; the defaults mean no owner."""

    yields: bool = False
    hours: Hours | None = None
    idle_seconds: float = 600.0  # without a sign of use, before a run uses the machine again
    away_dir: str = AWAY

    @property
    def signs(self) -> tuple[str, ...]:
        """The SIGNS for which the guard looks; none on a machine without an owner."""
        if self.yields:
            return tuple(SIGNS)
        # Without owner=yields a run leaves the machine only if its owner asks.
        return ("asked",) if self.hours else ()

    def describe(self) -> str:
        """Return a clause about the owner for the dry run."""
        clauses = ["yields to its owner"] if self.yields else []
        clauses += [f"is used only in its hours ({self.hours.text})"] if self.hours else []
        return " and ".join(clauses)


SPAN = r"([01]?[0-9]|2[0-3]):([0-5][0-9])-([01]?[0-9]|2[0-4]):([0-5][0-9])"


class Item(NamedTuple):
    """An item of `hours=`, which repeats after each `period`. All numbers are minutes."""

    text: str
    begin: int
    end: int
    period: int


def read_hours(text: str) -> Hours:
    """Read a value of `hours=`, such as `19:00-07:30,sat,sun`: every night, and the whole weekend.
    Raises ValueError."""
    items: list[Item] = []
    for word in map(str.strip, text.split(",")):
        if match := re.fullmatch(SPAN, word, re.ASCII):
            first_hour, first_minute, last_hour, last_minute = map(int, match.groups())
            begin, end = 60 * first_hour + first_minute, 60 * last_hour + last_minute
            if begin == end or end > DAY:
                raise ValueError(f"{word} is not a span of time")
            end += 0 if end > begin else DAY  # a span past midnight ends on the next day
            period = DAY
        elif word in DAYS:
            begin, period = DAYS.index(word) * DAY, 7 * DAY
            end = begin + DAY
        else:
            raise ValueError(f"{word!r} is neither a span of time nor a day")
        # Two spans that overlap are usually a mistake, such as 7:30 for 19:30.
        for other in items:
            # A span past midnight may overlap a span of the next or the previous period.
            if period == other.period and any(
                begin < other.end + shift and other.begin + shift < end
                for shift in (-period, 0, period)
            ):
                raise ValueError(f"{other.text} and {word} overlap")
        items.append(Item(word, begin, end, period))
    spans = {
        (item.begin + shift, item.end + shift)
        for item in items
        for shift in range(0, 7 * DAY, item.period)
    }
    return Hours(text, tuple(sorted(spans)))


# {word of the inventory: (field of Owner, remedy for a wrong value)}
WORDS = {
    "owner": ("yields", f"write owner={YIELDS}, or omit it"),
    "hours": (
        "hours",
        "write spans of time, such as 19:00-07:30, and days, such as sat, with commas between them",
    ),
    "idle_minutes": ("idle_seconds", "write minutes, such as 10"),
    "away_dir": ("away_dir", f"omit it, or write a folder, such as {AWAY}"),
}


def _read_value(word: str, text: str) -> object:
    """Return the value of the field of Owner that a word of WORDS sets. Raises ValueError."""
    if word == "hours":
        return read_hours(text)
    if word == "owner":
        if text != YIELDS:
            raise ValueError(f"the only value is {YIELDS}")
        return True
    if word == "idle_minutes":
        if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not 0 < float(text) <= 1440:
            raise ValueError("that is not a number of minutes up to 1440")
        return 60 * float(text)
    if not text.startswith("/"):
        raise ValueError("that is not an absolute path")
    return text


MIN_SIMILARITY = 0.8  # of a misspelt name to a word of WORDS, by difflib
OWNER_WORDS = ("owner", "hours")  # a machine with one of these words has an owner


def read_owner(texts: dict[str, str], names: Iterable[str]) -> tuple[Owner, list[str]]:
    """Read the owner of a machine. `texts`: {word of WORDS: value} of the machine; `names`: the
    names of all its variables. Returns the owner, and problems as ends of sentences."""
    fields: dict[str, Any] = {}
    problems = []
    for word, text in texts.items():
        field, remedy = WORDS[word]
        try:
            fields[field] = _read_value(word, text)
        except ValueError as error:
            problems.append(f"{word} is {text[:80]!r}: {error}: {remedy}.")
    if texts and not problems and not any(word in texts for word in OWNER_WORDS):
        word = next(iter(texts))
        problems.append(f"{word}= has no effect without owner= or hours=.")
    # With a misspelt word the machine would have no owner. In JSON a name may be a number.
    for name in sorted({str(name) for name in names} - set(WORDS)):
        if matches := difflib.get_close_matches(name.lower(), WORDS, n=1, cutoff=MIN_SIMILARITY):
            problems.append(
                f"{name}= is not a setting: write {matches[0]}=, or choose another name."
            )
    return Owner(**fields), problems
