"""Writes what the ranks print in whole lines into their log files and, with node and rank, onto the
terminal."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from contract.records import RANK
from contract.text import clean
from launcher.background import LOG, SpooledLog
from launcher.node.errors import BETWEEN
from launcher.terminal import Terminal

LAST_LINES = 20
LONGEST = 1 << 16  # bytes; a longer line is cut, so that memory for a line has a limit
STALLED = 5.0  # seconds that one write may take before the user is told
SHOWN = 4096  # characters of a line on the terminal and among the last lines; the log has all
HEAD = "Traceback (most recent call last)"
# The stack below a C++ error of torch.
FRAME = re.compile(r"frame #\d+: |Exception raised from .* \(most recent call first\):")


class Assembler:
    """Makes lines of the bytes of one (rank, stream), without text that a carriage return
    overwrote.

    It holds no more than LONGEST bytes between two calls, so the work grows only with the output,
    whether that has newlines or not.
    """

    def __init__(self):
        self._buffer = b""

    # A piece may end anywhere: within a line, within a character, or after a carriage return.
    def feed(self, data: bytes) -> tuple[list[str], str | None]:
        """Return the lines that are complete, and the unfinished one if it is a progress bar."""
        *complete, self._buffer = (self._buffer + data).split(b"\n")
        if b"\r" in self._buffer:
            # A progress bar: only its visible text is kept. A carriage return at the end has not
            # overwritten anything yet.
            pending = b"\r" if self._buffer.endswith(b"\r") else b""
            self._buffer = b"\r" + _visible(self._buffer) + pending
        *cut, self._buffer = _pieces(self._buffer)
        pieces = [piece for line in complete for piece in _pieces(_visible(line))] + cut
        lines = [clean(piece.decode(errors="replace")) for piece in pieces]
        bar = None
        if self._buffer[:1] == b"\r":
            bar = _visible(self._buffer).decode(errors="replace")
        return lines, bar

    def take_rest(self) -> str:
        """Return the unfinished line, and forget it."""
        text, self._buffer = _visible(self._buffer).decode(errors="replace"), b""
        return clean(text)


def _pieces(line: bytes) -> list[bytes]:
    """Cut a line into pieces of up to LONGEST bytes, between UTF-8 characters."""
    pieces = []
    while len(line) > LONGEST:
        end = LONGEST
        while end > LONGEST - 4 and line[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]


def _short(line: str) -> str:
    if len(line) <= SHOWN:
        return line
    return f"{line[:SHOWN]} ... ({len(line) - SHOWN} more characters in the log)"


def _visible(line: bytes) -> bytes:
    """Return what a terminal shows after the carriage returns of a line."""
    if b"\r" not in line:
        return line
    pieces = [piece for piece in line.split(b"\r") if piece]
    return pieces[-1] if pieces else b""


class TracebackFilter:
    """Reduces each traceback in a stream's lines to the line of its error, for the terminal.

    When one rank fails, every other rank loses its connection and prints fifty lines about that
    before anything is known of the cause. The rank's log has all of it.
    """

    def __init__(self):
        self._in_traceback = False

    def feed(self, lines: list[str]) -> list[str]:
        """Return the lines to show."""
        shown = []
        for line in lines:
            text = RANK.sub("", line)
            # Python's header, that of a data loader's error, and rich's box.
            if text.startswith((HEAD, "Original", "╭")) and HEAD in text:
                self._in_traceback = True
            elif not self._in_traceback:
                if not FRAME.match(text):
                    shown.append(line)
            elif text.strip() and text[0] not in " \t│╰" and not text.startswith(BETWEEN):
                # The first line that is not indented is the error.
                self._in_traceback = False
                shown.append(line)
        return shown


class RankLog:
    """Writes one rank's log file, shows its lines on the terminal, and keeps the last ones."""

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
        # The bar is removed before lines come and drawn again below them.
        if self._terminal and self._live_bar and lines:
            self._terminal.bar("")
        self._write_lines(stream, lines)
        if bar is not None and self._terminal and self._live_bar:
            self._terminal.bar(f"{self._label} {_short(bar)}")

    def _write_lines(self, stream: str, lines: list[str]) -> None:
        if not lines:
            return
        self._file.write(lines)
        cut = [_short(line) for line in lines]
        # They are shown with the failure, and blank lines would take the place of others.
        self.last_lines.extend(line for line in cut if line.strip())
        shown = self._filters.setdefault(stream, TracebackFilter()).feed(cut)
        if self._terminal and shown:
            self._terminal.lines([f"{self._label} {line}" for line in shown])

    @property
    def lost_lines(self) -> int:
        """Lines that the disk did not take since the last one that it took."""
        return self._file.lost_lines

    def close(self) -> None:
        """Write the unfinished lines and close the file."""
        for stream, assembler in self._streams.items():
            line = assembler.take_rest()
            if line.strip():  # a bar that was removed is blank
                self._write_lines(stream, [line])
        self._file.close()


class RunLogs:
    """Keeps the logs of all ranks of an attempt, and of each node's launch command (rank None). The
    terminal shows the ranks' lines if they are `shown`, and never launch's."""

    def __init__(
        self,
        folder: Path,
        terminal: Terminal,
        world_size: int,
        limit: int = LOG,
        shown: bool = True,
    ):
        self.folder, self._shown = folder, shown
        self._limit = limit
        self._disk_state = ""  # that was reported last
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
        """Say once when this machine's disk takes no more lines, and once when it does again."""
        stalled = self.terminal.spool.stalled() >= STALLED
        state = "lost" if any(log.lost_lines for log in self._logs.values()) else "late" * stalled
        if state == self._disk_state:
            return
        self._disk_state = state
        logs = f"lines of the logs in {self.folder}"
        states = {
            "lost": f"is full or hangs: {logs} are lost; the run continues: make room",
            "late": f"hangs: {logs} wait in memory; the run continues",
            "": "takes lines again; the logs name the number of lost lines",
        }
        self.terminal.say(f"the control node's disk {states[state]}")

    def close(self) -> None:
        """Close all logs. Returns when the disk has taken everything."""
        # What a machine printed last must not keep the logs of others from being written.
        for (host, _), log in self._logs.items():
            try:
                log.close()
            except Exception as error:
                self.terminal.say(
                    f"{host}: its last lines caused an error on the control node: {error!r:.200}"
                )
        self.terminal.spool.drain()
        self.terminal.bar("")
