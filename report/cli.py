"""What the command lines of the report share: which run a name means, and writing files."""

from __future__ import annotations

import re
from pathlib import Path

from contract.errors import UserError
from contract.runs import RUNS
from contract.text import pluralize, write_whole


class NothingMeasured(UserError):
    """There is nothing to predict from yet; `make plan` then measures."""

    code = 3


LATEST = re.compile(r"latest~([0-9]{1,4})")


def find_run(name: str) -> Path:
    """The folder of a run, by its path, the path of a file in it, or its name under runs/; latest~1
    is the one before the newest. Raises UserError."""
    before = LATEST.fullmatch(name)
    if before:
        return earlier(int(before[1]))
    path = Path(name)
    if not path.exists() and (Path(RUNS) / path).exists():
        path = Path(RUNS) / path
    if path.is_file():  # runs/<id>/report.html, as it was printed
        path = path.parent
    if not path.exists() and name == "latest":
        raise UserError("there is no run yet: `make demo` or `make train` starts one.")
    return path


def earlier(before: int) -> Path:
    """The run that so many others followed. Raises UserError."""
    folders = sorted((path.parent for path in Path(RUNS).glob("*Z-*/plan.json")), reverse=True)
    if before >= len(folders):
        raise UserError(
            f"latest~{before}: there are {pluralize(len(folders), 'run')}: `make runs` lists them."
        )
    return folders[before]


def write(path: Path, content: str) -> None:
    """Replace a text file. Raises UserError."""
    write_bytes(path, content.encode("utf-8", errors="replace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically, or leave it as it was. Raises UserError when it cannot be
    written."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise UserError(
            f"Cannot write {path}: {error.strerror}. Make room on that disk, or give the folder to "
            "your user."
        ) from None
