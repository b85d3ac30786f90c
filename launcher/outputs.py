"""Lists the files that a script wrote on the machines, and copies them to the control node at the
end of a run. The module checkpoints.py finds checkpoints among these files, and gives them to other
machines by `write_file` and `make_link`.

The names come from the machines. Each name is checked before it becomes a path: the name must
lead below the machine's folder in the run's folder. The number and size of a machine's files have
limits.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from boundary.answers import WorkFiles
from boundary.schema import Invalid
from contract.errors import UserError
from contract.text import pluralize
from launcher import remote
from launcher.collect import (
    MIN_BYTES,
    SLOWEST_SECONDS,
    MachineLost,
    NotCopied,
    Unwritable,
    map_hosts,
    move_in,
    receive_file,
    staging,
)
from launcher.machines.engine import Node, error_location, talk
from launcher.node.machine import file_sha256
from launcher.plan.code import WORK
from launcher.plan.files import CACHES

MOST_FILES = 2000  # that are copied from a machine
MOST_FOLDERS = 32_000  # on the control node's disk, for the files of a machine
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that Linux accepts
SHOWN_NAMES = 5  # in a sentence; then it says how many more there are
# If somebody looks at a folder that has these, git, Mercurial, direnv or an editor may run programs
# of the machine. A bare git repository has a file HEAD.
PROGRAM_STARTERS = {".git", ".hg", ".envrc", ".vscode", ".idea", ".devcontainer"}
# $1 is a folder, $2 the file's name below it, $3 its size. For the name a/b.pt the command makes
# the folder a. The file gets its name once it is complete. (cd: a path from / may be too long.)
WRITE = (
    'mkdir -p "$1" && cd "$1" || exit; case $2 in */*) mkdir -p "./${2%/*}" && cd "./${2%/*}" '
    '|| exit;; esac; head -c "$3" > .tandem-part && test "$(stat -c %s .tandem-part)" = "$3" && '
    'mv -T -- .tandem-part "${2##*/}"'
)


@dataclass(frozen=True)
class OutputFile:
    """A file that a run wrote on a machine. `name`: its path below the folder that the script runs
    in. `modified_ns`: by that machine's clock, so only times of one machine can be compared."""

    name: str
    size: int
    modified_ns: int


class SkippedFiles(NamedTuple):
    """The number of files that are not copied for one reason, and the names of the first few."""

    file_count: int
    names: list[str]


@dataclass(frozen=True)
class OutputListing:
    """The files that a run wrote on a machine, the newest first. `count`: of all files, also if the
    answer lists only some. `skipped`: links, sent files and so on, by kind. `links`: {name:
    target}."""

    files: list[OutputFile]
    count: int
    skipped: dict[str, SkippedFiles]
    links: dict[str, str]


def list_outputs(node: Node, run_folder: str, outputs: tuple[str, ...]) -> OutputListing:
    """List the files of a run in these folders of a machine. Raises NotCopied."""
    work_folder = f"{run_folder}/{WORK}/{node.host.name}"
    call = f"show_files({remote.MARK!r}, {work_folder!a}, {[*outputs]!a})"
    try:
        return check_listing(remote.ask(node, "launcher.node.work", call, WorkFiles), outputs)
    except (OSError, UserError, Invalid) as error:
        raise NotCopied(str(error).rstrip(".")) from None
    except Exception as error:  # whatever this machine's answer breaks concerns only its files
        raise NotCopied(
            f"its list caused an error on the control node: {error_location(error)}"
        ) from None


def check_listing(answer: WorkFiles, outputs: tuple[str, ...]) -> OutputListing:
    """Return the listing in a machine's answer, with only the files below the folders `outputs`."""

    def read_name(quoted: str) -> str:
        return unquote(quoted, errors="surrogateescape")  # a name may be any bytes, not only UTF-8

    files = {}
    for quoted, size, modified_ns in answer.files:
        name = read_name(quoted)
        if is_below(name, outputs):
            files[name] = OutputFile(name, size, modified_ns)
    # A machine may list both `a` and `a/b`, of which `a` cannot be a file. With "\0" for "/", which
    # sorts before every other character, `a` stands directly before its contents: a, a/b, a-b.
    names = sorted(files, key=lambda name: name.replace("/", "\0"))
    valid_files = [
        files[name]
        for name, following in zip(names, [*names[1:], ""])
        if not following.startswith(f"{name}/")
    ]
    skipped = {
        str(kind): SkippedFiles(group.count, [read_name(name) for name in group.first])
        for kind, group in answer.others.items()
    }
    if refused_count := len(answer.files) - len(valid_files):
        skipped["names that lead out of the folder"] = SkippedFiles(refused_count, [])
    newest_first = sorted(valid_files, key=lambda file: -file.modified_ns)
    links = {read_name(name): read_name(target) for name, target in answer.links.items()}
    links = {name: target for name, target in links.items() if is_below(name, outputs)}
    return OutputListing(newest_first, answer.count - refused_count, skipped, links)


