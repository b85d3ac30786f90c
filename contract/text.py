"""Text for people: numbers with their nouns, and what machines say, made safe for a terminal; and
text from files, of bounded size."""

from __future__ import annotations

import re
from pathlib import Path

# C0, DEL, C1, halves of surrogates, and the marks that turn the direction of text.
_BAD = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u200e\u200f\u061c"
    "\u202a-\u202e\u2066-\u2069"
)
_SUSPECT = re.compile(f"[{_BAD}]")
_COLOUR = r"\x1b\[[0-9;:]{0,40}m"
_SEQUENCE = re.compile(
    rf"(?P<colour>{_COLOUR})"
    r"|\x1b[\]PX^_][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # a string for the terminal
    r"|(?:\x1b\[|\x9b)[0-?]{0,40}[ -/]{0,9}[@-~]"  # another command
    r"|\x1b[ -/]{0,9}[0-~]"
    rf"|[{_BAD}]"
)
RESET = "\x1b[0m"


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`, `3 classes`, `50,000 images`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("s") else "s")


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


def read_text(path: str | Path, most: int = 8 << 20) -> str:
    """The text of a UTF-8 file of at most `most` bytes. Raises OSError, and ValueError for a file
    that is larger, or no text."""
    content = bytearray()
    with Path(path).open("rb") as file:
        while part := file.read(1 << 16):
            content += part
            if len(content) > most:
                raise ValueError(f"it has more than {most >> 10:,} KiB")
    return content.decode("utf-8")
