"""Copies a run's records, checkpoints and results from its machines to the control node, after the
run. The guards have sent most records before (watch/guards.py), so only their ends are fetched. The
modules outputs.py and checkpoints.py copy a script's own files with the same tools.

A machine is not trusted with names, types or sizes. The launcher asks for one file of the contract
(docs/run-directory.md) at a time, and makes its name from the machine's name and ranks. The machine
answers with bytes, so no link, device or folder can arrive, and no other machine's file.
`receive_file` counts the bytes and writes them to a file in an empty folder (`staging`). The
launcher then moves the file into the run's folder.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from contract import records
from contract.errors import UserError
from launcher.background import MIB
from launcher.folders import disk_free, relative
from launcher.machines.engine import (
    Node,
    Process,
    TimedOut,
    close_all,
    error_location,
    stream_output,
    talk,
)

CHECKPOINT = re.compile(r"step-([0-9]{1,18})\.pt")  # step-00001200.pt, as the trainer names it
LIST_SECONDS = 20.0  # for a machine's list of checkpoints
# At least MIN_BYTES have to arrive in each SLOWEST_SECONDS, so a file of n MiB takes n / 4 + 1
# minutes at most, whoever sends it. (Eight machines that share 10 Mbit/s have 9 MiB a minute each.)
SLOWEST_SECONDS, MIN_BYTES = 60.0, 4 * MIB
# The line before the file's first byte: a .bashrc may print before it.
MARK = b"tandem-file\n"
MAX_GREETING_BYTES = 1 << 16  # what a .bashrc may print
# $1 is the folder, $2 the name in it, $3 the number of bytes, and $4 the first byte counted from 1.
# The command changes into the folder, since a path from / would be too long for some names.
SEND = (
    'cd "$1" 2>/dev/null || exit 3; '
    'test -e "$2" || test -L "$2" || exit 3; test -f "$2" && test ! -L "$2" || exit 4; '
    'test -r "$2" || exit 5; exec 3<"$2"; echo tandem-file; tail -c "+$4" <&3 | head -c "$3"'
)
ABSENT, IRREGULAR, UNREADABLE = 3, 4, 5  # the exit codes of SEND, if it sends no file
# These errors are about a file's name; a disk that works gives them, too.
NAME_ERRORS = (
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG),
    *(errno.EINVAL, errno.EILSEQ),
)
# Bytes of the control node's disk that checkpoints leave to the last logs and records of the run.
DISK_RESERVE = 256 * MIB


class NotCopied(Exception):
    """A file did not arrive; the text says why, for a person."""


class MachineLost(NotCopied):
    """No other file will arrive either: the connection is gone, or what answered at its far end."""


class TooLarge(NotCopied):
    """A checkpoint is larger than the control node's disk has room for."""


class Unwritable(Exception):
    """The control node's own disk cannot be written to; the text says why."""


# ---- records ----


def list_record_files(host: str, attempts: list[dict[str, Any]]) -> list[str]:
    """List the names of the files that a machine may have written, below the run's folder.
    `attempts`: those of attempts.json."""
    names = []
    # A name has the number of a rank, and a machine may have other ranks in each attempt.
    for entry in attempts:
        attempt, ranks = entry["attempt"], entry.get("ranks", {}).get(host)
        if ranks is None:  # the machine had no part in this attempt
            continue
        names.append(f"nodes/{host}/{records.machine(attempt)}")
        for rank in ranks:
            names.append(f"nodes/{host}/{records.steps(rank, attempt)}")
            names.append(f"samples/rank{rank}.{attempt}.csv")
    return names


