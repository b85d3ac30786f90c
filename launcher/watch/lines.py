"""Writes the output of ranks into their log files, and onto the terminal with node and rank.

watch.py feeds the bytes that guards send. background.py writes the files, so that a slow disk does
not hold up the event loop.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from contract.records import RANK
from contract.text import clean
from launcher.background import LOG_BYTES, SpooledLog
from launcher.node.errors import BETWEEN
from launcher.terminal import Terminal

LAST_LINES = 20  # of a rank that are kept for a failure report
LINE_PIECE_BYTES = 1 << 16  # a longer line is cut into pieces, so that a line's memory has a limit
STALL_SECONDS = 5.0  # if a write takes longer, the terminal reports a slow disk
SHOWN_CHARACTERS = 4096  # of a line, on the terminal and in last_lines; the log has the whole line
TRACEBACK_HEAD = "Traceback (most recent call last)"
# Below an error in C++, torch prints `Exception raised from ... (most recent call first):` and then
# lines such as `frame #3: c10d::ProcessGroupGloo::...`.
STACK_FRAME = re.compile(r"frame #\d+: |Exception raised from .* \(most recent call first\):")


class Assembler:
    """Makes lines of the bytes that one rank writes to stdout or stderr, without text that a
    carriage return overwrote.

    An Assembler keeps at most LINE_PIECE_BYTES between two calls. Therefore output without newlines
    takes no more time per byte than other output.
    """

    def __init__(self):
        self._buffer = b""

    # A piece may end anywhere: within a line, within a character, or after a carriage return.
    def feed(self, data: bytes) -> tuple[list[str], str | None]:
        """Return the complete lines, and the unfinished line if it is a progress bar, else None."""
        *complete, self._buffer = (self._buffer + data).split(b"\n")
        if b"\r" in self._buffer:
            # This is a progress bar: only its visible text is kept, behind a carriage return as a
            # mark. A carriage return at the end of the bytes has not overwritten anything yet.
            pending = b"\r" if self._buffer.endswith(b"\r") else b""
            self._buffer = b"\r" + _visible(self._buffer) + pending
        *cut, self._buffer = _split_line(self._buffer)
        pieces = [piece for line in complete for piece in _split_line(_visible(line))] + cut
        lines = [clean(piece.decode(errors="replace")) for piece in pieces]
        bar = None
        if self._buffer[:1] == b"\r":
            bar = _visible(self._buffer).decode(errors="replace")
        return lines, bar

    def take_rest(self) -> str:
        """Return the unfinished line, and empty the buffer."""
        text, self._buffer = _visible(self._buffer).decode(errors="replace"), b""
        return clean(text)


def _split_line(line: bytes) -> list[bytes]:
    """Cut a line into pieces of up to LINE_PIECE_BYTES bytes, between UTF-8 characters."""
    pieces = []
    while len(line) > LINE_PIECE_BYTES:
        end = LINE_PIECE_BYTES
        # All bytes of a UTF-8 character except the first begin with the bits 10.
        while end > LINE_PIECE_BYTES - 4 and line[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]


def _shorten(line: str) -> str:
    """Cut a line to SHOWN_CHARACTERS, and say how many characters only the log has."""
    if len(line) <= SHOWN_CHARACTERS:
        return line
    return (
        f"{line[:SHOWN_CHARACTERS]} ... ({len(line) - SHOWN_CHARACTERS} more characters in the log)"
    )


def _visible(line: bytes) -> bytes:
    """Return the part of a line that a terminal shows: the text after the last carriage return that
    text follows. `10%\\r 20%\\r` becomes ` 20%`."""
    if b"\r" not in line:
        return line
    pieces = [piece for piece in line.split(b"\r") if piece]
    return pieces[-1] if pieces else b""


class TracebackFilter:
    """Reduces each traceback in a stream to the line with its error, for the terminal.

    When one rank fails, every other rank loses its connection and prints a traceback of fifty
    lines. These would hide the cause on the terminal. The rank's log has the whole traceback.
    """

    def __init__(self):
        self._in_traceback = False

    def feed(self, lines: list[str]) -> list[str]:
        """Return the lines of these that the terminal should show."""
        shown = []
        for line in lines:
            text = RANK.sub("", line)
            # A traceback begins with TRACEBACK_HEAD in Python, after `Original ` in the error of a
            # data loader, and after `╭` in a box that rich draws.
            if text.startswith((TRACEBACK_HEAD, "Original", "╭")) and TRACEBACK_HEAD in text:
                self._in_traceback = True
            elif not self._in_traceback:
                if not STACK_FRAME.match(text):
                    shown.append(line)
            elif text.strip() and text[0] not in " \t│╰" and not text.startswith(BETWEEN):
                # The first line that is neither indented nor part of a box has the error.
                self._in_traceback = False
                shown.append(line)
        return shown


class RankLog:
    """Writes one rank's log file, shows the rank's lines on the terminal, and keeps the last lines
    for a failure report."""

    def __init__(self, file: SpooledLog, label: str, terminal: Terminal | None, live_bar: bool):
        self._file = file
        self._label = label
        self._terminal = terminal
        self._live_bar = live_bar
        self._streams: dict[str, Assembler] = {}
        self._filters: dict[str, TracebackFilter] = {}
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)

    def feed(self, stream: str, data: bytes) -> None:
        """Add what the rank wrote to a stream, "stdout" or "stderr"."""
        lines, bar = self._streams.setdefault(stream, Assembler()).feed(data)
        # A bar stays below all lines, so it is removed before new lines are shown.
        if self._terminal and self._live_bar and lines:
            self._terminal.bar("")
        self._write_lines(stream, lines)
        if bar is not None and self._terminal and self._live_bar:
            self._terminal.bar(f"{self._label} {_shorten(bar)}")

    def _write_lines(self, stream: str, lines: list[str]) -> None:
        """Write lines to the log, and show them on the terminal."""
        if not lines:
            return
        self._file.write(lines)
        cut = [_shorten(line) for line in lines]
        # Blank lines would displace lines that explain a failure.
        self.last_lines.extend(line for line in cut if line.strip())
        shown = self._filters.setdefault(stream, TracebackFilter()).feed(cut)
        if self._terminal and shown:
            self._terminal.lines([f"{self._label} {line}" for line in shown])

    @property
    def lost_lines(self) -> int:
        """The number of lines that were lost since the disk last accepted a line."""
        return self._file.lost_lines

    def close(self) -> None:
        """Write the unfinished lines and close the file."""
        for stream, assembler in self._streams.items():
            line = assembler.take_rest()
            if line.strip():  # a program clears its bar by overwriting it with blanks
                self._write_lines(stream, [line])
        self._file.close()


class RunLogs:
    """Keeps the logs of all ranks of an attempt, and of each node's launch command (rank None). If
    `shown`, the terminal shows the lines of ranks. Lines of launch commands never appear there."""

    def __init__(
        self,
        folder: Path,
        terminal: Terminal,
        world_size: int,
        limit: int = LOG_BYTES,
        shown: bool = True,
    ):
        self.folder, self._shown = folder, shown
        self._limit = limit
        self._disk_state = ""  # the state that was reported last, a key of report_disk's states
        self.terminal = terminal
        self._width = len(str(max(0, world_size - 1)))
        self._logs: dict[tuple[str, int | None], RankLog] = {}

    def feed(self, host: str, rank: int | None, stream: str, data: bytes) -> None:
        """Add what a rank wrote to a stream to its log."""
        self.get_log(host, rank).feed(stream, data)

    def get_log(self, host: str, rank: int | None) -> RankLog:
        """Return a rank's log; the first call opens it."""
        if (host, rank) not in self._logs:
            name = "launch.log" if rank is None else f"rank{rank}.log"
            self._logs[host, rank] = RankLog(
                SpooledLog(self.folder / "nodes" / host / name, self._limit, self.terminal.spool),
                f"[{host} {rank:>{self._width}}]" if rank is not None else f"[{host}]",
                self.terminal if self._shown and rank is not None else None,
                live_bar=rank == 0,  # the terminal has room for one bar
            )
        return self._logs[host, rank]

    def report_disk(self) -> None:
        """Report once when this machine's disk accepts no lines, and once when it does again."""
        state = "lost" if any(log.lost_lines for log in self._logs.values()) else ""
        if not state and self.terminal.spool.stalled() >= STALL_SECONDS:
            state = "late"
        if state == self._disk_state:
            return
        self._disk_state = state
        logs = f"lines of the logs in {self.folder}"
        states = {  # {state: how a sentence about the disk ends}
            "lost": f"is full or hangs: {logs} are lost; the run continues: make room",
            "late": f"hangs: {logs} wait in memory; the run continues",
            "": "takes lines again; the logs name the number of lost lines",
        }
        self.terminal.say(f"the control node's disk {states[state]}")

    def close(self) -> None:
        """Close all logs. Return when everything has been written to the disk."""
        # An error in the last lines of one rank must not leave the logs of other ranks unwritten.
        for (host, _), log in self._logs.items():
            try:
                log.close()
            except Exception as error:
                self.terminal.say(
                    f"{host}: its last lines caused an error on the control node: {error!r:.200}"
                )
        self.terminal.spool.drain()
        self.terminal.bar("")
