"""Turn JSON of bounded size into a value of a known type, or report the part that does not fit.

Names that a type does not have are ignored.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, inspect

# msgspec learns the fields of a struct when it first meets it. A second thread that met it half
# learned ended the process by SIGSEGV.
LEARNING = threading.Lock()
LENGTH = 4096  # characters of one text; our guard and our probe cut longer ones
LARGEST = (1 << 63) - 1
# Escapes of JSON, matched one by one, so that an escaped backslash hides what follows it. A pair of
# surrogates is a character; half of one, as in an odd file name, could be written to no file.
ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
# A message of msgspec, and the part of the value that it is about.
MESSAGE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)


def matching(pattern: str) -> Meta:
    """Return the condition that a whole text matches `pattern`."""
    return Meta(pattern=rf"^(?:{pattern})\Z", max_length=LENGTH)


Text = Annotated[str, Meta(max_length=LENGTH)]
Integer = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Sha256 = Annotated[str, matching("[0-9a-f]{64}")]


class Invalid(Exception):
    """A machine or a file sent something impossible; the text tells a person what it was."""


type_info = functools.cache(inspect.type_info)


@functools.cache
def make_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decoder_of(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type; thread-safe."""
    with LEARNING:
        return make_decoder(kind)


def decode(document: bytes | str, kind: Any, name: str) -> Any:
    """Decode a JSON document as a value of type `kind`. Raises Invalid, which reports the part that
    does not fit as one of `name`."""
    data = document.encode(errors="replace") if isinstance(document, str) else document
    if b"\\ud" in data or b"\\uD" in data:
        data = ESCAPE.sub(lambda match: rb"\ufffd" if match["half"] else match[0], data)
    try:
        return decoder_of(kind).decode(data)
    except msgspec.ValidationError as error:
        message, part = MESSAGE.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        raise Invalid(f"{name}{part}: {message[:1].lower()}{message[1:200]}") from None
    except (ValueError, RecursionError):
        raise Invalid(f"{name} is no JSON") from None


def convert(value: Any, kind: Any, name: str) -> Any:
    """Convert a value that another program decoded, as `decode` does. Raises Invalid."""
    # Through JSON, because such a value may hold types of that program, such as Ansible's strings.
    try:
        return decode(json.dumps(value), kind, name)
    except (TypeError, ValueError, RecursionError):
        raise Invalid(f"{name} is no JSON") from None


class Lenient(Struct, kw_only=True, omit_defaults=True):
    """A struct of which the fitting part is read. Every field may be absent; it is false if all
    are."""

    def __bool__(self) -> bool:
        return self != type(self)()


def convert_what_fits(value: Any, kind: Any) -> Any:
    """Return the part of a JSON value that fits the type; UNSET if nothing does."""
    # Parts that do not fit are omitted, and long texts and lists are cut.
    try:
        with LEARNING:
            return msgspec.convert(value, kind)
    # This slow path is for damaged values only.
    except (msgspec.ValidationError, UnicodeEncodeError):  # the latter for half a surrogate pair
        return _fit(value, type_info(kind))


def _fit(value: Any, kind: Any) -> Any:
    if isinstance(kind, inspect.UnionType):
        options = (_fit(value, option) for option in kind.types)
        return next((option for option in options if option is not UNSET), UNSET)
    # A union has no form of its own; all other types have one.
    if not isinstance(value, JSON_TYPES[type(kind)]):
        return UNSET
    if isinstance(kind, inspect.StructType):
        present = [field for field in kind.fields if field.encode_name in value]
        fields = {field.name: _fit(value[field.encode_name], field.type) for field in present}
        return kind.cls(**{name: field for name, field in fields.items() if field is not UNSET})
    if isinstance(kind, inspect.DictType):
        entries = list(value.items())[: kind.max_length]
        pairs = [(_fit(name, kind.key_type), _fit(item, kind.value_type)) for name, item in entries]
        return {name: item for name, item in pairs if name is not UNSET and item is not UNSET}
    if isinstance(kind, inspect.ListType):
        items = (_fit(item, kind.item_type) for item in value[: kind.max_length])
        return [item for item in items if item is not UNSET]
    if isinstance(kind, inspect.StrType):
        return value[: kind.max_length]
    if isinstance(kind, inspect.LiteralType):
        return value if value in kind.values else UNSET
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        # Not so for NaN, which is within no bounds, and bool, which Python takes for an int.
        number: Any = value
        fits = (
            not isinstance(value, bool)
            and (kind.ge is None or number >= kind.ge)
            and (kind.gt is None or number > kind.gt)
            and (kind.le is None or number <= kind.le)
            and (kind.lt is None or number < kind.lt)
        )
        return value if fits else UNSET
    return value


# The form of each type in JSON.
JSON_TYPES: dict[type[inspect.Type], Any] = {
    inspect.StructType: dict,
    inspect.DictType: dict,
    inspect.ListType: list,
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.LiteralType: str,
    inspect.BoolType: bool,
    inspect.NoneType: type(None),
    inspect.AnyType: object,
}