def fetch_records(
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    attempts: list[dict[str, Any]],
    folder: Path,
    max_bytes: int,
    extra_files: tuple[str, ...] = (),
) -> list[str]:
    """Copy what every machine recorded, and its `extra_files`, into the run's `folder`, up to
    `max_bytes` of a file. `run_folders`: the run's folder on each machine. Returns a sentence for
    each file that did not arrive. Raises Unwritable."""

    def fetch_from(host: str) -> list[str]:
        node, run_folder = nodes[host], run_folders[host]
        names = [f"nodes/{host}/{name}" for name in extra_files]
        names += list_record_files(host, attempts)
        return fetch_each(
            host, names, lambda name: fetch_record(node, run_folder, name, folder, max_bytes)
        )

    return map_hosts(run_folders, fetch_from, nodes)


def fetch_record(node: Node, run_folder: str, name: str, folder: Path, max_bytes: int) -> list[str]:
    """Copy what the run's `folder` lacks of a record. Returns [], or a sentence if `max_bytes` cut
    the record short. Raises NotCopied, Unwritable."""
    target, source = folder / name, f"{run_folder}/{name}"
    # The first lines of a record are useful without the last ones; half of a JSON file is not.
    has_lines = not name.endswith(".json")
    with staging(folder) as scratch:
        fresh = scratch / "file"
        # The guard has sent the beginning during the run: only what follows is fetched.
        begin = target.stat().st_size if has_lines and target.exists() else 0
        limit = max(0, max_bytes - begin)
        size = receive_file(node, run_folder, name, fresh, limit, begin)
        if size is None:
            return []
        sentences = []
        if size > limit:
            # These words stand in the middle of both sentences below.
            excess = f"larger than {max_bytes // MIB} MiB (KEEP= raises this limit); the whole file"
            if not has_lines:
                raise NotCopied(f"it is {excess} is {source} on that machine")
            # Cut the file after its last complete line. Lines are far shorter than 1 MiB, so that
            # line ends within the last MiB.
            with fresh.open("r+b") as file:
                near_end = max(0, limit - MIB)
                file.seek(near_end)
                file.truncate(near_end + file.read(limit - near_end).rfind(b"\n") + 1)
            sentences.append(
                f"{node.host.name}: only the beginning of {name} was copied: it is {excess} is "
                f"{source} on that machine."
            )
        if not begin:
            move_in(fresh, folder, name)
            return sentences
        # Add all of the fetched bytes to the end of the copy, or none: half a line is no record.
        descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "wb") as file, fresh.open("rb") as arrived:
            old_size = os.fstat(descriptor).st_size
            try:
                shutil.copyfileobj(arrived, file)
                file.flush()
            except OSError:
                os.ftruncate(descriptor, old_size)
                raise
        return sentences


# ---- machine by machine, file by file ----


def map_hosts(
    hosts: Iterable[str], fetch: Callable[[str], list[str]], nodes: dict[str, Node]
) -> list[str]:
    """Call `fetch` for several hosts at a time, and return all of its sentences. Ctrl-C closes the
    connections `nodes`, so that no thread waits for a machine any more."""
    # Eight at a time: all files arrive over the control node's one cable, on its one disk.
    with ThreadPoolExecutor(max_workers=8) as pool:
        try:
            return [sentence for sentences in pool.map(fetch, hosts) for sentence in sentences]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            close_all(nodes)
            raise


