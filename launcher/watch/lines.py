"""What the ranks print goes in whole lines into their log files and, with node and rank, onto the
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
LONGEST = 1 << 16  # bytes; a longer line is cut into several, so that none has to be waited for
STALLED = 5.0  # seconds that one write may take before the user is told
SHOWN = 4096  # characters of a line on the terminal and among the last lines; the log has all
HEAD = "Traceback (most recent call last)"
# What C++ errors of torch say about where they arose.
FRAME = re.compile(r"frame #\d+: |Exception raised from .* \(most recent call first\):")


class Assembler:
    """Makes lines of the bytes of one (rank, stream); text that a carriage return overwrote is not
    kept.

    It holds no more than LONGEST bytes between two calls, so the work grows with the output alone,
    whether that has newlines or not.
    """

    def __init__(self):
        self._buffer = b""

    def feed(self, data: bytes) -> tuple[list[str], str | None]:
        """Return the lines that are complete, and the unfinished one if it is a progress bar."""
        *whole, self._buffer = (self._buffer + data).split(b"\n")
        if b"\r" in self._buffer:
            # The rest is kept short. A carriage return at its end has not overwritten anything yet.
            pending = b"\r" if self._buffer.endswith(b"\r") else b""
            self._buffer = b"\r" + _visible(self._buffer) + pending
        *cut, self._buffer = _pieces(self._buffer)
        pieces = [piece for line in whole for piece in _pieces(_visible(line))] + cut
        lines = [clean(piece.decode(errors="replace")) for piece in pieces]
        bar = None
        if self._buffer[:1] == b"\r":
            bar = _visible(self._buffer).decode(errors="replace")
        return lines, bar

    def rest(self) -> str:
        text, self._buffer = _visible(self._buffer).decode(errors="replace"), b""
        return clean(text)


def _pieces(line: bytes) -> list[bytes]:
    """A line in pieces of up to LONGEST bytes, no UTF-8 character cut in two."""
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
    """What a terminal shows after the carriage returns of a line."""
    if b"\r" not in line:
        return line
    pieces = [piece for piece in line.split(b"\r") if piece]
    return pieces[-1] if pieces else b""


class Folded:
    """One stream's lines; of a traceback only the error's own line is left.

    When one rank fails, every other rank loses its connection and prints fifty lines about that
    before anything is known of the cause. The rank's log has all of it.
    """

    def __init__(self):
        self._inside = False

    def feed(self, lines: list[str]) -> list[str]:
        return [line for line in lines if self._shown(line)]

    def _shown(self, line: str) -> bool:
        text = RANK.sub("", line)
        if text.startswith((HEAD, "Original", "╭")) and HEAD in text:
            self._inside = True
            return False
        if not self._inside:
            return not FRAME.match(text)
        if not text.strip() or text[0] in " \t│╰" or text.startswith(BETWEEN):
            return False
        self._inside = False
        return True


class RankLog:
    """One rank's log file, its last lines, and what it shows on the terminal."""

    def __init__(self, file: SpooledLog, label: str, terminal: Terminal | None, live_bar: bool):
        self._file = file
        self._label = label
        self._terminal = terminal
        self._live_bar = live_bar
        self._streams: dict[str, Assembler] = {}
        self._folded: dict[str, Folded] = {}
        self.last: deque[str] = deque(maxlen=LAST_LINES)

    def feed(self, stream: str, data: bytes) -> None:
        lines, bar = self._streams.setdefault(stream, Assembler()).feed(data)
        if self._terminal and self._live_bar and lines:
            self._terminal.bar("")
        self._lines(stream, lines)
        if bar is not None and self._terminal and self._live_bar:
            self._terminal.bar(f"{self._label} {_short(bar)}")

    def _lines(self, stream: str, lines: list[str]) -> None:
        if not lines:
            return
        self._file.write(lines)
        cut = [_short(line) for line in lines]
        self.last.extend(line for line in cut if line.strip())
        shown = self._folded.setdefault(stream, Folded()).feed(cut)
        if self._terminal and shown:
            self._terminal.lines([f"{self._label} {line}" for line in shown])

    @property
    def lost(self) -> int:
        return self._file.lost

    def close(self) -> None:
        for stream, assembler in self._streams.items():
            rest = assembler.rest()
            if rest.strip():  # a bar that was removed is blank
                self._lines(stream, [rest])
        self._file.close()


class RunLogs:
    """The logs of all ranks of an attempt, and of each node's launch command (rank None), which is
    not shown on the terminal; neither are the ranks, unless they are `shown`."""

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
        self._reported = ""  # what was last said about the disk
        self.terminal = terminal
        self._width = len(str(max(0, world_size - 1)))
        self._logs: dict[tuple[str, int | None], RankLog] = {}

    def feed(self, host: str, rank: int | None, stream: str, data: bytes) -> None:
        self.of(host, rank).feed(stream, data)

    def of(self, host: str, rank: int | None) -> RankLog:
        if (host, rank) not in self._logs:
            name = "launch.log" if rank is None else f"rank{rank}.log"
            self._logs[host, rank] = RankLog(
                SpooledLog(self.folder / "nodes" / host / name, self._limit, self.terminal.spool),
                f"[{host} {rank:>{self._width}}]" if rank is not None else f"[{host}]",
                self.terminal if self._shown and rank is not None else None,
                live_bar=rank == 0,
            )
        return self._logs[host, rank]

    def report_disk(self) -> None:
        """Say once when this machine's disk takes no more lines, and once when it does again."""
        stalled = self.terminal.spool.stalled() >= STALLED
        state = "lost" if any(log.lost for log in self._logs.values()) else "late" * stalled
        if state == self._reported:
            return
        self._reported = state
        logs = f"lines of the logs in {self.folder}"
        states = {
            "lost": f"is full or takes nothing: {logs} are left out; the run goes on: make room",
            "late": f"takes nothing: {logs} wait in memory; the run goes on",
            "": "takes lines again; where some are missing, the logs say how many",
        }
        self.terminal.say(f"this machine's disk {states[state]}")

    def close(self) -> None:
        """Close all logs. Returns when the disk has taken everything."""
        for (host, _), log in self._logs.items():
            try:
                log.close()
            except Exception as error:
                self.terminal.say(f"{host}: its last lines ended in an error here: {error!r:.200}")
        self.terminal.spool.drain()
        self.terminal.bar("")
