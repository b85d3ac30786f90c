"""Turn JSON of bounded size into a value of a known type. `decode` reports the part that does not
fit, and `convert_what_fits` omits that part. Names that a type does not have are ignored. The other
files of this package define the types."""

from __future__ import annotations

import functools
import json
import re
import threading
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, inspect

# msgspec reads the fields of a struct when it first uses the struct. A second thread that used the
# struct meanwhile ended the process by SIGSEGV.
LEARNING = threading.Lock()
LENGTH = 4096  # characters of one text; our guard and our probe cut longer ones
LARGEST = (1 << 63) - 1
# Escapes of JSON. They are matched one by one, so that `\\ud800` is an escaped backslash and text.
# A pair of surrogates is a character. Half a pair, as in an odd file name, fits in no UTF-8 file.
ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
# msgspec's message: "Expected `int`, got `str` - at `$.x[0]`", or "... - at `key` in `$.ranks`".
MESSAGE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)


def matching(pattern: str) -> Meta:
    """Return the condition that a whole text matches `pattern`."""
    return Meta(pattern=rf"^(?:{pattern})\Z", max_length=LENGTH)


Text = Annotated[str, Meta(max_length=LENGTH)]
Integer = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(gt=-(2.0**63), lt=2.0**63)]
UnixTime = Annotated[float, Meta(ge=0, lt=253402300800)]  # seconds; datetime knows no year 10000
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Sha256 = Annotated[str, matching("[0-9a-f]{64}")]


class Invalid(Exception):
    """A machine sent, or a file contains, a value of another type; the text is for people."""


type_info = functools.cache(inspect.type_info)


@functools.cache
def make_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode(document: bytes | str, kind: Any, name: str) -> Any:
    """Decode a JSON document as a value of type `kind`. Thread-safe. Raises Invalid, whose text
    begins with `name`, and then has the part that does not fit."""
    data = document.encode(errors="replace") if isinstance(document, str) else document
    if b"\\ud" in data or b"\\uD" in data:
        data = ESCAPE.sub(lambda match: rb"\ufffd" if match["half"] else match[0], data)
    try:
        with LEARNING:
            decoder = make_decoder(kind)
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        message, path = MESSAGE.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        raise Invalid(f"{name}{path}: {message[:1].lower()}{message[1:200]}") from None
    except (ValueError, RecursionError):
        raise Invalid(f"{name} is no JSON") from None


def convert(value: Any, kind: Any, name: str) -> Any:
    """Convert a value that another program has decoded. Raises Invalid, as `decode` does."""
    # The value becomes JSON first, because it may contain types of that program (Ansible has some).
    try:
        return decode(json.dumps(value), kind, name)
    except (TypeError, ValueError, RecursionError):
        raise Invalid(f"{name} is no JSON") from None


class Lenient(Struct, kw_only=True, omit_defaults=True):
    """A struct for `convert_what_fits`. Any field may be absent; without any it is false."""

    def __bool__(self) -> bool:
        return self != type(self)()


def convert_what_fits(value: Any, kind: Any) -> Any:
    """Return the part of a JSON value that fits the type; UNSET if nothing does."""
    # Texts and lists that are too long are cut.
    try:
        with LEARNING:
            return msgspec.convert(value, kind)
    # Only damaged values take this slow path. Half a surrogate pair is a UnicodeEncodeError.
    except (msgspec.ValidationError, UnicodeEncodeError):
        return _fit(value, type_info(kind))


def _fit(value: Any, kind: Any) -> Any:
    """Return the part of a JSON value that fits a type of msgspec.inspect, or UNSET."""
    if isinstance(kind, inspect.UnionType):
        options = (_fit(value, option) for option in kind.types)
        return next((option for option in options if option is not UNSET), UNSET)
    # A union has no JSON type, but all other types have one.
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
        # bool is an int in Python, but not here. NaN is within no bounds.
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


# The Python type of a value in JSON, by the type of msgspec.inspect.
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
