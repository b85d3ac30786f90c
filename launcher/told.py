"""How the launcher's own sentences are printed."""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from typing import TextIO

from contract import defaults
from contract.text import clean
from tools import verbs

NAME = "tandem: "


def keep_machines(inventory: str) -> None:
    """From now on, the commands that this process and its children print name this list of
    machines."""
    if inventory == defaults.INVENTORY:
        os.environ.pop(verbs.MACHINES, None)
    else:
        os.environ[verbs.MACHINES] = inventory


def show(text: str, stream: TextIO) -> None:
    """Print a sentence of the launcher's own, wrapped where the stream is a terminal."""
    width = 0
    with contextlib.suppress(OSError, ValueError):
        width = os.get_terminal_size(stream.fileno()).columns
    print(*lines(text, width), sep="\n", file=stream, flush=True)


def lines(text: str, width: int) -> list[str]:
    """A sentence as the lines of a terminal so wide (0: in one line). No command is broken in two,
    so that it can be copied; a line that is indented is somebody's output, and stays as it is."""
    text = clean(verbs.keeping(text))
    if not width or text.startswith(" ") or "\n" in text:
        return (NAME + text).split("\n")
    held = re.sub(r"`[^`]+`", lambda match: match[0].replace(" ", "\0"), NAME + text)
    wrapped = textwrap.wrap(
        held, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\0", " ") for line in wrapped]