def is_below(name: str, outputs: tuple[str, ...]) -> bool:
    """Return whether a name leads below one of the folders `outputs` ("." for any), and can be a
    path on Linux."""
    segments = name.split("/")
    return (
        not {"", ".", ".."} & {*segments}
        and "\0" not in name
        and len(os.fsencode(name)) <= LONGEST_PATH
        and all(len(os.fsencode(segment)) <= LONGEST_NAME for segment in segments)
        and any(output == "." or name.startswith(f"{output}/") for output in outputs)
    )


def show_names(names: Sequence[str], count: int = 0) -> str:
    """Spell the first of these names for people, with escapes for what cannot be printed. `count`:
    how many names there are, if not all of them are in `names`."""
    shown = [
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
        for name in names[:SHOWN_NAMES]
    ]
    if (hidden_count := max(count, len(names)) - len(shown)) > 0:
        shown.append(f"{hidden_count:,} more")
    return ", ".join(shown)


def fetch_outputs(
    nodes: dict[str, Node],
    run_folders: dict[str, str],
    outputs: tuple[str, ...],
    folder: Path,
    max_bytes: int,
) -> list[str]:
    """Copy the files that the run wrote on the machines into the run's `folder`, the newest first,
    up to `max_bytes` of each machine. `run_folders`: the run's folder on each machine. `outputs`:
    the folders with the files; all if empty. Returns sentences that count what was copied and what
    was not. Raises Unwritable."""
    hashes: dict[str, dict[str, str]] = {host: {} for host in run_folders}  # by the files' names

    def fetch_from(host: str) -> list[str]:
        node, run_folder = nodes[host], run_folders[host]
        return fetch_from_machine(node, run_folder, outputs, folder, max_bytes, hashes[host])

    sentences = map_hosts(run_folders, fetch_from, nodes)
    # Files that several machines wrote with the same contents are kept once, by the first machine.
    stored_files: set[tuple[str, str]] = set()  # (name, hash)
    for host, host_hashes in hashes.items():
        equal = [name for name, sha256 in host_hashes.items() if (name, sha256) in stored_files]
        stored_files.update(host_hashes.items())
        if equal:
            # Names are relative to a descriptor: a path from / may be too long.
            base_fd = os.open(folder / WORK / host, os.O_RDONLY | os.O_CLOEXEC)
            for name in equal:
                os.unlink(name, dir_fd=base_fd)
            os.close(base_fd)
            count = pluralize(len(equal), "file")
            sentences.append(f"{host}: {count} identical to another machine's, stored once")
    return sentences


