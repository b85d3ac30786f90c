"""Checks what a node sends before anything here uses it: it must be JSON of known shape and bounded
size.

(jsonschema would do the checking; its compiled dependencies are too much for forty lines.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TEXT = 4096  # characters of one string; our guard and our probe cut what is longer
MANY = 100_000  # entries of one list
LARGEST = 1 << 63
_LONE = re.compile(r"[\ud800-\udfff]")


class Invalid(Exception):
    """A node sent something impossible; the text says what, for a person."""


@dataclass(frozen=True)
class Each:
    """A mapping from any names to values of one shape."""

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

    values: tuple[object, ...] | frozenset[int] | range


def parse(line: bytes | str) -> Any:
    """The JSON value of a line; a lone surrogate, which no file could hold, becomes U+FFFD.

    Raises Invalid."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise Invalid("it is no JSON") from None
    text = line if isinstance(line, str) else line.decode("latin-1")
    return _mended(value) if "\\ud" in text or "\\uD" in text else value


def _mended(value):
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(item) for key, item in value.items()}
    return value


def check(value: Any, shape: Any, name: str) -> Any:
    """The value, when it has the shape. Raises Invalid naming the part that does not.

    A shape is bool, int (64 bits), float (finite; an int, too), str (at most TEXT characters),
    None, Match, One, Each, Row, a tuple of alternatives, [the shape of each item], or {name:
    shape}, which looks at no other names.
    """
    if (wrong := _wrong(value, shape, name)) is not None:
        raise Invalid(f"{wrong} is {_short(value) if wrong == name else 'not what it should be'}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 100 else text[:100] + "..."


def _wrong(value: Any, shape: Any, name: str) -> str | None:
    """The name of the first part that does not fit, None where all do."""
    if isinstance(shape, tuple):
        fits = any(_wrong(value, one, name) is None for one in shape)
        return None if fits else name
    if isinstance(shape, list):
        if not isinstance(value, list) or len(value) > MANY:
            return name
        return _first(_wrong(item, shape[0], f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(shape, Row):
        if not isinstance(value, list) or len(value) != len(shape.shapes):
            return name
        return _first(_wrong(v, s, f"{name}[]") for v, s in zip(value, shape.shapes))
    if isinstance(shape, Each):
        if not isinstance(value, dict) or len(value) > MANY:
            return name
        if any(len(key) > TEXT for key in value):
            return name
        return _first(_wrong(item, shape.shape, f"{name}.*") for item in value.values())
    if isinstance(shape, dict):
        return _fields(value, shape, name)
    return None if _fits(value, shape) else name


def _fields(value: Any, shape: dict[str, object], name: str) -> str | None:
    if not isinstance(value, dict):
        return name
    for key, part in shape.items():
        if key not in value:
            return f"{name}.{key}"
        if (wrong := _wrong(value[key], part, f"{name}.{key}")) is not None:
            return wrong
    return None


def _first(found: Iterable[str | None]) -> str | None:
    return next((one for one in found if one is not None), None)


def _fits(value: Any, shape: Any) -> bool:
    if shape is None:
        return value is None
    if isinstance(shape, One):
        return type(value) in (str, int) and value in shape.values
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