def fetch_each(host: str, names: Iterable[str], fetch: Callable[[str], list[str]]) -> list[str]:
    """Call `fetch` for each of a machine's files, until the machine is lost. Returns the sentences
    of `fetch`, and a sentence for each file that did not arrive. Raises Unwritable."""
    sentences: list[str] = []
    for name in names:
        try:
            sentences += fetch(name)
        except MachineLost as error:
            return [*sentences, f"{host}: {name} and later files were not copied: {error}."]
        except Unwritable:
            raise
        except Exception as error:  # whatever this machine's answer breaks concerns only its files
            reason = error if isinstance(error, NotCopied) else error_location(error)
            sentences.append(f"{host}: {name} was not copied: {reason}.")
    return sentences


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Make an empty folder next to the run's files, and remove it after the `with` block. Raises
    Unwritable for every OSError in the block: receive_file turns a machine's errors into NotCopied,
    so that only the control node's disk raises OSError there."""
    scratch = None
    try:
        scratch = tempfile.mkdtemp(prefix=".collect-", dir=folder)
        yield Path(scratch)
    except OSError as error:
        raise Unwritable(error.strerror or str(error)) from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def move_in(fresh: Path, folder: Path, name: str) -> None:
    """Move a file that arrived to its place below the folder. Raises OSError, and NotCopied for a
    name that this disk cannot have: a machine may call a folder what was a file before."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Names are relative to a descriptor, since a path from / would be too long for some names.
        base_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # For a/b/c.pt the parents are a/b, a and `.`: make a first, and then a/b.
            *parents, _current = PurePosixPath(name).parents
            for parent in reversed(parents):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=base_fd)
            os.replace(fresh, name, dst_dir_fd=base_fd)
        finally:
            os.close(base_fd)
    except OSError as error:
        if error.errno not in NAME_ERRORS:
            raise
        raise NotCopied(
            f"on the control node, something else has its name ({error.strerror})"
        ) from None


def receive_file(
    node: Node, folder: str, name: str, target: Path, limit: int, begin: int = 0
) -> int | None:
    """Write a machine's file, from byte `begin` (0 or more) on, to the new file `target`. Writes at
    most one byte more than `limit`, which shows that the file is larger. Returns the bytes written,
    or None if the machine has no such file. Raises NotCopied, and OSError if `target` cannot be
    written."""
    try:
        words = [folder, name, str(limit + 1), str(begin + 1)]
        process = node.start(["sh", "-c", SEND, "sh", *words])
    except (OSError, UserError) as error:
        raise MachineLost(str(error).rstrip(".")) from None
    size = 0
    try:
        with target.open("xb") as file:
            for piece in read_content(process):
                size += file.write(piece[: limit + 1 - size])
                if size > limit:
                    return size
        status = process.wait()
        stderr = process.stderr()
    finally:
        process.close()
    if status == ABSENT:
        return None
    if status == IRREGULAR:
        raise NotCopied("it is not a regular file on that machine")
    if status == UNREADABLE:
        raise NotCopied("the run's user cannot read it on that machine")
    if status != 0:
        raise MachineLost(f"the connection to the machine broke {stderr}".strip())
    return size


def read_content(process: Process) -> Iterator[bytes]:
    """Yield what a process of SEND prints after MARK, piece by piece. Raises NotCopied, also for an
    OSError of the connection: receive_file raises OSError only for its `target`."""
    greeting, has_begun = b"", False
    try:
        for piece in stream_output(process, SLOWEST_SECONDS, renewal_bytes=MIN_BYTES):
            if not has_begun:
                # The mark may arrive in two pieces, so all pieces so far are searched for the mark.
                greeting, mark, piece = (greeting + piece).partition(MARK)
                has_begun = bool(mark)
                if len(greeting) > MAX_GREETING_BYTES:
                    raise MachineLost("the machine sent something else")
            if piece:
                yield piece
    except TimedOut:
        text = f"the machine sent less than {MIN_BYTES // MIB} MiB in {SLOWEST_SECONDS:g} s"
        raise MachineLost(text) from None
    except OSError as error:
        raise NotCopied(error.strerror or str(error)) from None


def fetch_file(node: Node, run_folder: str, name: str, folder: Path) -> list[Path]:
    """Copy one file of the run, and return its path; [] if the machine does not have it. Raises
    TooLarge, NotCopied, Unwritable."""
    with staging(folder) as scratch:
        room_bytes = max(0, shutil.disk_usage(folder).free - DISK_RESERVE)
        fresh = scratch / "file"
        size = receive_file(node, run_folder, name, fresh, room_bytes)
        if size is None:
            return []
        if size > room_bytes:
            raise TooLarge(
                f"the control node has only {room_bytes // MIB} MiB for {Path(name).name}"
            )
        move_in(fresh, folder, name)
    return [folder / name]


# ---- checkpoints and results of the trainer ----


def list_checkpoints(
    nodes: dict[str, Node], run_folders: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the names of the files in each machine's folder of checkpoints, by machine. Machines
    that do not answer are missing."""
    # Sizes are not asked for: a size that a machine states would not be believed.
    names = {}
    for host, folder in run_folders.items():
        if host not in nodes:
            continue
        # A machine may freeze, send nonsense or go away: other machines have the same checkpoints.
        with contextlib.suppress(Exception):
            process = nodes[host].start(["ls", "-1", f"{folder}/checkpoints/{host}"])
            output, _, status = talk(process, b"", LIST_SECONDS)
            if status == 0:
                names[host] = output.decode(errors="replace").split()
    return names


