"""What a script of the user's wrote, brought here at the end.

Here the names come from the machines, too. So they are checked as what they send is (collect.py):
a name leads nowhere but below the machine's own part of the run's folder, and files have a number
and a size together that no machine can exceed.
"""

from __future__ import annotations

import filecmp
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from contract.errors import UserError
from contract.text import pluralize
from launcher.collect import (
    LEAST,
    SECONDS,
    Lost,
    NotHere,
    move_in,
    of_each,
    one_by_one,
    receive,
    staging,
)
from launcher.machines.engine import Node, error_location, talk
from launcher.plan.code import WORK
from launcher.plan.files import CACHES

MOST_FILES = 2000  # of a machine
DEEPEST = 16  # folders
LIST = (
    'cd "$1" 2>/dev/null || exit 0; shift; for one; do test ! -d "./$one" || '
    'find "./$one" -type f -printf "%T@ %s %P\\t$one\\0"; done'
)
WRITTEN = re.compile(r"(\d{1,12})\.?\d* (\d{1,15}) ([^\t]+)\t([^\t]+)")
PUT = 'mkdir -p "$(dirname "$1")" && cat > "$1.part" && mv "$1.part" "$1"'


@dataclass(frozen=True)
class OutputFile:
    """A file: its name below the folder that the script ran in, and by its machine's word its size
    and when it was written."""

    name: str
    size: int
    unix: int


def listing(node: Node, there: str, folders: tuple[str, ...]) -> list[OutputFile]:
    """The files in these folders, the newest first; `there` is the machine's folder of the run.
    Raises NotHere."""
    argv = ["sh", "-c", LIST, "sh", f"{there}/{WORK}/{node.host.name}", *folders]
    try:
        said, _, status = talk(node.start(argv), b"", SECONDS)
    except (OSError, UserError) as error:
        raise Lost(str(error).rstrip(".")) from None
    if status != 0:
        raise NotHere("the machine did not list them")
    try:
        return _listed(said, folders)
    except Exception as error:  # the border of a machine
        raise NotHere(f"what it listed ended in an error here: {error_location(error)}") from None


def _listed(said: bytes, folders: tuple[str, ...]) -> list[OutputFile]:
    files = [file for word in said.split(b"\0") if (file := _read(word, folders))]
    names = {file.name for file in files}
    # No file can be a folder, too, however it is called.
    real = [file for file in files if not names & {*map(str, PurePosixPath(file.name).parents)}]
    return sorted({file.name: file for file in real}.values(), key=lambda file: -file.unix)


def _read(word: bytes, folders: tuple[str, ...]) -> OutputFile | None:
    """A file of the listing; None for a name that no path is made of here."""
    match = WRITTEN.fullmatch(word.decode(errors="replace"))
    if match is None or match[4] not in folders or not match[3].isprintable():
        return None
    parts = match[3].split("/")
    odd = any(part in ("", ".", "..") or len(part.encode()) > 200 for part in parts)
    if odd or len(parts) > DEEPEST or "\ufffd" in match[3]:
        return None
    name = str(PurePosixPath(match[4], match[3]))
    return OutputFile(name, int(match[2]), int(match[1]))


def bring(
    nodes: dict[str, Node],
    there: dict[str, str],
    folders: tuple[str, ...],
    folder: Path,
    limit: int,
    sent: Mapping[str, tuple[int, int]],
) -> list[str]:
    """Bring these folders of every machine into the run's `folder`, or without any all that is new
    or changed against what was `sent` (size and unix time by name), up to `limit` bytes of each
    machine, the newest files first; `there` are the machines' folders of the run. Returns sentences
    on what came and what did not. Raises Unwritable."""

    def bring_from(host: str) -> list[str]:
        node, place = nodes[host], f"{WORK}/{host}"
        try:
            every = listing(node, there[host], folders or (".",))
        except NotHere as error:
            return [f"{host}: what the script wrote was not collected: {error}."]
        names = [
            f"{place}/{file.name}"
            for file in every
            if (file.size, file.unix) != sent.get(file.name)
            and not CACHES & {*file.name.split("/")}
        ]
        sizes: list[int] = []

        def bring_file(name: str) -> list[str]:
            sizes.append(_bring(node, f"{there[host]}/{name}", folder, name, limit - sum(sizes)))
            return []

        problems = one_by_one(host, names[:MOST_FILES], bring_file)
        said = [f"{host}: {pluralize(len(sizes), 'file')} in {place}"] if sizes else []
        if len(names) > MOST_FILES:
            said.append(
                f"{host}: {len(names) - MOST_FILES} older files stay there, in "
                f"{there[host]}/{place}: a run brings {MOST_FILES} of a machine."
            )
        return [*said, *problems]

    return [*of_each(there, bring_from, nodes), *_once(folder, list(there))]


def _once(folder: Path, hosts: list[str]) -> list[str]:
    """Keep once what several machines wrote alike; the first of them keeps it."""
    first: dict[Path, Path] = {}
    said = []
    for host in hosts:
        alike = 0
        for path in sorted((folder / WORK / host).rglob("*")):
            other = first.setdefault(path.relative_to(folder / WORK / host), path)
            if other is not path and path.is_file() and filecmp.cmp(path, other, shallow=False):
                path.unlink()
                alike += 1
        if alike:
            said.append(f"{host}: {pluralize(alike, 'file')} equal to another machine's, kept once")
    return said


def _bring(node: Node, source: str, folder: Path, name: str, limit: int) -> int:
    """One file; returns its size. Raises NotHere, Unwritable."""
    with staging(folder) as scratch:
        size = receive(node, source, scratch / "file", limit)
        if size is None:
            raise NotHere("it is gone")
        if size > limit:
            raise NotHere(
                f"with it this machine's files would have more than their limit (KEEP= "
                f"allows more): it is {source} there"
            )
        move_in(scratch / "file", folder / name)
    return size


def put(node: Node, source: Path, size: int, target: str) -> None:
    """Write a file to a machine. Raises UserError."""
    with source.open("rb") as file:
        contents = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    process = node.start(["sh", "-c", PUT, "sh", target])
    _, said, status = talk(process, contents, SECONDS * (1 + size // LEAST))
    if status != 0:
        raise UserError(
            f"{node.host.label()}: the checkpoint could not be written to {target}: "
            f"{said or 'it took too long'}: make room there."
        )
