"""Lists the files that a script wrote on the machines, and brings them here at the end.

The names come from the machines. Each name is checked before it becomes a path: it must lead below
the machine's folder in the run's folder. The number and the size of a machine's files have limits.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from boundary.answers import WorkFiles
from boundary.schema import Invalid
from contract.errors import UserError
from contract.text import pluralize
from launcher import remote
from launcher.collect import (
    LEAST,
    SECONDS,
    Lost,
    NotHere,
    Unwritable,
    gather_lines,
    move_in,
    receive,
    staging,
)
from launcher.machines.engine import Node, error_location, talk
from launcher.node.machine import file_sha256
from launcher.plan.code import WORK
from launcher.plan.files import CACHES

MOST_FILES = 2000  # of a machine
MOST_FOLDERS = 32_000
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that Linux accepts
SHOWN_NAMES = 5
# With these, git, Mercurial, direnv or an editor may run programs if somebody looks at their
# folder. A bare repository has a file HEAD.
TOOLS = {".git", ".hg", ".envrc", ".vscode", ".idea", ".devcontainer"}
# From within the folder, since a path from / would be too long for some names.
PUT = (
    'mkdir -p "$1" && cd "$1" || exit; case $2 in */*) mkdir -p "./${2%/*}" && cd "./${2%/*}" '
    '|| exit;; esac; head -c "$3" > .tandem-part && test "$(stat -c %s .tandem-part)" = "$3" && '
    'mv -T -- .tandem-part "${2##*/}"'
)


@dataclass(frozen=True)
class OutputFile:
    """A file of a run on a machine: its name below the folder that the script runs in, and its size
    and time, which only this machine's other times can be compared with."""

    name: str
    size: int
    modified_ns: int


@dataclass(frozen=True)
class Listing:
    """The files that a run wrote on a machine: the newest first, and how many there are. `skipped`:
    number and first names of everything else, by its kind. `links`: their targets."""

    files: list[OutputFile]
    count: int
    skipped: dict[str, tuple[int, list[str]]]
    links: dict[str, str]


def list_outputs(node: Node, run_folder: str, outputs: tuple[str, ...]) -> Listing:
    """List the files of a run in these folders of a machine. Raises NotHere."""
    work = f"{run_folder}/{WORK}/{node.host.name}"
    call = f"show_files({remote.MARK!r}, {work!a}, {[*outputs]!a})"
    try:
        return check_listing(remote.ask(node, "launcher.node.work", call, WorkFiles), outputs)
    except (OSError, UserError, Invalid) as error:
        raise NotHere(str(error).rstrip(".")) from None
    except Exception as error:  # a defect here is that machine's alone
        raise NotHere(
            f"its list caused an error on the control node: {error_location(error)}"
        ) from None


def check_listing(answer: WorkFiles, outputs: tuple[str, ...]) -> Listing:
    """Take the names that lead below these folders, and to files only."""
    files = {}
    for quoted, size, modified_ns in answer.files:
        name = unquote(quoted, errors="surrogateescape")
        if is_below(name, outputs):
            files[name] = OutputFile(name, size, modified_ns)
    # No file can be a folder, too: in this order, one that were would stand before its contents.
    names = sorted(files, key=lambda name: name.replace("/", "\0"))
    valid_files = [
        files[name]
        for name, following in zip(names, [*names[1:], ""])
        if not following.startswith(f"{name}/")
    ]
    skipped = {
        str(kind): (names.count, [unquote(name, errors="surrogateescape") for name in names.first])
        for kind, names in answer.others.items()
    }
    if odd := len(answer.files) - len(valid_files):
        skipped["names that lead out of the folder"] = odd, []
    newest_first = sorted(valid_files, key=lambda file: -file.modified_ns)
    links = {
        unquote(name, errors="surrogateescape"): unquote(target, errors="surrogateescape")
        for name, target in answer.links.items()
    }
    links = {name: target for name, target in links.items() if is_below(name, outputs)}
    return Listing(newest_first, answer.count - odd, skipped, links)


def is_below(name: str, outputs: tuple[str, ...]) -> bool:
    segments = name.split("/")
    return (
        not {"", ".", ".."} & {*segments}
        and "\0" not in name
        and len(os.fsencode(name)) <= LONGEST_PATH
        and all(len(os.fsencode(segment)) <= LONGEST_NAME for segment in segments)
        and any(output == "." or name.startswith(f"{output}/") for output in outputs)
    )


def show_names(names: Sequence[str], count: int = 0) -> str:
    """Spell the first of these names for people, with escapes for what cannot be printed."""
    shown = [
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
        for name in names[:SHOWN_NAMES]
    ]
    if (rest_count := max(count, len(names)) - len(shown)) > 0:
        shown.append(f"{rest_count:,} more")
    return ", ".join(shown)


