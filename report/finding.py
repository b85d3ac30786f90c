"""Which folder is meant by the name of a run."""

from __future__ import annotations

import re
from pathlib import Path

from contract.errors import UserError
from contract.text import counted

LATEST = re.compile(r"latest~([0-9]{1,4})")


def find_run(name: str) -> Path:
    """The folder of a run, by its path, the path of a file in it, or its name under runs/; latest~1
    is the one before the newest. Raises UserError."""
    before = LATEST.fullmatch(name)
    if before:
        return earlier(int(before[1]))
    path = Path(name)
    if not path.exists() and (Path("runs") / path).exists():
        path = Path("runs") / path
    if path.is_file():  # runs/<id>/report.html, as it was printed
        path = path.parent
    if not path.exists() and name == "latest":
        raise UserError("there is no run yet: `make demo` or `make train` starts one.")
    return path


def earlier(before: int) -> Path:
    """The run that so many others followed. Raises UserError."""
    every = sorted((path.parent for path in Path("runs").glob("*Z-*/plan.json")), reverse=True)
    if before >= len(every):
        raise UserError(
            f"latest~{before}: there are {counted(len(every), 'run')}: `make runs` lists them."
        )
    return every[before]
