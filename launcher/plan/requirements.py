"""The texts that a requirements.txt comes to, with the files that it names by -r and -c.

A layer is kept under a hash of them (launcher/plan/layer.py), so all that decides which packages
are chosen has to be in them: a line whose meaning can change elsewhere is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from contract.errors import UserError
from contract.text import read_text
from launcher.folders import relative

MOST_FILES = 64
MOST_BYTES = 1 << 20  # of each
COMMENT = re.compile(r"(^|\s+)#.*$")
INCLUDE = re.compile(r"(?:-[rc]|--(?:requirement|constraint)s?(?=[ =]))[ =]*(.*)")
# A source, and what uv would build, whatever else it is told.
SOURCE = re.compile(
    r"(.*@\s*)?(git|hg|svn|bzr)\+|--(no-binary|only-binary)[= ]+(?!:all:$)|--no-binary"
)
OWN_WHEEL = (
    "It runs code of its own as it is built, and only wheels are taken: where you trust it, make "
    "its wheel yourself (`pip wheel --wheel-dir FOLDER ...`) and add a line `--find-links FOLDER`."
)
ARCHIVES = (".whl", ".zip", ".gz", ".bz2", ".xz", ".tar", ".tgz")


def texts(requirements: Path) -> list[str]:
    """The file's own text first, then each that it names, once. Raises UserError."""
    by_path: dict[Path, str] = {}
    waiting = [requirements]
    while waiting:
        path = waiting.pop(0)
        if path.resolve() in by_path:
            continue
        if len(by_path) == MOST_FILES:
            raise UserError(
                f"{relative(requirements)} comes to more than {MOST_FILES} files by -r and -c: "
                "write their lines into fewer."
            )
        try:
            by_path[path.resolve()] = text = read_text(path, MOST_BYTES)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(
                f"{path} cannot be read: {why}. Correct the file, or its name."
            ) from None
        waiting += [path.parent / name for name in _included(path, text)]
    return list(by_path.values())


def _included(path: Path, text: str) -> Iterator[str]:
    """The files that the lines of one name. Raises UserError."""
    for joined in re.sub(r"\\\r?\n", "", text).splitlines():
        line = COMMENT.sub("", joined).strip()
        if why := _why_refused(line):
            raise UserError(f"{relative(path)}: {line} {why}")
        if include := INCLUDE.match(line):
            try:
                (name,) = shlex.split(include[1])
            except ValueError as error:
                raise UserError(f"{relative(path)}: {line}: {error}: correct the line.") from None
            if re.match("[a-z]+:", name):
                raise UserError(
                    f"{relative(path)}: {name} is elsewhere, and a change of it would not be seen: "
                    "fetch the file, and name it by its path."
                )
            yield name


def _why_refused(line: str) -> str | None:
    if SOURCE.match(line):
        return f"asks for a source. {OWN_WHEEL}"
    if re.match("-e|--editable", line):
        return (
            "asks for a source, and only wheels are taken: leave the line out (the script's own "
            "folder can be imported as it is)."
        )
    place = "" if line.startswith("-") else re.split(r"\s*;|\s+--", line)[0]
    is_path = "/" in place or place.startswith(".") or place.lower().endswith(ARCHIVES)
    if "file:" in place or (is_path and "://" not in place):  # as pip tells a path from a name
        return (
            "is a file of this machine, and a change of it would not be seen: name the package and "
            "its version (`--find-links FOLDER` where its wheel is in a folder)."
        )
    return None
