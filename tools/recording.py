"""Records a command on a terminal as a moving SVG: README's is made by

    python -m tools.recording docs/images/demo.svg make demo

It shows what was printed, letter by letter, without colours. Waits are cut to a second or so; what
comes at once moves by, some lines at a time.
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import struct
import sys
import termios
import time
from pathlib import Path

COLUMNS, ROWS = 80, 24
WIDE, HIGH, EDGE = 8.0, 18, 14  # pixels of a letter, a line, the frame
LONGEST, SHORTEST, LAST = 1.2, 0.15, 8.0  # seconds that a picture stays, and the last one
SCROLL = 3  # lines that come at once
TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|\x1b")


class Screen:
    """The contents of a terminal; of its commands those that the launcher and make use."""

    def __init__(self) -> None:
        self.lines, self.column = [""], 0

    def feed(self, text: str) -> None:
        for _, command, control, letters in TOKEN.findall(text):
            if command == "K":
                self.lines[-1] = self.lines[-1][: self.column]
            elif control == "\r":
                self.column = 0
            elif control:
                self._next()
            for letter in letters:
                self._put(letter)

    def _put(self, letter: str) -> None:
        if self.column == COLUMNS:
            self._next()
            self.column = 0
        line = self.lines[-1].ljust(self.column)
        self.lines[-1] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1

    def _next(self) -> None:
        self.lines.append("")

    def picture(self) -> tuple[str, ...]:
        return tuple(line.rstrip() for line in self.lines[-ROWS:])


def film(argv: list[str]) -> tuple[list[tuple[float, tuple[str, ...]]], int]:
    """Run a command; its pictures, each with the second at which it was shown, and how it ended."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(argv[0], argv)  # noqa: S606 (without a shell on purpose)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    screen, start = Screen(), time.monotonic()
    screen.feed(f"$ {' '.join(argv)}\r\n")
    pictures, rest = [(0.0, screen.picture())], b""
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        *complete, rest = (rest + data).rpartition(b"\n" if b"\n" in rest + data else b"\r")
        lines = b"".join(complete).decode(errors="replace").splitlines(keepends=True)
        now = time.monotonic() - start
        for first in range(0, len(lines), SCROLL):
            screen.feed("".join(lines[first : first + SCROLL]))
            if screen.picture() != pictures[-1][1]:
                pictures.append((now, screen.picture()))
    screen.feed(rest.decode(errors="replace"))
    pictures.append((time.monotonic() - start, screen.picture()))
    return pictures, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def svg(pictures: list[tuple[float, tuple[str, ...]]]) -> str:
    """The pictures side by side, of which one after the other moves into view; the last where
    somebody's system asks for less motion."""
    times = [when for when, _ in pictures]
    gaps = [after - when for when, after in zip(times, times[1:])]
    stays = [*(min(LONGEST, max(SHORTEST, gap)) for gap in gaps), LAST]
    total, width = sum(stays), COLUMNS * WIDE
    numbers: dict[str, int] = {}
    shots, steps, at = [], [], 0.0
    for number, (stay, (_, lines)) in enumerate(zip(stays, pictures)):
        steps.append(f"{100 * at / total:.3f}%{{transform:translateX({-number * width:g}px)}}")
        at += stay
        shots += [
            f'<use href="#t{numbers.setdefault(line, len(numbers))}" '
            f'x="{number * width:g}" y="{(row + 1) * HIGH}"/>'
            for row, line in enumerate(lines)
            if line
        ]
    texts = [
        f'<text id="t{number}" textLength="{len(line) * WIDE:g}">{html.escape(line)}</text>'
        for line, number in numbers.items()
        if line
    ]
    wide, high = width + 2 * EDGE, ROWS * HIGH + 2 * EDGE
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {high}">
<style>text{{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#d8dee9;white-space:pre}}
@keyframes film{{{"".join(steps)}}}
.film{{animation:film {total:.1f}s steps(1,end) infinite}}
@media(prefers-reduced-motion:reduce){{.film{{animation:none;\
transform:translateX({-(len(pictures) - 1) * width:g}px)}}}}</style>
<defs>{"".join(texts)}</defs><rect width="100%" height="100%" rx="8" fill="#1b1f27"/>
<svg x="{EDGE}" y="{EDGE}" width="{width:g}" height="{ROWS * HIGH + 6}"><g class="film">
{"".join(shots)}</g></svg></svg>
"""


def main(argv: list[str]) -> int:
    if len(argv) < 2:
        print("tandem: python -m tools.recording FILE.svg COMMAND ...", file=sys.stderr)
        return 2
    pictures, code = film(argv[1:])
    Path(argv[0]).write_text(svg(pictures), encoding="utf-8")
    print(f"{argv[0]}: {len(pictures)} pictures")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
