"""Writing checkpoint files beside training: a reader sees a whole file or none."""

import contextlib
import os
import pathlib
import zipfile
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Callable, Iterator, List, Mapping, Optional

import torch

from .errors import RankError


def checkpoints(folder: pathlib.Path) -> List[pathlib.Path]:
    """Of all hosts below an output folder; unfinished ones are named otherwise."""
    return sorted(folder.glob("checkpoints/*/step-*.pt"))


def is_whole(path: pathlib.Path) -> bool:
    """A torch file is a zip archive with a CRC-32 of each member: compare them all."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError):
        return False


@contextlib.contextmanager
def whole(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file to write within; afterwards `path` is whole, even after a power cut. Where that
    fails, `path` is as it was before."""
    unfinished = path.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    # The new name is safe only when the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def write_whole(payload: Mapping[str, Any], path: pathlib.Path) -> None:
    """Save so that `path` is either absent or whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        torch.save(payload, file)


def _same(path: pathlib.Path, other: pathlib.Path, payload: Mapping[str, Any]) -> None:
    """Make `other` the file that `path` is, without writing it twice; a copy where the file system
    has no links (exFAT, some shares)."""
    unfinished = other.with_suffix(".unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        os.link(path, unfinished)
        unfinished.replace(other)
    except OSError:
        write_whole(payload, other)


class Writer:
    """Writes one checkpoint at a time in a thread; keeps the newest `keep` and the best.

    A machine has one, that of its first process: it removes what a killed one left unfinished.
    """

    def __init__(self, folder: pathlib.Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1)
        self._pending: Optional[Future[None]] = None
        for left in folder.glob("*.unfinished"):
            left.unlink(missing_ok=True)

    def save(
        self, payload: Mapping[str, Any], best: bool, arrived: Callable[[], None] = lambda: None
    ) -> pathlib.Path:
        """Begin to write; `payload` must not change any more once `arrived` has returned, which
        the thread waits for. Waits for the one before. Raises RankError where that could not be
        written."""
        self.finish()
        path = self.folder / f"step-{payload['step']:08d}.pt"
        self._pending = self._thread.submit(self._write, payload, path, best, arrived)
        return path

    def finish(self) -> None:
        """Wait until the last one is on the disk. Raises RankError when it cannot be written."""
        try:
            if self._pending is not None:
                self._pending.result()
        except OSError as error:
            raise RankError(f"{self.folder}: no checkpoint written: {error.strerror}.") from error

    def _write(
        self,
        payload: Mapping[str, Any],
        path: pathlib.Path,
        best: bool,
        arrived: Callable[[], None],
    ) -> None:
        arrived()
        write_whole(payload, path)
        if best:
            _same(path, path.with_name("best.pt"), payload)
        # By time and not by step: another run may have been here before.
        own = sorted(self.folder.glob("step-*.pt"), key=lambda old: old.stat().st_mtime_ns)
        for old in own[: -self.keep]:
            old.unlink()