def bring(
    nodes: dict[str, Node],
    run_folders: dict[str, str],
    outputs: tuple[str, ...],
    folder: Path,
    max_bytes: int,
) -> list[str]:
    """Bring the files that the run wrote into these folders of every machine, or without any into
    all, into the run's `folder`, up to `max_bytes` of each machine, the newest first. Returns
    sentences that count what came and what did not. Raises Unwritable."""
    hashes: dict[str, dict[str, str]] = {host: {} for host in run_folders}  # by name

    def bring_from(host: str) -> list[str]:
        node, run_folder = nodes[host], run_folders[host]
        return bring_from_one(node, run_folder, outputs, folder, max_bytes, hashes[host])

    lines = gather_lines(run_folders, bring_from, nodes)
    # Files that several machines wrote with the same contents are kept once, by the first machine.
    seen_files: set[tuple[str, str]] = set()
    for host, host_hashes in hashes.items():
        equal = [name for name, sha256 in host_hashes.items() if (name, sha256) in seen_files]
        seen_files.update(host_hashes.items())
        if equal:
            base = os.open(folder / WORK / host, os.O_RDONLY | os.O_CLOEXEC)
            for name in equal:
                os.unlink(name, dir_fd=base)
            os.close(base)
            count = pluralize(len(equal), "file")
            lines.append(f"{host}: {count} identical to another machine's, stored once")
    return lines


def bring_from_one(
    node: Node,
    run_folder: str,
    outputs: tuple[str, ...],
    folder: Path,
    room: int,
    came: dict[str, str],
) -> list[str]:
    """Bring one machine's files, up to `room` bytes, and note the hash of each that `came`."""
    host = node.host.name
    place = f"{WORK}/{host}"
    # Without OUTPUT= everything comes that the script wrote next to its code.
    try:
        listing = list_outputs(node, run_folder, outputs or (".",))
    except NotHere as error:
        return [f"{host}: the files that the script wrote were not copied: {error}."]
    # A file that is skipped is named with the reason: nothing is lost without a word.
    files, stays, total = list[OutputFile](), dict[str, list[str]](), listing.count
    for file in listing.files:
        # File systems of macOS and Windows, from which people look, ignore case.
        segments = file.name.casefold().split("/")
        if CACHES & {*segments}:
            total -= 1
        elif TOOLS & {*segments} or segments[-1] == "head":
            reason = "git or an editor could run programs because of them"
            stays.setdefault(reason, []).append(file.name)
        else:
            files.append(file)
    older = total - sum(map(len, stays.values())) - len(files[:MOST_FILES])
    parents, lost_reason = set[int](), ""  # hashes of folders, since names may be long
    for file in files[:MOST_FILES]:
        try:
            if lost_reason:  # each further file would wait for its time limit
                raise NotHere(lost_reason)
            parents.update(hash(str(parent)) for parent in PurePosixPath(file.name).parents)
            if len(parents) > MOST_FOLDERS:
                raise NotHere(f"in more than {MOST_FOLDERS:,} folders")
            with staging(folder) as scratch:
                fresh = scratch / "file"
                size = receive(node, f"{run_folder}/{place}", file.name, fresh, max(0, room))
                if size is None:
                    raise NotHere("gone meanwhile")
                if size > room:
                    raise NotHere("beyond the limit per machine, which KEEP= raises")
                sha256 = file_sha256(fresh)
                move_in(fresh, folder / place, file.name)
            came[file.name], room = sha256, room - size
        except Unwritable:
            raise
        except Exception as error:  # a defect here is that machine's alone
            reason = str(error) if isinstance(error, NotHere) else error_location(error)
            lost_reason = reason if isinstance(error, Lost) else lost_reason
            stays.setdefault(reason, []).append(file.name)
    stayed = {reason: (len(names), names) for reason, names in stays.items()}
    if older > 0:
        stayed[f"Tandem copies the {MOST_FILES:,} newest files of a machine"] = older, []
    stayed |= {kind: names for kind, names in listing.skipped.items() if kind != "sent"}
    lines = [f"{host}: {len(came):,} of {pluralize(total, 'file')} in {place}"] if total else []
    for reason, (count, names) in stayed.items():
        listed = f": {show_names(names, count)}" if names else ""
        counted = f"{host}: {pluralize(count, 'file')} not copied from {run_folder}/{place}"
        lines.append(f"{counted}, {reason}{listed}")
    return lines


def link(node: Node, folder: str, name: str, target: str) -> None:
    """Make a link of this name in a machine's folder, unless a file has the name there. Raises
    UserError."""
    make = 'cd "$1" && { [ ! -L "./$2" ] && [ -e "./$2" ] || ln -sfT -- "$3" "./$2"; }'
    argv = ["sh", "-c", make, "sh", folder, name, target]
    _, stderr, status = talk(node.start(argv), b"", SECONDS)
    if status != 0:
        raise UserError(
            f"{node.host.label()}: the link {folder}/{name} could not be made: "
            f"{stderr or 'it took too long'}."
        )


def put(node: Node, source: Path, size: int, folder: str, name: str) -> None:
    """Write a file of this name into a machine's folder, whole or not at all. Raises UserError."""
    # A checkpoint may be larger than memory, so it is mapped. (An empty file cannot be.)
    with source.open("rb") as file:
        contents = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
    process = node.start(["sh", "-c", PUT, "sh", folder, name, str(size)])
    _, stderr, status = talk(process, contents, SECONDS * (1 + size // LEAST))
    if status != 0:
        raise UserError(
            f"{node.host.label()}: the checkpoint could not be written to {folder}/{name}: "
            f"{stderr or 'it took too long'}: free space on that disk."
        )
