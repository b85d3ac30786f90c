"""JSON of bounded size becomes a value of a known type, or a sentence that names the part which is
something else. Names that a type does not have are left out.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, inspect

LEARNING = threading.Lock()
LENGTH = 4096  # characters of one text; our guard and our probe cut what is longer
LARGEST = (1 << 63) - 1
# Escapes of JSON, so that one after a backslash of its own is none: a pair of surrogates is a
# character, half of one, as in an odd file's name, could be written to no file.
ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
# What msgspec says, and of which part.
WRONG = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)


def matching(pattern: str) -> Meta:
    """What says of a text that all of it matches."""
    return Meta(pattern=rf"^(?:{pattern})\Z", max_length=LENGTH)


Text = Annotated[str, Meta(max_length=LENGTH)]
Integer = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Sha256 = Annotated[str, matching("[0-9a-f]{64}")]


class Invalid(Exception):
    """A machine or a file says something impossible; the text says what, for a person."""


@functools.cache
def made_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a type. msgspec learns what a struct has as it first meets it, and while one
    thread does, another one would find it half learned: the process ended by SIGSEGV."""
    with LEARNING:
        return made_decoder(kind)


def decode(document: bytes | str, kind: Any, name: str) -> Any:
    """The value of this type in a JSON document. Raises Invalid naming the part that does not fit
    as one of `name`."""
    data = document.encode(errors="replace") if isinstance(document, str) else document
    if b"\\ud" in data or b"\\uD" in data:
        data = ESCAPE.sub(lambda match: rb"\ufffd" if match["half"] else match[0], data)
    try:
        return decoder_of(kind).decode(data)
    except msgspec.ValidationError as error:
        what, place = WRONG.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        raise Invalid(f"{name}{place}: {what[:1].lower()}{what[1:200]}") from None
    except (ValueError, RecursionError):
        raise Invalid(f"{name} is no JSON") from None


def convert(value: Any, kind: Any, name: str) -> Any:
    """The same of a value that others decoded: what it holds may be of types of their own."""
    try:
        return decode(json.dumps(value), kind, name)
    except (TypeError, ValueError, RecursionError):
        raise Invalid(f"{name} is no JSON") from None


class Lenient(Struct, kw_only=True, omit_defaults=True):
    """What is read as far as it fits: all that it has may lack, and it is false where all does."""

    def __bool__(self) -> bool:
        return self != type(self)()


def convert_what_fits(value: Any, kind: Any) -> Any:
    """What fits the type in a value of JSON; UNSET for nothing. A part that does not fit is left
    out, and what is too long is cut."""
    try:
        with LEARNING:
            return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter for half a surrogate pair
        return _fit(value, type_info(kind))


type_info = functools.cache(inspect.type_info)


def _fit(value: Any, kind: Any) -> Any:
    of_json, fitting = FITTING[type(kind)]
    return fitting(value, kind) if isinstance(value, of_json) else UNSET


def _fit_struct(value: dict[str, Any], kind: inspect.StructType) -> Any:
    known = [part for part in kind.fields if part.encode_name in value]
    parts = {part.name: _fit(value[part.encode_name], part.type) for part in known}
    return kind.cls(**{name: part for name, part in parts.items() if part is not UNSET})


def _fit_dict(value: dict[str, Any], kind: inspect.DictType) -> Any:
    first = list(value.items())[: kind.max_length]
    items = ((_fit(name, kind.key_type), _fit(item, kind.value_type)) for name, item in first)
    return {name: item for name, item in items if item is not UNSET}


def _fit_list(value: list[Any], kind: inspect.ListType) -> Any:
    items = (_fit(item, kind.item_type) for item in value[: kind.max_length])
    return [item for item in items if item is not UNSET]


def _fit_union(value: Any, kind: inspect.UnionType) -> Any:
    fitting = (_fit(value, each) for each in kind.types)
    return next((each for each in fitting if each is not UNSET), UNSET)


def _fit_number(value: float, kind: Any) -> Any:
    """NaN is within no bounds."""
    fits = (
        not isinstance(value, bool)
        and (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )
    return value if fits else UNSET


# Of each type, what JSON has for it.
FITTING: dict[type[inspect.Type], tuple[type, Callable[[Any, Any], Any]]] = {
    inspect.StructType: (dict, _fit_struct),
    inspect.DictType: (dict, _fit_dict),
    inspect.ListType: (list, _fit_list),
    inspect.UnionType: (object, _fit_union),
    inspect.IntType: (int, _fit_number),
    inspect.FloatType: (float, _fit_number),
    inspect.StrType: (str, lambda value, kind: value[: kind.max_length]),
    inspect.LiteralType: (str, lambda value, kind: value if value in kind.values else UNSET),
    inspect.BoolType: (bool, lambda value, kind: value),
    inspect.NoneType: (type(None), lambda value, kind: value),
    inspect.AnyType: (object, lambda value, kind: value),
}
