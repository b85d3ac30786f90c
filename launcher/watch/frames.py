"""What the guard sends, as the control machine reads it (docs/guard-protocol.md)."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from contract import validate
from contract.validate import Each, Invalid, Match, One

LARGEST = 1 << 20  # bytes of a frame without its raw bytes, and of these; our guard splits
GREETING = 1 << 20  # bytes before hello: a .bashrc that prints more never gets to a guard
KEPT = 4096  # bytes kept of what is not a frame, for the person who asks why

REASONS = ("finished", "failed", "stopped", "killed", "busy", "lease", "eof", "guard")
SIGNAL = (Match(r"SIG[A-Z0-9+-]{1,20}|signal \d{1,3}"), None)
PROCESSES = [{"pid": int, "command": str}]
# What our guard sends once at most: these, and for each of its ranks the two with a rank.
ONCE = ("hello", "started", "worker", "worker_exit", "exit")


def shapes(ranks: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """What the fields of each frame may be, from a node that has these ranks."""
    rank = One(frozenset(ranks))
    code = (One(range(256)), None)
    worker = {"exit_code": code, "signal": SIGNAL, "exception": (str, None)}
    return {
        "hello": {"protocol": One((1,)), "way": One(("service", "wardens"))},
        "started": {"pid": int, "mono_start": float},
        "worker": {"rank": rank, "pid": int},
        "log": {
            "rank": (rank, None),
            "stream": One(("stdout", "stderr")),
            "bytes": One(range(1, LARGEST + 1)),
        },
        "beat": {"unix": float, "running": [rank], "disk_free": (int, None)},
        "worker_exit": {"rank": rank, "first": bool, **worker},
        "trouble": {"what": str, "message": str},
        "exit": {
            "reason": One(REASONS),
            "message": (str, None),
            "exit_code": code,
            "signal": SIGNAL,
            "mono_start": float,
            "mono_end": float,
            "workers": Each(worker),
            "ended": PROCESSES,
            "left": PROCESSES,
        },
    }


class Frames:
    """Cuts a byte stream into frames, however it was split on the way.

    A frame that our guard never sends raises Invalid: the rest of the stream means nothing.
    """

    def __init__(self, ranks: tuple[int, ...]):
        self._shapes = shapes(ranks)
        # What came before hello: a .bashrc's greeting, or why there is no guard.
        self.said_before = b""
        self._before = 0  # bytes of it
        self._buffer = bytearray()
        self._looked = 0  # bytes of the buffer known to contain no newline
        self._greeted = False
        self._sent: set[tuple[str, int | None]] = set()  # of ONCE, with their ranks
        self._waiting: dict[str, Any] | None = None  # a frame whose raw bytes are not all here

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Add bytes; yield the frames that are now complete, each with its raw bytes. After those
        that precede a bad one, raises Invalid."""
        self._buffer += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        while True:
            if self._waiting is not None:
                size = self._waiting["bytes"]
                if len(self._buffer) < size:
                    return None
                frame, payload = self._waiting, bytes(self._buffer[:size])
                del self._buffer[:size]
                self._waiting = None
                return frame, payload
            line = self._line()
            if line is None:
                return None
            found = self._frame(line)
            if found is None:
                self._keep(line + b"\n")
            elif found["type"] == "log":
                self._waiting = found
            else:
                return found, b""

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n", self._looked)
        if end < 0:
            self._looked = len(self._buffer)
            if self._looked > LARGEST:
                self._keep(bytes(self._buffer[:KEPT]))
                raise Invalid(f"a line of more than {LARGEST >> 20} MiB")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._looked = 0
        return line

    def _frame(self, line: bytes) -> dict[str, Any] | None:
        """The frame in a line, checked; None for a line that is not a frame."""
        if not line.startswith(b"{"):  # a flood of other lines costs little
            return None
        try:
            found = validate.parse(line)
        except Invalid:
            return None
        if not isinstance(found, dict) or "type" not in found:
            return None
        kind = found["type"]
        if not self._greeted and kind != "hello":
            return None
        if not isinstance(kind, str) or kind not in self._shapes:
            raise Invalid(f"a frame of type {reprlib.repr(kind)}")
        frame = {"type": kind, **validate.check(found, self._shapes[kind], f"{kind} frame")}
        self._greeted = True
        self._count(frame)
        return frame

    def _count(self, frame: dict[str, Any]) -> None:
        """Refuse what comes again, however often, and what comes after the last frame."""
        kind, rank = frame["type"], frame.get("rank")
        whose = "" if rank is None else f" of rank {rank}"
        if ("exit", None) in self._sent:
            raise Invalid(f"after its exit frame one of type {kind!r}")
        if (kind, rank) in self._sent:
            raise Invalid(f"a second {kind} frame{whose}")
        if kind in ONCE:
            self._sent.add((kind, rank))

    def _keep(self, said: bytes) -> None:
        """Keep text that is not a frame. stderr shares the stream: the text is a defect of the
        guard, or what answered instead of one."""
        self.said_before = (self.said_before + said)[-KEPT:]
        self._before += len(said)
        if not self._greeted and self._before > GREETING:
            raise Invalid(
                f"{GREETING >> 20} MiB before its first frame: does a .bashrc print something "
                "there?"
            )

    def rest(self) -> str:
        """What is not a frame, as text."""
        text = self.said_before + bytes(self._buffer[:KEPT])
        return text.decode(errors="replace").strip()
