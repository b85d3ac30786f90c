"""Reads the inventory's settings of a machine at which somebody works: `owner=`, `hours=`,
`idle_minutes=` and `away_dir=` (docs/office.md)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY = 24 * 60  # minutes
YIELDS = "yields"
AWAY = "/var/lib/tandem/away"  # where the command `tandem away` writes
# The signs by which a machine's guard knows that somebody uses it (launcher/node/owner.py), and
# their text. A run leaves a machine without owner=yields only if its owner asks for it.
SIGNS = {
    "asked": "its user typed `tandem away`",
    "seat": "somebody uses it",
    "processors": "other people's programs use its processors",
    "card": "other people's programs use its GPU",
}


@dataclass(frozen=True)
class Hours:
    """When a machine may be used, by the control node's clock: `text` as it was written, `spans`
    in minutes since Monday 0:00; one that begins on Sunday may end on the next Monday."""

    text: str
    spans: tuple[tuple[int, int], ...]

    def has(self, day: datetime) -> bool:
        # On Monday a span from Sunday may still last, which ends after 7 days here.
        minute = (day.weekday() * 24 + day.hour) * 60 + day.minute
        times = (minute, minute + 7 * DAY)
        return any(begin <= time < end for begin, end in self.spans for time in times)


@dataclass(frozen=True)
class Owner:
    """`idle_seconds`: for how long nobody must have used it before it is used again."""

    yields: bool = False
    hours: Hours | None = None
    idle_seconds: float = 600.0
    away_dir: str = AWAY

    @property
    def signs(self) -> tuple[str, ...]:
        """Return the SIGNS to look for; none on a machine that belongs to the cluster only."""
        if self.yields:
            return tuple(SIGNS)
        return ("asked",) if self.hours else ()

    def describe(self) -> str:
        """Return a clause for people, as the dry run has it."""
        clauses = ["yields to its owner"] if self.yields else []
        clauses += [f"is used only in its hours ({self.hours.text})"] if self.hours else []
        return " and ".join(clauses)


SPAN = r"([01]?[0-9]|2[0-3]):([0-5][0-9])-([01]?[0-9]|2[0-4]):([0-5][0-9])"


def hours(text: str) -> Hours:
    """Read `19:00-07:30,sat,sun`: every night, and all of both days. Raises ValueError."""
    items: list[tuple[str, int, int, int]] = []  # with begin, end and period in minutes
    for item in (word.strip() for word in text.split(",")):
        if match := re.fullmatch(SPAN, item, re.ASCII):
            first_hour, first_minute, last_hour, last_minute = map(int, match.groups())
            begin, end = 60 * first_hour + first_minute, 60 * last_hour + last_minute
            if begin == end or end > DAY:
                raise ValueError(f"{item} is not a span of time")
            end += 0 if end > begin else DAY  # over midnight
            period = DAY
        elif item in DAYS:
            begin, period = DAYS.index(item) * DAY, 7 * DAY
            end = begin + DAY
        else:
            raise ValueError(f"{item!r} is neither a span of time nor a day")
        # Two spans that overlap are mostly a mistake, such as 7:30 for 19:30.
        for other_item, other_begin, other_end, other_period in items:
            # A span over midnight meets one of the next period, so both neighbours count.
            if period == other_period and any(
                begin < other_end + shift and other_begin + shift < end
                for shift in (-period, 0, period)
            ):
                raise ValueError(f"{other_item} and {item} overlap")
        items.append((item, begin, end, period))
    spans = {
        (begin + shift, end + shift)
        for _, begin, end, period in items
        for shift in range(0, 7 * DAY, period)
    }
    return Hours(text, tuple(sorted(spans)))


# Each of these reads the text of a word, and raises ValueError.
def _yields(text: str) -> bool:
    if text != YIELDS:
        raise ValueError(f"the only value is {YIELDS}")
    return True


def _idle(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not 0 < float(text) <= 1440:
        raise ValueError("that is not a number of minutes up to 1440")
    return 60 * float(text)


def _folder(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("that is not an absolute path")
    return text


# {word of the inventory: (field of Owner, what its text means, how it is written)}
WORDS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "owner": ("yields", _yields, f"write owner={YIELDS}, or omit it"),
    "hours": (
        "hours",
        hours,
        "write spans of time, such as 19:00-07:30, and days, such as sat, with commas between them",
    ),
    "idle_minutes": ("idle_seconds", _idle, "write minutes, such as 10"),
    "away_dir": ("away_dir", _folder, f"omit it, or write a folder, such as {AWAY}"),
}


NEAR = 0.8  # how alike a name is to a word that was meant, by difflib
SOMEBODY = ("owner", "hours")  # without one of these nobody is asked


def read(texts: dict[str, str], names: Iterable[str]) -> tuple[Owner, list[str]]:
    """Read the values of WORDS of a machine whose variables have these names. Returns the owner,
    and problems as ends of sentences."""
    fields: dict[str, Any] = {}
    problems = []
    for word, text in texts.items():
        field, read_value, remedy = WORDS[word]
        try:
            fields[field] = read_value(text)
        except ValueError as error:
            problems.append(f"{word} is {text[:80]!r}: {error}: {remedy}.")
    if texts and not problems and not any(word in texts for word in SOMEBODY):
        word = next(iter(texts))
        problems.append(f"{word}= has no effect without owner= or hours=.")
    # A misspelt word would leave the machine without an owner. A name may be anything in JSON.
    for name in sorted({str(name) for name in names} - set(WORDS)):
        if matches := difflib.get_close_matches(name.lower(), WORDS, n=1, cutoff=NEAR):
            problems.append(
                f"{name}= is not a setting: write {matches[0]}=, or choose another name."
            )
    return Owner(**fields), problems
