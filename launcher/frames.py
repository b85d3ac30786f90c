"""The guard's side of the wire, as the control machine reads it (docs/guard-protocol.md)."""

from __future__ import annotations

import json
from typing import Any


class Frames:
    """Cuts a byte stream into frames, however it was split on the way."""

    def __init__(self):
        self.said_before = (
            b""  # what came before hello: a .bashrc's greeting, or why there is no guard
        )
        self._buffer = bytearray()
        self._greeted = False
        self._waiting: dict[str, Any] | None = None  # a frame whose raw bytes are not all here

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Add bytes; return the frames that are now complete, each with its raw bytes."""
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

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
            end = self._buffer.find(b"\n")
            if end < 0:
                return None
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            found = _frame(line)
            if not self._greeted:
                if found is None or found["type"] != "hello":
                    self.said_before = (self.said_before + line + b"\n")[-4096:]
                    continue
                self._greeted = True
            if found is None:
                # stderr shares the stream: a defect of the guard, kept for the person who asks why.
                self.said_before = (self.said_before + line + b"\n")[-4096:]
                continue
            if found.get("bytes"):
                self._waiting = found
                continue
            return found, b""

    def rest(self) -> str:
        """What is no frame, as text."""
        return (self.said_before + bytes(self._buffer)).decode(errors="replace").strip()


def _frame(line: bytes) -> dict[str, Any] | None:
    try:
        frame = json.loads(line)
    except ValueError:
        return None
    return frame if isinstance(frame, dict) and "type" in frame else None
