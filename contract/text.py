"""Text for people: figures in words, spelled alike by all tools, and what machines say, made safe
for a terminal; and files that are read to a bounded size, written whole, or locked."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any, TextIO

# C0, DEL, C1, and the marks that turn the direction of text.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"
_BAD = _CONTROL + "\ud800-\udfff"
_SUSPECT = re.compile(f"[{_BAD}]")
# The halves U+DC80 to U+DCFF are bytes of a file name that is no UTF-8.
_UNSAFE_IN_CSV = re.compile(f"[\t\n{_CONTROL}\ud800-\udc7f\udd00-\udfff]")
# Where the list separator is a semicolon, a spreadsheet starts a cell at each one.
_FORMULA = re.compile(r"(?:^|(?<=;))(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_NUMBER = re.compile(r"[+-]?\d*\.?\d+(?:[eE][+-]?\d+)?", re.ASCII)
_COLOUR = r"\x1b\[[0-9;:]{0,40}m"
_SEQUENCE = re.compile(
    rf"(?P<colour>{_COLOUR})"
    r"|\x1b[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # a string for the terminal
    r"|(?:\x1b\[|\x9b)[0-?]{0,40}[ -/]{0,9}[@-~]"  # another command
    r"|\x1b[ -/]{0,9}[0-~]"
    rf"|[{_BAD}]"
)
RESET = "\x1b[0m"
_ASCII = bytes(range(32, 127))
# Of a YAML document, characters and parts: its reader takes half a kilobyte for each part.
SHORT, PARTS = 1 << 16, 2000


def pluralize(number: int, thing: str) -> str:
    """`1 step`, `2 steps`, `3 classes`, `50,000 images`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("s") else "s")


def seconds(value: float | None) -> str:
    """A duration: 85 ms, 1.41 s, 61 s, 4 min 5 s, 3 h 12 min, 2 d 4 h."""
    if value is None:
        return "unknown"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(count: float) -> str:
    """Bytes: 512 B, 44.7 MB, 153 MB, 1.3 GB (powers of ten)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def three_digits(value: float) -> str:
    """Three significant digits at most, never an exponent: 153, 44.7, 1.23, 0.04."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def millions(number: float) -> str:
    """A large count: 25.6 M, 0.96 M."""
    return f"{three_digits(number / 1e6)} M"


def percent(fraction: float) -> str:
    """A fraction in [0, 1] as whole percent; small ones are not rounded to nothing."""
    return "< 1 %" if 0 < fraction < 0.005 else f"{fraction:.0%}".replace("%", " %")


def link_speed(mbit: float) -> str:
    """The nominal speed of a link: 100 Mbit/s, 1 Gbit/s, 2.5 Gbit/s."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def clean(text: str) -> str:
    """The text without anything that a terminal would obey: of control characters and sequences
    only tabs, newlines and colours pass, and a colour ends with its line. Others set the window's
    title, write to the clipboard, move the cursor over earlier output, or make the terminal type an
    answer."""
    if not _SUSPECT.search(text):
        return text
    return "\n".join(map(_line, text.split("\n")))


def _line(text: str) -> str:
    kept = _SEQUENCE.sub(lambda match: match["colour"] or "", text)
    return kept + RESET if "\x1b" in kept and not kept.endswith(RESET) else kept


def drop_controls(text: str) -> str:
    """The text without control characters, colours included; tabs and newlines stay."""
    return _SUSPECT.sub("", text)


def csv_cell(name: str) -> str:
    """A name for a cell of a CSV table. What a spreadsheet would take for a formula gets an
    apostrophe before it, but a plain number stays; a control character is written as `\\x1b`, and
    bytes that are no UTF-8 stay as they are."""
    shown = _UNSAFE_IN_CSV.sub(lambda match: ascii(match[0])[1:-1], name)
    return shown if _NUMBER.fullmatch(shown) else _FORMULA.sub("'", shown)


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file whole or not at all, even if power fails: readers may look at any moment, and
    no link that lies in its place is followed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(made, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def open_lock(path: Path) -> TextIO:
    """A file to lock, its owner's alone, as it is: whoever can read a file can lock it. Follows no
    link, since its folder may be somebody else's."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")


def read_text(path: str | Path, most: int = 8 << 20) -> str:
    """Read a UTF-8 file of at most `most` bytes. Raises OSError, and ValueError as read_bytes or if
    it is no text."""
    return read_bytes(path, most).decode("utf-8")


def read_bytes(path: str | Path, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises OSError, and ValueError for a file that is larger
    or no regular file: a named pipe would be waited for."""
    content = bytearray()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        while part := file.read(1 << 16):
            content += part
            if len(content) > most:
                raise ValueError(f"it has more than {most >> 10:,} KiB")
    return bytes(content)


def decode_text(content: bytes, encoding: str) -> str:
    """Decode what others have written. Raises ValueError, also for encodings in which plain letters
    are other ones: to decode some of them takes minutes."""
    try:
        if _ASCII.decode(encoding) != _ASCII.decode():
            raise ValueError(f"{encoding} is not supported")
        return content.decode(encoding)
    except LookupError as error:
        raise ValueError(str(error)) from None


def read_yaml(text: str) -> Any:
    """What a YAML document of at most SHORT characters says, without the aliases by which some
    lines fill any memory (`<<: [*a, *a]`), and of at most PARTS values, keys, beginnings and ends.
    Raises ValueError, RecursionError and yaml.YAMLError, and ImportError where no YAML reader is.
    """
    import yaml  # not where the launcher alone is copied to

    if len(text) > SHORT:
        raise ValueError(f"it has more than {SHORT >> 10} KiB")
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it repeats a part by an alias, *{event.anchor:.40}: write it out")
        if number > PARTS:
            raise ValueError(f"it has more than {PARTS:,} parts")
    return yaml.safe_load(text)
