"""Finds, makes and locks the folders of runs on the control node.

A run's launcher is the process that holds the lock on `controller.pid` in the run's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from msgspec import Struct

from boundary.schema import Invalid, decode
from contract import runs
from contract.errors import UserError
from contract.runs import bump_second
from contract.text import open_lock, read_text
from launcher.machines.inventory import CHECKOUT
from launcher.node import machine, processes

RUNS = CHECKOUT / runs.RUNS


def find(name: str) -> Path:
    """Return the folder of a run by its id, its path, a path in it, or `latest`. Raises
    UserError."""
    path = Path(name)
    for parent in (path, *path.parents):  # also the path of its report
        if parent.name and (RUNS / parent.name / "plan.json").exists():
            return (RUNS / parent.name).resolve()
    newest = [folder.name for folder in newest_first()[:3]]
    if not newest:
        lead = "" if name == "latest" else f"no run {name}: "
        raise UserError(f"{lead}there is no run yet: `make demo` or `make train` starts one.")
    raise UserError(
        f"{relative(RUNS)}/ has no run {name}: the newest runs are {', '.join(newest)}."
    )


def newest_first() -> list[Path]:
    """Return the folders of all runs, the newest first: a name begins with the time of its run."""
    return sorted((path.parent for path in RUNS.glob("*Z-*/plan.json")), reverse=True)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UserError instead of OSError while the body writes `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{relative(path)} cannot be written ({error.strerror}): free space on that disk, "
            "or make your user the owner of the folder."
        ) from None


def make_folder(parent: Path, name: str) -> Path:
    """Make the folder of a new run, and return it. If the name is taken, take that of the next
    second. Raises UserError."""
    # mkdir fails if the folder exists, so of two launchers in one second only one gets a name.
    while True:
        folder = parent / name
        with writing(folder), contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        name = bump_second(name)


def read_json(path: Path, kind: type[Struct]) -> dict[str, Any]:
    """Read a JSON object that a run wrote, whose fields must have the types that `kind` gives them.
    Raises UserError if it is damaged."""
    try:
        text = read_text(path)
        # Decoded twice: first to check the types, then to keep fields that `kind` does not have.
        decode(text, kind, "it")
        document: dict[str, Any] = decode(text, dict[str, Any], "it")
        return document
    except FileNotFoundError:
        reason = "it is missing"
    except (OSError, ValueError) as error:
        reason = str(error)
    except Invalid as error:
        reason = str(error).replace("it.", "its ", 1)
    raise UserError(
        f"{relative(path)} is damaged ({reason}): this run cannot continue; start a new one."
    )


def refuse_links(folder: Path) -> None:
    """Raise UserError if a link leads out of a run's folder, which may be another user's: a file
    elsewhere would be read or written."""
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in [*folders, *files]):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(folder):
                raise UserError(
                    f"{relative(path)} is a link to {path.readlink()}, outside the run's "
                    "folder: remove the link, or replace it with a copy of the file."
                )


def disk_free() -> int:
    """Return how many bytes may still be written on the disk of runs/."""
    return machine.disk_free(RUNS if RUNS.exists() else CHECKOUT) or 0


def point_latest(folder: Path) -> None:
    """Let runs/latest point to a run. Raises UserError."""
    # A link cannot be changed, but a new link can take its place at once: readers always find one.
    fresh, latest = RUNS / f".latest.{os.getpid()}", RUNS / "latest"
    with writing(latest):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.name)
        fresh.replace(latest)


def remove_folder(folder: Path, previous: Path) -> None:
    """Remove the folder of a run that did not begin, and let runs/latest point to `previous`, the
    run to which it led before."""
    shutil.rmtree(folder, ignore_errors=True)
    # Without an earlier run the link would lead to a folder that is gone.
    if (previous / "plan.json").exists():
        point_latest(previous)
    elif (RUNS / "latest").is_symlink():
        (RUNS / "latest").unlink()


def lock(folder: Path) -> TextIO:
    """Make this process the run's only launcher. Returns the open file with the lock. The kernel
    releases the lock when the process ends, so it is never stale. Raises UserError if another
    process holds it."""
    # A line such as `4711 pc1 834512`: the pid, the PC, and the start time in clock ticks.
    path = folder / "controller.pid"
    with writing(path):
        file = open_lock(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        process = " on ".join(file.read().split()[:2])
        raise UserError(
            f"process {process} is running {folder.name}: `make attach RUN={folder.name}` "
            f"shows the run, `make stop RUN={folder.name}` ends it."
        ) from None
    # Only the holder of the lock writes; a process that is refused above reads who holds it.
    with writing(path):
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()} {processes.start_of(os.getpid())}\n")
        file.flush()
    return file


def relative(path: Path) -> Path:
    """Return a path below the checkout relative to the checkout, another path unchanged."""
    return path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path
