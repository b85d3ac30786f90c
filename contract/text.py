"""Write figures for people, in the same way in all tools. Make text of machines safe for a terminal
or a table. Read files up to a size, replace files atomically, and lock files."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any, TextIO

# Characters in a class of a regex: C0, DEL, C1, and the marks that change the direction of text.
_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069"
_UNPRINTABLE = _CONTROL + "\ud800-\udfff"
_HAS_UNPRINTABLE = re.compile(f"[{_UNPRINTABLE}]")
# The surrogates U+DC80 to U+DCFF are bytes of a file name that is not UTF-8. They stay.
_UNSAFE_IN_CSV = re.compile(f"[\t\n{_CONTROL}\ud800-\udc7f\udd00-\udfff]")
# The start of a cell before =, +, -, @ or a wide form of these. If the list separator is a
# semicolon, a spreadsheet starts a cell after each semicolon.
_FORMULA = re.compile(r"(?:^|(?<=;))(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_NUMBER = re.compile(r"[+-]?\d*\.?\d+(?:[eE][+-]?\d+)?", re.ASCII)
_COLOUR = r"\x1b\[[0-9;:]{0,40}m"
_SEQUENCE = re.compile(
    rf"(?P<colour>{_COLOUR})"
    r"|\x1b[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # a string for the terminal
    r"|(?:\x1b\[|\x9b)[0-?]{0,40}[ -/]{0,9}[@-~]"  # another command
    r"|\x1b[ -/]{0,9}[0-~]"
    rf"|[{_UNPRINTABLE}]"
)
RESET = "\x1b[0m"
_ASCII = bytes(range(32, 127))
# The limits of a YAML document: characters, and parts. Its reader needs half a kilobyte per part.
SHORT, PARTS = 1 << 16, 2000


def pluralize(number: int, thing: str) -> str:
    """Return text like `1 step`, `2 steps`, `3 classes`, `50,000 images`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("s") else "s")


def seconds(value: float | None) -> str:
    """Return a duration: 85 ms, 1.41 s, 61 s, 4 min 5 s, 3 h 12 min, 2 d 4 h."""
    if value is None:
        return "unknown"
    if value < 0:
        return f"-{seconds(-value)}"
    if value < 0.0995:  # a larger value would be rounded to 100 ms
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    rounded = round(value)
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    if rounded < 48 * 3600:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600} h"


def size(count: float) -> str:
    """Return a number of bytes: 512 B, 44.7 MB, 153 MB, 1.3 GB (powers of ten)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{three_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def three_digits(value: float) -> str:
    """Return at most three significant digits, never an exponent: 153, 44.7, 1.23, 0.04."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def millions(number: float) -> str:
    """Return a large count: 25.6 M, 0.96 M."""
    return f"{three_digits(number / 1e6)} M"


def percent(fraction: float) -> str:
    """Return a fraction in [0, 1] as whole percent; a small one is `< 1 %` instead of 0 %."""
    return "< 1 %" if 0 < fraction < 0.005 else f"{fraction:.0%}".replace("%", " %")


def link_speed(mbit: float) -> str:
    """Return the nominal speed of a link: 100 Mbit/s, 1 Gbit/s, 2.5 Gbit/s."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def clean(text: str) -> str:
    """Remove control characters and sequences, but keep tabs, newlines, and colours in a line."""
    # The removed sequences set the window's title, write to the clipboard, move the cursor over
    # earlier output, or make the terminal type an answer.
    if not _HAS_UNPRINTABLE.search(text):
        return text
    lines = [_SEQUENCE.sub(lambda match: match["colour"] or "", line) for line in text.split("\n")]
    return "\n".join(
        line + RESET if "\x1b" in line and not line.endswith(RESET) else line for line in lines
    )


def drop_controls(text: str) -> str:
    """Remove control characters and colours; tabs and newlines stay."""
    return _HAS_UNPRINTABLE.sub("", text)


def csv_cell(name: str) -> str:
    """Return a name for a cell of a CSV table. An apostrophe keeps a spreadsheet from running a
    formula; a plain number gets no apostrophe. A control character becomes text like `\\x1b`, and
    bytes that are not UTF-8 stay."""
    shown = _UNSAFE_IN_CSV.sub(lambda match: ascii(match[0])[1:-1], name)
    return shown if _NUMBER.fullmatch(shown) else _FORMULA.sub("'", shown)


def write_whole(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace a file completely or not at all, even if the power fails or another process reads the
    file meanwhile. A link in the file's place is replaced, not followed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # O_EXCL follows no link that another user may have put here, but needs a free name.
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # before the rename, so that the name never has half a file
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def open_lock(path: Path) -> TextIO:
    """Open a file to lock it, without changing the file. Only the owner can open the file, because
    everybody who can read a file can lock it. Follows no link, which another user may have put
    there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # O_TRUNC would empty the file
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # the file of another user
        os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")


def read_text(path: str | Path, max_bytes: int = 8 << 20) -> str:
    """Read a UTF-8 file of at most `max_bytes`. Raises OSError, and ValueError as read_bytes."""
    return read_bytes(path, max_bytes).decode("utf-8")


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Read a file of at most `max_bytes`. Raises OSError, and ValueError for a file that is larger
    or not regular, such as a named pipe, which would block."""
    content = bytearray()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        # The file's size is no limit: a file may grow, and files of /proc have a size of 0.
        while chunk := file.read(1 << 16):
            content += chunk
            if len(content) > max_bytes:
                raise ValueError(f"it has more than {max_bytes >> 10:,} KiB")
    return bytes(content)


def decode_text(content: bytes, encoding: str) -> str:
    """Decode bytes in an encoding that their source names. Raises ValueError, also for encodings in
    which ASCII letters mean other letters: some of these take minutes to decode."""
    try:
        if _ASCII.decode(encoding) != _ASCII.decode():
            raise ValueError(f"{encoding} is not supported")
        return content.decode(encoding)
    except LookupError as error:
        raise ValueError(str(error)) from None


def read_yaml(text: str) -> Any:
    """Read a YAML document of at most SHORT characters and PARTS parts: values, keys, begins and
    ends. Rejects aliases, because a few lines of them (`<<: [*a, *a]`) fill any memory. Raises
    ValueError, RecursionError and yaml.YAMLError, and ImportError without a YAML reader."""
    import yaml  # a machine with only the launcher's files may lack it

    if len(text) > SHORT:
        raise ValueError(f"it has more than {SHORT >> 10} KiB")
    # The parser's events need little memory; only safe_load expands aliases.
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it repeats a part by an alias, *{event.anchor:.40}: write it out")
        if number > PARTS:
            raise ValueError(f"it has more than {PARTS:,} parts")
    return yaml.safe_load(text)
