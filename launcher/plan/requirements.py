"""The texts that a requirements.txt comes to, with the files that it names by -r and -c.

A layer is kept under a hash of them (launcher/plan/layer.py), so all that decides which packages
are chosen has to be in them: a line whose meaning can change elsewhere is refused.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from contract.errors import UserError
from launcher.folders import relative

MOST_FILES = 64
MOST_BYTES = 1 << 20  # of each
COMMENT = re.compile(r"(^|\s+)#.*$")
SOURCE = re.compile(r"(^|@\s*)(git|hg|svn|bzr)\+")
# What uv would build, whatever else it is told.
BUILDS = re.compile(r"--(no-binary|only-binary)[= ]+(?!:all:$)|--no-binary")
OWN_WHEEL = (
    "It runs code of its own as it is built, and only wheels are taken: where you trust it, make "
    "its wheel yourself (`pip wheel --wheel-dir FOLDER ...`) and add a line `--find-links FOLDER`."
)
ARCHIVES = (".whl", ".zip", ".gz", ".bz2", ".xz", ".tar", ".tgz")


def texts(requirements: Path) -> list[str]:
    """The file's own text first, then each that it names, once. Raises UserError."""
    found: dict[Path, str] = {}
    waiting = [requirements]
    while waiting:
        path = waiting.pop(0)
        if path.resolve() in found:
            continue
        if len(found) == MOST_FILES:
            raise UserError(
                f"{relative(requirements)} comes to more than {MOST_FILES} files by -r and -c: "
                "write their lines into fewer."
            )
        found[path.resolve()] = text = _text(path)
        waiting += [path.parent / name for name in _named(path, text)]
    return list(found.values())


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {why}. Correct the file, or its name.") from None
    if len(text) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES >> 20} MiB: name fewer packages.")
    return text


def _named(path: Path, text: str) -> Iterator[str]:
    """The files that the lines of one name. Raises UserError."""
    for joined in re.sub(r"\\\r?\n", "", text).splitlines():
        line = COMMENT.sub("", joined).strip()
        if SOURCE.search(line) or BUILDS.match(line):
            raise UserError(f"{relative(path)}: {line} asks for a source. {OWN_WHEEL}")
        if not line.startswith("-"):
            if _local(line):
                raise UserError(
                    f"{relative(path)}: {line} is a file of this machine, and a change of it would "
                    "not be seen: name the package and its version (`--find-links FOLDER` where "
                    "its wheel is in a folder)."
                )
            continue
        for name in _after(path, line):
            if re.match("[a-z]+:", name):
                raise UserError(
                    f"{relative(path)}: {name} is elsewhere, and a change of it would not be seen: "
                    "fetch the file, and name it by its path."
                )
            yield name


def _after(path: Path, line: str) -> list[str]:
    """What follows -r and -c in a line of options, as pip reads it. Raises UserError."""
    options = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for short, long in (("-r", "--requirement"), ("-c", "--constraint"), ("-e", "--editable")):
        options.add_argument(short, long, action="append", default=[])
    try:
        found, _ = options.parse_known_args(shlex.split(line))
    except (ValueError, argparse.ArgumentError) as error:
        raise UserError(f"{relative(path)}: {line}: {error}: correct the line.") from None
    if found.editable:
        raise UserError(
            f"{relative(path)}: {line}: only wheels are taken, so nothing is installed from its "
            "source: leave the line out (the script's own folder can be imported as it is)."
        )
    return [*found.requirement, *found.constraint]


def _local(line: str) -> bool:
    """Whether a requirement is a path of this machine, as pip decides it."""
    named = re.split(r"\s*;|\s+--", line)[0]
    path = "/" in named or named.startswith(".") or named.lower().endswith(ARCHIVES)
    return "file:" in named or (path and "://" not in named)
