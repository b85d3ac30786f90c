"""Find a run by its name, and write files: shared by the command lines of the report."""

from __future__ import annotations

import re
from pathlib import Path

from contract.errors import UserError
from contract.runs import RUNS
from contract.text import pluralize, write_whole


class NothingMeasured(UserError):
    """Raised when there is no measurement to predict from; `make plan` then measures."""

    code = 3


LATEST = re.compile(r"latest~([0-9]{1,4})")


def newest_first(runs: Path) -> list[Path]:
    """Return the folders of all runs, the newest first."""
    # The names begin with the time, so that their order is that of the runs.
    return sorted((path.parent for path in runs.glob("*Z-*/plan.json")), reverse=True)


def find_run(name: str) -> Path:
    """Return the folder of a run. Raises UserError. `name` is the folder's path, the path of a file
    in it, or a name under runs/; latest~1 is the run before the newest."""
    if match := LATEST.fullmatch(name):
        runs_back = int(match[1])
        folders = newest_first(Path(RUNS))
        if runs_back >= len(folders):
            raise UserError(
                f"latest~{runs_back}: there are {pluralize(len(folders), 'run')}: `make runs` "
                "lists them."
            )
        return folders[runs_back]
    path = Path(name)
    if not path.exists() and (Path(RUNS) / path).exists():
        path = Path(RUNS) / path
    if path.is_file():  # runs/<id>/report.html, as a report prints it
        path = path.parent
    # `latest` is the default, so a new user must learn how to start a first run.
    if not path.exists() and name == "latest":
        raise UserError("there is no run yet: `make demo` or `make train` starts one.")
    return path


def write(path: Path, content: str) -> None:
    """Replace a text file atomically, or leave the old one. Raises UserError on failure."""
    try:
        write_whole(path, content.encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(
            f"Cannot write {path}: {error.strerror}. Free space on that disk, or make your "
            "user the owner of the folder."
        ) from None
