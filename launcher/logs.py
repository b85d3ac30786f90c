"""Logs on this machine's disk: capped, rotated, written from a thread of their own, and never a
reason to end a run."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

from contract.errors import UserError
from launcher.background import Spool

MIB = 1 << 20
# Logs leave this much of the disk free: attempts.json, the records and the report need it.
RESERVE = 64 * MIB
CHECK_EVERY = 1.0
FIRST_PART = 16  # the first 1/16 of what a log may have is kept in <name>.first
NEWER = 4  # the rest in four parts: <name>, <name>.1, ... <name>.3, each older than the one before


@dataclass(frozen=True)
class Sizes:
    """The most MiB of one file: a node or a rank that writes without end must not fill this
    machine's disk. Checkpoints have no such limit: they may fill the free disk."""

    log: int = 256  # what a rank prints, and controller.log
    steps: int = 1024  # rank<k>.steps.jsonl
    samples: int = 4096  # samples/rank<k>.<attempt>.csv
    # Any other record of a node. 90 epochs of ImageNet over 1 Gbit/s take a week, in which a disk
    # makes 390 bytes a second (iostat.json), a network card 190 and a GPU 150.
    other: int = 1024

    @classmethod
    def of(cls, text: str | None) -> Sizes:
        """From words such as `log=512,steps=2048`; what is not named keeps its default. Raises
        UserError."""
        chosen = cls()
        names = [field.name for field in fields(cls)]
        for word in filter(None, (text or "").split(",")):
            name, _, value = word.partition("=")
            if name not in names or not value.isascii() or not value.isdigit() or int(value) < 1:
                raise UserError(
                    f"KEEP={text}: {word!r} is none of {', '.join(names)} with a number of MiB, "
                    "as in KEEP=log=512,steps=2048."
                )
            chosen = replace(chosen, **{name: int(value)})
        return chosen


class SpooledLog:
    """A log that is written through a spool: whoever writes to it never waits."""

    def __init__(self, path: Path, limit: int, spool: Spool):
        self._log = RotatingLog(path, limit)
        self._spool = spool
        self._dropped = 0  # lines that found no room in the spool, since the last that did

    @property
    def lost(self) -> int:
        """Lines, since the last that was written."""
        return self._dropped + self._log.lost

    def write(self, lines: list[str]) -> None:
        """Add lines, or count them as lost."""
        if self._add(lines, sum(map(len, lines))):
            self._dropped = 0
        else:
            self._dropped += len(lines)

    def close(self) -> None:
        self._add(None)
        self._dropped = 0

    def _add(self, lines: list[str] | None, size: int = 0) -> bool:
        missing = self._dropped
        return self._spool.add(lambda: self._carry_out(missing, lines), size)

    def _carry_out(self, missing: int, lines: list[str] | None) -> None:
        """Called by the spool's thread: what write or close asked for, after so many lines that
        found no room."""
        self._log.lost += missing
        if lines is None:
            self._log.close()
        else:
            self._log.write(lines)


class RotatingLog:
    """Appends whole lines to a file, at most `limit` bytes in all. Lines that the disk cannot take
    are left out and counted, and the log says where they are missing. Raises nothing."""

    def __init__(self, path: Path, limit: int):
        self.path, self._limit = path, limit
        self.lost = 0  # lines, since the last that was written
        self._checked, self._room = 0.0, True
        self._fd: int | None = None
        self._size = 0

    def _open(self) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # We did not make a link or a FIFO in its place: nothing is written through it.
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            self.path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._size = os.fstat(self._fd).st_size

    def write(self, lines: list[str]) -> None:
        """Add lines, or count them as lost."""
        missing = f"tandem: {self.lost} lines are missing here: this machine's disk took none\n"
        text = (missing if self.lost else "") + "\n".join(lines) + "\n"
        if self._has_room() and self._append(text.encode(errors="replace")):
            self.lost = 0
        else:
            self.lost += len(lines)

    def _append(self, data: bytes) -> bool:
        """Append all of it or nothing; whether it was appended."""
        try:
            if self._fd is None:
                self._open()
            assert self._fd is not None
            taken = os.write(self._fd, data)
        except OSError:
            taken = 0
        if taken == len(data):
            self._size += taken
            with contextlib.suppress(OSError):  # where nothing can be renamed, this file grows on
                if self._size >= self._part:
                    self._rotate()
            return True
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no half line
        return False

    def _has_room(self) -> bool:
        now = time.monotonic()
        if now >= self._checked + CHECK_EVERY:
            self._checked = now
            with contextlib.suppress(OSError):
                state = os.statvfs(_there(self.path.parent))
                self._room = state.f_bavail * state.f_frsize >= RESERVE
        return self._room

    @property
    def _part(self) -> int:
        """How many bytes the current file may have."""
        first = self._limit // FIRST_PART
        return (self._limit - first) // NEWER if _named(self.path, "first").exists() else first

    def _rotate(self) -> None:
        """The next line begins a new file. Raises OSError."""
        names = [self.path, *(_named(self.path, n) for n in range(1, NEWER))]
        if not _named(self.path, "first").exists():
            self.path.replace(_named(self.path, "first"))
        else:
            for newer, older in zip(reversed(names[:-1]), reversed(names[1:])):
                if newer.exists():
                    newer.replace(older)
        self._leave()
        self._open()

    def _leave(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self.lost and self._has_room():
            self._append(f"tandem: {self.lost} lines are missing here\n".encode())
        self._leave()


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def _named(path: Path, suffix: str | int) -> Path:
    return path.with_name(f"{path.name}.{suffix}")


def parts(path: Path) -> list[Path]:
    """The existing files of a log, the oldest lines first."""
    older = [_named(path, n) for n in reversed(range(1, NEWER))]
    return [one for one in (_named(path, "first"), *older, path) if one.exists()]
