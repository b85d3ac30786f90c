"""Cut the stream of a guard into frames (docs/guard-protocol.md), and check each frame. This code
does no I/O: launcher/watch reads the stream, and calls `Frames.feed` with the bytes."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Union

from msgspec import UNSET, Meta, Struct

from boundary.schema import Count, Integer, Invalid, Number, Text, decode, matching
from contract.records import PIECE

LARGEST = 1 << 20  # bytes of a frame, and of its raw bytes; our guard splits longer output
# Bytes before the frame hello. A .bashrc may print some text, but endless text is an error.
GREETING = 1 << 20
MOST_LINES = 256  # lines of an error; our guard sends fewer
OTHER_BYTES = 4096  # bytes that are kept of text between frames, because it may explain a failure

ExitCode = Annotated[int, Meta(ge=0, le=255)]
Signal = Annotated[str, matching(r"SIG[A-Z0-9+-]{1,20}|signal \d{1,3}")]
Sign = Literal["asked", "seat", "processors", "card"]
Reason = Literal[
    "finished", "alone", "failed", "stopped", "killed", "busy", "lease", "eof", "guard"
]


class Frame(Struct, frozen=True, tag_field="type"):
    # True if our guard sends this type at most once, or at most once for each `rank`.
    once: ClassVar[bool] = False

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)


class Hello(Frame, frozen=True, tag="hello"):
    """The first frame. `way`: the guard is a systemd service, or runs below wardens."""

    protocol: Literal[2]
    way: Literal["service", "wardens"]
    once: ClassVar[bool] = True


class Started(Frame, frozen=True, tag="started"):
    pid: Integer
    mono_start: Number
    once: ClassVar[bool] = True


class Worker(Frame, frozen=True, tag="worker"):
    rank: int
    pid: Integer
    once: ClassVar[bool] = True


class Log(Frame, frozen=True, tag="log"):
    """Output of a rank, or of launch (rank None). `bytes`: the number of raw bytes that follow."""

    rank: int | None
    stream: Literal["stdout", "stderr"]
    bytes: Annotated[int, Meta(ge=1, le=LARGEST)]


class Record(Frame, frozen=True, tag="record"):
    file: Text
    offset: Count
    bytes: Annotated[int, Meta(ge=1, le=PIECE)]


class Beat(Frame, frozen=True, tag="beat"):
    unix: Number
    running: list[int]
    idle: Number | None = None  # seconds in which the ranks did nothing; None: unknown


class WorkerExit(Frame, frozen=True, tag="worker_exit"):
    rank: int
    first: bool
    exit_code: ExitCode | None
    signal: Signal | None
    exception: Text | None
    error_lines: Annotated[list[Text], Meta(max_length=MOST_LINES)] = []
    last_line: Text | None = None
    once: ClassVar[bool] = True


class Trouble(Frame, frozen=True, tag="trouble"):
    what: Text
    message: Text


class OwnerSign(Frame, frozen=True, tag="owner"):
    sign: Sign | None


class Process(Struct, frozen=True):
    pid: Integer
    command: Text


class WorkerEnd(Struct, frozen=True):
    exit_code: ExitCode | None
    signal: Signal | None
    exception: Text | None


class Exit(Frame, frozen=True, tag="exit"):
    """The last frame. `ended`: killed processes; `left`: those of them that hang in the kernel."""

    reason: Reason
    message: Text | None
    exit_code: ExitCode | None
    signal: Signal | None
    mono_start: Number
    mono_end: Number
    workers: dict[Text, WorkerEnd]
    ended: list[Process]
    left: list[Process]
    once: ClassVar[bool] = True


KINDS = (Hello, Started, Worker, Log, Record, Beat, WorkerExit, Trouble, OwnerSign, Exit)
AnyFrame = Union[KINDS]  # type: ignore[valid-type]
TYPES = {kind.__struct_config__.tag for kind in KINDS}


class _Head(Struct):
    type: Any = UNSET  # only frames have it


class Frames:
    """Cuts a byte stream into frames. The stream may arrive in pieces of any size. After Invalid is
    raised, the rest of the stream has no meaning."""

    def __init__(self, ranks: tuple[int, ...]):
        self._ranks = frozenset(ranks)
        # The end of the text that is not a frame: a .bashrc's greeting, or why no guard started.
        self.other_text = b""
        self._other_bytes = 0  # the length of all text that was not a frame
        self._buffer = bytearray()
        self._searched_bytes = 0  # the beginning of the buffer that contains no newline
        self._greeted = False  # the frame hello has come
        self._seen_once: set[tuple[str, int | None]] = set()  # (type, rank) of frames with `once`
        self._awaits_bytes: Log | Record | None = None  # the frame whose raw bytes come next

    def feed(self, data: bytes) -> Iterator[tuple[Frame, bytes]]:
        """Add bytes, and yield the frames that are now complete, each with its raw bytes. Raises
        Invalid at a bad frame, after the frames that precede it."""
        self._buffer += data
        # Returns if the next frame, or its raw bytes, are incomplete. They stay in the buffer.
        while True:
            if self._awaits_bytes is not None:
                size = self._awaits_bytes.bytes
                if len(self._buffer) < size:
                    return
                awaited, payload = self._awaits_bytes, bytes(self._buffer[:size])
                del self._buffer[:size]
                self._awaits_bytes = None
                yield awaited, payload
                continue
            line = self._take_line()
            if line is None:
                return
            frame = self._parse_frame(line)
            if frame is None:
                self._store_text(line + b"\n")
            elif isinstance(frame, (Log, Record)):
                self._awaits_bytes = frame
            else:
                yield frame, b""

    def _take_line(self) -> bytes | None:
        """Remove the next line from the buffer; None if it is incomplete."""
        # The search continues where the last one ended, so that a long line costs linear time.
        end = self._buffer.find(b"\n", self._searched_bytes)
        if end < 0:
            self._searched_bytes = len(self._buffer)
            if self._searched_bytes > LARGEST:
                self._store_text(bytes(self._buffer[:OTHER_BYTES]))
                raise Invalid(f"a line of more than {LARGEST >> 20} MiB")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched_bytes = 0
        return line

    def _parse_frame(self, line: bytes) -> Frame | None:
        """Return the frame in a line; None for a line that is not a frame. Raises Invalid for a
        frame of another form, of another machine's rank, or out of order."""
        # This test is cheap, so that a flood of text does not keep the launcher busy.
        if not line.startswith(b"{"):
            return None
        try:
            kind = decode(line, _Head, "frame").type
        except Invalid:
            return None
        # A .bashrc may print JSON before the guard starts.
        if kind is UNSET or (not self._greeted and kind != "hello"):
            return None
        if not isinstance(kind, str) or kind not in TYPES:
            raise Invalid(f"a frame of type {reprlib.repr(kind)}")
        frame: Frame = decode(line, AnyFrame, f"{kind} frame")
        self._greeted = True
        rank = getattr(frame, "rank", None)
        ranks = {*getattr(frame, "running", ()), *([] if rank is None else [rank])}
        if not ranks <= self._ranks:
            raise Invalid(f"a {frame.type} frame of a rank that is not there")
        # The guard ends after its exit frame, so another process writes to the stream.
        if ("exit", None) in self._seen_once:
            raise Invalid(f"after its exit frame one of type {frame.type!r}")
        if (frame.type, rank) in self._seen_once:
            whose = "" if rank is None else f" of rank {rank}"
            raise Invalid(f"a second {frame.type} frame{whose}")
        if frame.once:
            self._seen_once.add((frame.type, rank))
        return frame

    def _store_text(self, text: bytes) -> None:
        """Store the end of text between frames. Raises Invalid for too much text before hello."""
        # stderr shares the stream, so the text may be an error of the guard, or of ssh.
        self.other_text = (self.other_text + text)[-OTHER_BYTES:]
        self._other_bytes += len(text)
        if not self._greeted and self._other_bytes > GREETING:
            raise Invalid(
                f"{GREETING >> 20} MiB before its first frame: does a .bashrc print something "
                "there?"
            )

    def unframed_text(self) -> str:
        """Return the text that is not a frame."""
        text = self.other_text + bytes(self._buffer[:OTHER_BYTES])
        return text.decode(errors="replace").strip()
