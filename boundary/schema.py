"""JSON of bounded size becomes a value of a known type, or a sentence that names the part which is
something else. Names that a type does not have are left out.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from typing import Annotated, Any

import msgspec
from msgspec import Meta

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
