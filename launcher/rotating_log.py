"""Logs on this machine's disk: capped, rotated, and never a reason to end a run."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from launcher.sizes import MIB

# Logs leave this much of the disk free: attempts.json, the records and the report need it.
RESERVE = 64 * MIB
CHECK_EVERY = 1.0
FIRST = 16  # the first 1/16 of what a log may have is kept in <name>.first
NEWER = 4  # the rest in four parts: <name>, <name>.1, ... <name>.3, each older than the one before


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
        first = self._limit // FIRST
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
