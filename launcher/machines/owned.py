"""What the inventory says of a machine that somebody works at: `owner=`, `hours=`, `idle_minutes=`
and `away_dir=` (docs/office.md)."""

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
# By what a machine's guard knows that somebody uses it (launcher/node/owner.py), and how that is
# told. A machine without owner=yields is left for its owner's word alone.
SIGNS = {
    "asked": "its owner said `tandem away`",
    "seat": "somebody works at it",
    "processors": "somebody else's programs use its processors",
    "card": "somebody else's programs use its card",
}


@dataclass(frozen=True)
class Hours:
    """When a machine may be used, by the control machine's clock: `text` as it was written, `spans`
    in minutes since Monday 0:00; one that begins on Sunday may end on the next Monday."""

    text: str
    spans: tuple[tuple[int, int], ...]

    def has(self, day: datetime) -> bool:
        minute = (day.weekday() * 24 + day.hour) * 60 + day.minute
        week = 7 * DAY
        return any(
            begin <= now < end for begin, end in self.spans for now in (minute, minute + week)
        )


@dataclass(frozen=True)
class Owner:
    """`idle_seconds`: for how long nobody must have used it before it is used again."""

    yields: bool = False
    hours: Hours | None = None
    idle_seconds: float = 600.0
    away_dir: str = AWAY

    @property
    def signs(self) -> tuple[str, ...]:
        """What is looked for there; nothing on a machine that belongs to the cluster alone."""
        if self.yields:
            return tuple(SIGNS)
        return ("asked",) if self.hours else ()

    def told(self) -> str:
        """One clause for people, as the dry run has it."""
        parts = ["yields to its owner"] if self.yields else []
        parts += [f"is used in its hours alone ({self.hours.text})"] if self.hours else []
        return " and ".join(parts)


def _daily(found: re.Match[str]) -> tuple[int, int]:
    """A span of each day. Raises ValueError, as do all that read hours."""
    first, last, more, minutes = (int(part) for part in found.groups())
    begin, end = 60 * first + last, 60 * more + minutes
    if begin == end or end > DAY:
        raise ValueError(f"{found[0]} is no span of time")
    return begin, end if end > begin else end + DAY  # over midnight


def _whole(found: re.Match[str]) -> tuple[int, int]:
    begin = DAYS.index(found[0]) * DAY
    return begin, begin + DAY


# What may stand between the commas: how it is written, what it means, every how many minutes.
ITEMS: tuple[tuple[str, Callable[[re.Match[str]], tuple[int, int]], int], ...] = (
    (r"([01]?[0-9]|2[0-3]):([0-5][0-9])-([01]?[0-9]|2[0-4]):([0-5][0-9])", _daily, DAY),
    ("|".join(DAYS), _whole, 7 * DAY),
)


def hours(text: str) -> Hours:
    """`19:00-07:30,sat,sun`: every night, and all of both days."""
    read: list[tuple[str, int, int, int]] = []
    for item in (part.strip() for part in text.split(",")):
        begin, end, every = _item(item)
        for other, first, last, period in read:
            if period == every and _meet((begin, end), (first, last), period):
                raise ValueError(f"{other} and {item} overlap")
        read.append((item, begin, end, every))
    spans = {
        (begin + at, end + at) for _, begin, end, every in read for at in range(0, 7 * DAY, every)
    }
    return Hours(text, tuple(sorted(spans)))


def _item(item: str) -> tuple[int, int, int]:
    for pattern, meaning, every in ITEMS:
        if found := re.fullmatch(pattern, item, re.ASCII):
            return *meaning(found), every
    raise ValueError(f"{item!r} is neither a span of time nor a day")


def _meet(one: tuple[int, int], other: tuple[int, int], period: int) -> bool:
    """Whether two spans overlap that come again every so many minutes."""
    return any(one[0] < other[1] + at and other[0] + at < one[1] for at in (-period, 0, period))


def _yields(text: str) -> bool:
    if text != YIELDS:
        raise ValueError(f"the only word is {YIELDS}")
    return True


def _idle(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not 0 < float(text) <= 1440:
        raise ValueError("that is no number of minutes up to 1440")
    return 60 * float(text)


def _folder(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("that is no path from /")
    return text


# {word of the inventory: (field of Owner, what its text means, how it is written)}
WORDS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "owner": ("yields", _yields, f"write owner={YIELDS}, or leave it out"),
    "hours": (
        "hours",
        hours,
        "write spans of each day like 19:00-07:30, and days like sat, with commas between",
    ),
    "idle_minutes": ("idle_seconds", _idle, "write minutes, like 10"),
    "away_dir": ("away_dir", _folder, f"leave it out, or write a folder like {AWAY}"),
}


NEAR = 0.8  # how alike a name is to a word that was meant, by difflib
SOMEBODY = ("owner", "hours")  # by which a machine has somebody who is asked


def misspelt(names: Iterable[str]) -> list[str]:
    """What is wrong with a machine's variables that are nearly one of the words: such a machine
    would have no owner, and nobody would ever be asked."""
    wrong = []
    # A name may be anything that JSON has.
    for name in sorted({str(name) for name in names} - set(WORDS)):
        if near := difflib.get_close_matches(name.lower(), WORDS, n=1, cutoff=NEAR):
            wrong.append(f"{name}= is no word: write {near[0]}=, or call it otherwise.")
    return wrong


def read(texts: dict[str, str]) -> tuple[Owner, list[str]]:
    """A machine's words, and what is wrong with them, as ends of sentences."""
    fields: dict[str, Any] = {}
    wrong = []
    for word, text in texts.items():
        field, meaning, remedy = WORDS[word]
        try:
            fields[field] = meaning(text)
        except ValueError as error:
            wrong.append(f"{word} is {text[:80]!r}: {error}: {remedy}.")
    if texts and not wrong and not any(word in texts for word in SOMEBODY):
        alone = next(iter(texts))
        wrong.append(f"{alone}= stands without owner= or hours=: nobody would be asked there.")
    return Owner(**fields), wrong
