"""What waits before it trains, and for whom: a note in runs/ for each, which `make status`, `make
top` and `make runs` show. Whoever waits holds the lock on its note, so none is stale."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from contract import validate
from contract.locks import open_lock
from contract.text import seconds
from contract.validate import NATURAL, Invalid
from launcher import folders

FOLDER = ".waiting"
SHAPE = {"run": (None, str), "what": str, "why": str, "since": float, "pid": NATURAL, "host": str}


@dataclass(frozen=True)
class Wait:
    """`run`: the one that has begun, None of one that has not."""

    run: str | None
    what: str
    why: str
    since: float
    pid: int
    host: str

    def sentence(self) -> str:
        """For people: of a run that has not begun, with its process."""
        text = f"waits for {seconds(max(0.0, time.time() - self.since))} so far: {self.why}"
        return text if self.run else f"{self.what} {text} (process {self.pid} on {self.host})"


class Note:
    """Shown while the body runs, from the first `tell` on. `look`: is called at each `tell`, too.
    Raises UserError where it cannot be written."""

    def __init__(
        self, what: str, run: str | None = None, look: Callable[[str], None] = lambda _why: None
    ):
        self.look = look
        self._what, self._run, self._since = what, run, time.time()
        self._path = folders.RUNS / FOLDER / f"{socket.gethostname()}-{os.getpid()}"
        self._file: TextIO | None = None

    def __enter__(self) -> Note:
        return self

    def tell(self, why: str) -> None:
        with folders.writing(self._path):
            file = self._file = self._file or _hold(self._path)
            pid, host = os.getpid(), socket.gethostname()
            note = Wait(self._run, self._what, why, self._since, pid, host)
            file.seek(0)
            file.truncate()
            file.write(json.dumps(asdict(note)))
            file.flush()
        self.look(why)

    def __exit__(self, *_: object) -> None:
        if self._file:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()
            self._file = None


def _hold(path: Path) -> TextIO:
    """The note, locked. Readers remove what nobody holds: also one that was made this very moment.
    Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = open_lock(path)
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()


def everybody() -> list[Wait]:
    """Those that wait now, the longest first."""
    found = [wait for path in (folders.RUNS / FOLDER).glob("*") if (wait := _read(path))]
    return sorted(found, key=lambda wait: wait.since)


def _read(path: Path) -> Wait | None:
    with contextlib.suppress(OSError, Invalid), path.open(encoding="utf-8", errors="replace") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Wait(**validate.check(validate.parse(f.read(1 << 16)), SHAPE, "note"))
        path.unlink()
    return None


def of(run: str) -> Wait | None:
    """What a run that has begun waits for; None where it does not wait."""
    return next((wait for wait in everybody() if wait.run == run), None)


def before_runs() -> list[Wait]:
    return [wait for wait in everybody() if wait.run is None]
