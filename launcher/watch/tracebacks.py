"""Tracebacks of ranks as the terminal shows them: the error alone.

When one rank fails, every other rank loses its connection and prints fifty lines about that before
anything is known of the cause. The rank's log has all of it.
"""

from __future__ import annotations

import re

# torch begins each line of a rank's traceback with its rank.
PREFIX = re.compile(r"^\[rank\d+\]:\s?")
HEAD = "Traceback (most recent call last)"
BETWEEN = ("During handling of the above exception", "The above exception was the direct cause")
# What C++ errors of torch say about where they arose.
FRAME = re.compile(r"frame #\d+: |Exception raised from .* \(most recent call first\):")


class Folded:
    """One stream's lines; of a traceback only the error's own line is left."""

    def __init__(self):
        self._inside = False

    def feed(self, lines: list[str]) -> list[str]:
        return [line for line in lines if self._shown(line)]

    def _shown(self, line: str) -> bool:
        text = PREFIX.sub("", line)
        if text.startswith(HEAD):
            self._inside = True
            return False
        if not self._inside:
            return not FRAME.match(text)
        if not text.strip() or text[0] in " \t" or text.startswith(BETWEEN):
            return False
        self._inside = False
        return True