def fetch_from_machine(
    node: Node,
    run_folder: str,
    outputs: tuple[str, ...],
    folder: Path,
    max_bytes: int,
    hashes: dict[str, str],
) -> list[str]:
    """Copy one machine's files, up to `max_bytes`, and note the hash of each copy in `hashes`, by
    name. Returns sentences as fetch_outputs does. Raises Unwritable."""
    host = node.host.name
    work_folder = f"{WORK}/{host}"
    # Without OUTPUT= everything is copied that the script wrote next to its code.
    try:
        listing = list_outputs(node, run_folder, outputs or (".",))
    except NotCopied as error:
        return [f"{host}: the files that the script wrote were not copied: {error}."]

    # Choose the files. The user reads a reason for each file that is not copied, except caches.
    # `skipped`: the names of files by this reason.
    files, skipped, total = list[OutputFile](), dict[str, list[str]](), listing.count
    for file in listing.files:
        # File systems of macOS and Windows, from which people look, ignore case.
        segments = file.name.casefold().split("/")
        if CACHES & {*segments}:
            total -= 1
        elif PROGRAM_STARTERS & {*segments} or segments[-1] == "head":
            reason = "git or an editor could run programs because of them"
            skipped.setdefault(reason, []).append(file.name)
        else:
            files.append(file)
    # `total` also counts files that the machine's answer does not list.
    older_count = total - sum(map(len, skipped.values())) - len(files[:MOST_FILES])

    # Copy the files one by one. A file that fails does not keep the next one from being copied.
    room_bytes = max_bytes
    folder_hashes, lost_reason = set[int](), ""  # hashes, since names of folders may be long
    for file in files[:MOST_FILES]:
        try:
            if lost_reason:  # each further file would wait for its time limit
                raise NotCopied(lost_reason)
            folder_hashes.update(hash(str(parent)) for parent in PurePosixPath(file.name).parents)
            if len(folder_hashes) > MOST_FOLDERS:
                raise NotCopied(f"in more than {MOST_FOLDERS:,} folders")
            with staging(folder) as scratch:
                fresh = scratch / "file"
                source = f"{run_folder}/{work_folder}"
                size = receive_file(node, source, file.name, fresh, max(0, room_bytes))
                if size is None:
                    raise NotCopied("gone meanwhile")
                if size > room_bytes:
                    raise NotCopied("beyond the limit per machine, which KEEP= raises")
                sha256 = file_sha256(fresh)
                move_in(fresh, folder / work_folder, file.name)
            hashes[file.name] = sha256
            room_bytes -= size
        except Unwritable:
            raise
        except Exception as error:  # whatever this machine's answer breaks concerns only its files
            reason = str(error) if isinstance(error, NotCopied) else error_location(error)
            if isinstance(error, MachineLost):
                lost_reason = reason
            skipped.setdefault(reason, []).append(file.name)

    # Report what was copied, and per reason what was not.
    skipped_by_reason = {
        reason: SkippedFiles(len(names), names) for reason, names in skipped.items()
    }
    if older_count > 0:
        limit = f"Tandem copies the {MOST_FILES:,} newest files of a machine"
        skipped_by_reason[limit] = SkippedFiles(older_count, [])
    # Files that the control node sent, and that the script did not change, are here already.
    others = {kind: group for kind, group in listing.skipped.items() if kind != "sent"}
    skipped_by_reason |= others
    copied = f"{host}: {len(hashes):,} of {pluralize(total, 'file')} in {work_folder}"
    sentences = [copied] if total else []
    for reason, (file_count, names) in skipped_by_reason.items():
        listed = f": {show_names(names, file_count)}" if names else ""
        counted = (
            f"{host}: {pluralize(file_count, 'file')} not copied from {run_folder}/{work_folder}"
        )
        sentences.append(f"{counted}, {reason}{listed}")
    return sentences


def make_link(node: Node, folder: str, name: str, target: str) -> None:
    """Make a link of this name in a machine's folder. The link replaces an older link, but no file.
    Raises UserError."""
    script = 'cd "$1" && { [ ! -L "./$2" ] && [ -e "./$2" ] || ln -sfT -- "$3" "./$2"; }'
    argv = ["sh", "-c", script, "sh", folder, name, target]
    _, stderr, status = talk(node.start(argv), b"", SLOWEST_SECONDS)
    if status != 0:
        raise UserError(
            f"{node.host.label()}: the link {folder}/{name} could not be made: "
            f"{stderr or 'it took too long'}."
        )


def write_file(node: Node, source: Path, size: int, folder: str, name: str) -> None:
    """Write a file of this name into a machine's folder, whole or not at all. Raises UserError."""
    # A checkpoint may be larger than memory, so it is mapped. (An empty file cannot be mapped.)
    with source.open("rb") as file:
        contents = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
    process = node.start(["sh", "-c", WRITE, "sh", folder, name, str(size)])
    _, stderr, status = talk(process, contents, SLOWEST_SECONDS * (1 + size // MIN_BYTES))
    if status != 0:
        raise UserError(
            f"{node.host.label()}: the checkpoint could not be written to {folder}/{name}: "
            f"{stderr or 'it took too long'}: free space on that disk."
        )
