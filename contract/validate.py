"""Checks what a node sends before anything here uses it: JSON of bounded size becomes a value of a
known shape, made anew, which holds nothing else and can be trusted from there on.

(jsonschema would do the checking; its compiled dependencies are too much for eighty lines.)
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from dataclasses import dataclass
from typing import Any

TEXT = 4096  # characters of one string; our guard and our probe cut what is longer
MANY = 100_000  # entries of one list
LARGEST = 1 << 63
DIGITS = 20  # of LARGEST, and a sign
_LONE = re.compile(r"[\ud800-\udfff]")
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


class Invalid(Exception):
    """A node sent something impossible; the text says what, for a person."""


@dataclass(frozen=True)
class Each:
    """A mapping from any names, so many at most, to values of one shape."""

    shape: object
    most: int = MANY


@dataclass(frozen=True)
class Maybe:
    """A value of this shape, or None, or no value at all, which becomes None."""

    shape: object


@dataclass(frozen=True)
class Row:
    """A list of so many values, each of its own shape."""

    shapes: tuple[object, ...]


@dataclass(frozen=True)
class Match:
    """A string that matches all of a pattern."""

    pattern: str


@dataclass(frozen=True)
class One:
    """One of these values."""

    values: tuple[object, ...] | frozenset[int] | frozenset[str] | range


NATURAL = One(range(LARGEST))  # a number of things


def parse(line: bytes | str) -> Any:
    """The JSON value of a line; nothing in it is checked, and it may be nested as deep as Python
    allows: only `check` may look at more than its top. Raises Invalid."""
    try:
        return json.loads(line, parse_int=_whole)
    except (ValueError, RecursionError):
        raise Invalid("it is no JSON") from None


def _whole(digits: str) -> float:
    """An int; as a float, which no shape takes, where reading it would cost the square of its
    length."""
    return int(digits) if len(digits) <= DIGITS else float(digits)


def check(value: Any, shape: Any, name: str) -> Any:
    """What the shape says of the value, made anew: names that it does not have are left out, and a
    lone surrogate, which no file could hold, becomes U+FFFD. Raises Invalid naming the part that
    does not fit.

    A shape is bool, int (64 bits), float (finite; an int, too), str (at most TEXT characters),
    None, Match, One, Each, Row, Maybe, a tuple of alternatives, [the shape of each item], or {name:
    shape}. The work grows with the value's size, its depth with that of the shape.
    """
    try:
        return _taken(value, shape, name)
    except _Misfit as misfit:
        wrong = str(misfit)
        what = _SHOWN.repr(value) if wrong == name else "not what it should be"
        raise Invalid(f"{wrong} is {what}") from None


class _Misfit(Exception):
    """The name of a part that does not fit."""


def _taken(value: Any, shape: Any, name: str) -> Any:
    if isinstance(shape, Maybe):
        return None if value is None else _taken(value, shape.shape, name)
    if isinstance(shape, tuple):
        return _alternative(value, shape, name)
    if isinstance(shape, list):
        items = _held(value, list, name, MANY)
        return [_taken(item, shape[0], f"{name}[{i}]") for i, item in enumerate(items)]
    if isinstance(shape, Row):
        if len(_held(value, list, name, MANY)) != len(shape.shapes):
            raise _Misfit(name)
        pairs = enumerate(zip(value, shape.shapes))
        return [_taken(item, one, f"{name}[{i}]") for i, (item, one) in pairs]
    if isinstance(shape, Each):
        items = _held(value, dict, name, shape.most).items()
        return {_text(key, name): _taken(item, shape.shape, f"{name}.*") for key, item in items}
    if isinstance(shape, dict):
        return _fields(_held(value, dict, name), shape, name)
    if not _fits(value, shape):
        raise _Misfit(name)
    return _text(value, name) if isinstance(value, str) else value


def _held(
    value: Any, kind: type[list[Any] | dict[str, Any]], name: str, most: int = LARGEST
) -> Any:
    if not isinstance(value, kind) or len(value) > most:
        raise _Misfit(name)
    return value


def _alternative(value: Any, shapes: tuple[object, ...], name: str) -> Any:
    for shape in shapes:
        try:
            return _taken(value, shape, name)
        except _Misfit:
            continue
    raise _Misfit(name)


def _fields(value: dict[str, Any], shape: dict[str, object], name: str) -> dict[str, Any]:
    for key in shape:
        if key not in value and not isinstance(shape[key], Maybe):
            raise _Misfit(f"{name}.{key}")
    return {key: _taken(value.get(key), part, f"{name}.{key}") for key, part in shape.items()}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT:  # a key may be anything
        raise _Misfit(name)
    return _LONE.sub("\ufffd", value)


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value that holds no others has the shape."""
    if shape is None:
        return value is None
    if isinstance(shape, One):
        # Of a range only an int is looked for by arithmetic.
        kinds = (int,) if isinstance(shape.values, range) else (str, int)
        return type(value) in kinds and value in shape.values
    if isinstance(shape, Match):
        return _fits(value, str) and re.fullmatch(shape.pattern, value) is not None
    if shape is bool:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if shape is int:
        return isinstance(value, int) and abs(value) < LARGEST
    if shape is float:
        known = isinstance(value, (int, float))
        return known and abs(value) < LARGEST and math.isfinite(value)
    return isinstance(value, str) and len(value) <= TEXT
