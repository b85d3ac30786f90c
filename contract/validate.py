"""Checks what a machine sends before anything here uses it: JSON of bounded size becomes a value of
a known shape, made anew, which holds nothing else and can be trusted from there on.

(jsonschema would do the checking; its compiled dependencies are too much for a hundred lines.)
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any

TEXT = 4096  # characters of one string; our guard and our probe cut what is longer
MANY = 100_000  # entries of one list
LARGEST = 1 << 63
DIGITS = 20  # of LARGEST, and a sign
_LONE = re.compile(r"[\ud800-\udfff]")
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


class Invalid(Exception):
    """A machine sent something impossible; the text says what, for a person."""


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
class Match:
    """A string that matches all of a pattern."""

    pattern: str
    what: str = ""  # in a message: "a version such as 6.1.0-31-amd64"


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
    does not fit, what it is and what it should be.

    A shape is bool, int (64 bits), float (finite; an int, too), str (at most TEXT characters),
    None, Match, One, Each, Maybe, a tuple of alternatives, [the shape of each item],
    {name: shape}, or a dataclass, which becomes an instance: the types of its fields are their
    shapes (Annotated[str, Match(...)] where that says more), and one with a default may lack.
    The work grows with the value's size, its depth with that of the shape.
    """
    if isinstance(shape, Maybe):
        return None if value is None else check(value, shape.shape, name)
    if isinstance(shape, tuple):
        return _alternative(value, shape, name)
    kind = _holder(shape)
    if kind is None:
        if not _fits(value, shape):
            raise _misfit(value, shape, name)
        return _text(value, name) if isinstance(value, str) else value
    most = shape.most if isinstance(shape, Each) else MANY if kind is list else LARGEST
    if not isinstance(value, kind) or len(value) > most:
        raise _misfit(value, shape, name)
    if isinstance(shape, Each):
        items = value.items()
        return {_text(key, name): check(part, shape.shape, _of(key, name)) for key, part in items}
    if kind is dict:
        return _fields(value, shape, name)
    return [check(part, shape[0], f"{name}[{i}]") for i, part in enumerate(value)]


def _holder(shape: Any) -> Any:
    """What a value of this shape is, where it holds others."""
    if isinstance(shape, list):
        return list
    typed = isinstance(shape, type) and is_dataclass(shape)
    return dict if typed or isinstance(shape, (dict, Each)) else None


def _alternative(value: Any, shapes: tuple[object, ...], name: str) -> Any:
    fitting = [shape for shape in shapes if (_holder(shape) or object) is type(value)]
    if len(fitting) == 1:  # so that the part of it is named that does not fit
        return check(value, fitting[0], name)
    for shape in shapes:
        try:
            return check(value, shape, name)
        except Invalid:
            continue
    raise _misfit(value, shapes, name)


def _of(key: Any, name: str) -> str:
    return f"{name}.{str(key)[:80]!a}".replace("'", "")


def _fields(value: dict[str, Any], shape: Any, name: str) -> Any:
    shapes, optional = (shape, ()) if isinstance(shape, dict) else shapes_of(shape)
    taken = {}
    for key, part in shapes.items():
        if key in value:
            taken[key] = check(value[key], part, f"{name}.{key}")
        elif isinstance(part, Maybe):
            taken[key] = None
        elif key not in optional:
            raise Invalid(f"{name}.{key} is missing")
    return taken if isinstance(shape, dict) else shape(**taken)


@cache
def shapes_of(cls: type) -> tuple[dict[str, Any], frozenset[str]]:
    """The shapes of a dataclass's fields, and the names of those that may be missing."""
    hints = typing.get_type_hints(cls, include_extras=True)
    own = fields(cls)
    plain = (field for field in own if field.default is field.default_factory is MISSING)
    optional = {field.name for field in own} - {field.name for field in plain}
    return {field.name: _shape_of(hints[field.name]) for field in own}, frozenset(optional)


def _shape_of(hint: Any) -> Any:
    if hasattr(hint, "__metadata__"):  # Annotated
        return hint.__metadata__[0]
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if kind is list:
        return [_shape_of(inner[0])]
    if kind is dict:
        return Each(_shape_of(inner[1]))
    if inner:  # X | None
        return tuple(_shape_of(one) for one in inner)
    return None if hint is type(None) else hint


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT:  # a key may be anything
        raise _misfit(value, str, name)
    return _LONE.sub("\ufffd", value)


def _misfit(value: Any, shape: Any, name: str) -> Invalid:
    expected = " or ".join(_expected(shape))
    return Invalid(f"{name} is {_SHOWN.repr(value)}, and {expected} was expected")


EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
EXPECTED[dict], EXPECTED[list] = "a mapping", "a list"


def _expected(shape: Any) -> Iterator[str]:
    if isinstance(shape, tuple):
        for one in shape:
            yield from _expected(one)
    elif isinstance(shape, One):
        yield f"one of {_SHOWN.repr(shape.values)}"
    elif isinstance(shape, Match):
        yield shape.what or f"what matches {shape.pattern}"
    else:
        yield EXPECTED.get(_holder(shape) or shape, "nothing")


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