def newest_by_host(names: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the name of the newest checkpoint of each machine that has any. The machine with the
    newest of all comes first."""
    newest: dict[str, tuple[int, str]] = {}  # {machine: (step, name of the file)}
    for host, host_names in names.items():
        matches = [match for name in host_names if (match := CHECKPOINT.fullmatch(name))]
        if matches:
            newest[host] = max((int(match[1]), match[0]) for match in matches)
    hosts = sorted(newest, key=lambda host: newest[host][0], reverse=True)
    return {host: newest[host][1] for host in hosts}


def fetch_best_and_newest(
    names: dict[str, list[str]],
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    folder: Path,
) -> tuple[list[Path], list[str]]:
    """Copy the best and the newest of the checkpoints with these `names` from one machine. Returns
    the paths of the copies, and sentences on files that did not arrive. Raises Unwritable, also if
    there is no room for any."""
    paths: list[Path] = []
    problems: list[str] = []
    no_room: list[TooLarge] = []

    def fetch(host: str, name: str) -> list[str]:
        try:
            paths.extend(fetch_file(nodes[host], run_folders[host], name, folder))
        except TooLarge as error:
            no_room.append(error)
            raise
        return []

    # A machine may claim a checkpoint that it does not have, or send an endless file. So the
    # machines are tried in turn, until one delivers its newest checkpoint.
    for host, newest in newest_by_host(names).items():
        newest_path = f"checkpoints/{host}/{newest}"  # below the run's folder
        best_paths = [f"checkpoints/{host}/best.pt"] if "best.pt" in names[host] else []
        problems += fetch_each(host, [newest_path, *best_paths], functools.partial(fetch, host))
        if folder / newest_path in paths:
            break
    if no_room and not paths:
        raise Unwritable(str(no_room[-1]))
    return paths, problems


def pass_on_newest(
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    folder: Path,
    give: Callable[[Path, int, str], None],
) -> bool:
    """Fetch the trainer's newest checkpoint from one of these machines, and `give` the file, with
    its size and its name, to another machine. Returns whether one arrived. Raises Unwritable."""
    # A machine may not have what it lists, so the next one is tried then.
    newest = newest_by_host(list_checkpoints(nodes, run_folders))
    for host, name in newest.items():
        room_bytes = max(0, disk_free() - DISK_RESERVE)
        path = f"checkpoints/{host}/{name}"
        with staging(folder) as scratch:
            fresh = scratch / "file"
            try:
                size = receive_file(nodes[host], run_folders[host], path, fresh, room_bytes)
            except NotCopied:
                continue
            if size and size <= room_bytes:
                give(fresh, size, name)
                return True
    return False


def fetch_results(
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    host: str,
    names: list[str],
    folder: Path,
) -> tuple[list[str], bool]:
    """Copy the files `names` that the trainer wrote on `host` for --predict and --extract. Returns
    sentences on all files, and whether all arrived. Raises Unwritable."""
    paths: list[Path] = []

    def fetch(name: str) -> list[str]:
        if host not in nodes:
            raise MachineLost("the machine does not answer")
        arrived = fetch_file(nodes[host], run_folders[host], name, folder)
        if not arrived:
            raise NotCopied("it is gone")
        paths.extend(arrived)
        return []

    problems = fetch_each(host, names, fetch)
    return [*problems, *(f"results {relative(path)}" for path in paths)], not problems
