"""Write checkpoint files in a thread during training. A reader sees a complete file or none."""

import contextlib
import os
import pathlib
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Callable, Iterator, List, Mapping, Optional

import torch

from contract.errors import RankError
from tandem.pickles import read_zip_records


def checkpoints(folder: pathlib.Path) -> List[pathlib.Path]:
    """List the checkpoints of all hosts below an output folder, without unfinished files."""
    return sorted(folder.glob("checkpoints/*/step-*.pt"))


def is_complete(path: pathlib.Path) -> bool:
    """Return whether a torch file is complete: a zip archive whose CRC-32s are right."""
    if not path.is_file():  # opening a named pipe would wait
        return False
    try:
        with path.open("rb") as file:
            return all(record.is_whole(file) for record in read_zip_records(file).values())
    except (OSError, ValueError, struct.error):
        return False


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file for writing within the block. Afterwards `path` is complete, even after a power
    cut. If writing fails, `path` stays as it was. Raises OSError."""
    unfinished = path.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            # Without this, a power cut could leave the new name without its contents.
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    # The new name is durable only once the folder is synced too.
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def write_whole(payload: Mapping[str, Any], path: pathlib.Path) -> None:
    """Save `payload` so that `path` is never incomplete. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        torch.save(payload, file)


class Writer:
    """Writes one checkpoint at a time in a thread, and keeps the newest `keep` and the best.

    Only one Writer may use a folder, since a new Writer removes all unfinished files: they come
    from a process that was killed.
    """

    def __init__(self, folder: pathlib.Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        # One thread keeps the checkpoints in their order.
        self._thread = ThreadPoolExecutor(1)
        self._pending: Optional[Future[None]] = None
        for unfinished in folder.glob("*.unfinished"):
            unfinished.unlink(missing_ok=True)

    def save(
        self,
        payload: Mapping[str, Any],
        best: bool,
        wait_for_copies: Callable[[], None] = lambda: None,
    ) -> pathlib.Path:
        """Begin to write `payload`, which must not change any more. Return the file's path. The
        thread first calls `wait_for_copies`, which waits until `payload` is complete. Waits for the
        previous checkpoint, and raises RankError if its file could not be written."""
        self.finish()
        path = self.folder / f"step-{payload['step']:08d}.pt"
        self._pending = self._thread.submit(self._write, payload, path, best, wait_for_copies)
        return path

    def finish(self) -> None:
        """Wait until the last file is on disk. Raises RankError if it could not be written."""
        try:
            if self._pending is not None:
                self._pending.result()
        except OSError as error:
            raise RankError(
                f"{self.folder}: the checkpoint could not be written: {error.strerror}."
            ) from error

    def _write(
        self,
        payload: Mapping[str, Any],
        path: pathlib.Path,
        best: bool,
        wait_for_copies: Callable[[], None],
    ) -> None:
        wait_for_copies()
        write_whole(payload, path)
        if best:
            link = path.with_name("best.pt")
            unfinished = link.with_suffix(".unfinished")
            # `os.link` replaces no file, and a reader must always find best.pt. So the link gets
            # another name first, and is then renamed.
            try:
                unfinished.unlink(missing_ok=True)
                os.link(path, unfinished)
                unfinished.replace(link)
            except OSError:  # the file system has no hard links (exFAT, some shares)
                write_whole(payload, link)
        # Sorted by time, not by step: an earlier run may have written to this folder.
        files = sorted(self.folder.glob("step-*.pt"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[: -self.keep]:
            file.unlink()
