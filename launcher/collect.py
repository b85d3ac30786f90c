"""Brings a run's files from the nodes to the control node. Of records it fetches only what the
copies lack (launcher/watch/guards.py). It uses other channels than the guards, so that no lease and
no stop waits for files.

A node is not trusted with names, types or sizes. The launcher asks for one file of the contract
(docs/run-directory.md) at a time, by a name that it makes from the node's name and ranks, and the
node answers with bytes. Therefore no link, device or folder can arrive, and no file of another
node. The bytes are counted into an empty folder, and then added to the run's folder.
"""

from __future__ import annotations

import contextlib
import errno
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
from launcher.machines.engine import Node, TimedOut, close_all, error_location, stream_output, talk

CHECKPOINT = re.compile(r"step-([0-9]{1,18})\.pt")
LIST_SECONDS = 20.0
# At least this much has to arrive every 60 s, so a file of n MiB takes n / 4 + 1 minutes at most,
# whoever sends it. (Eight machines that share 10 Mbit/s have 9 MiB a minute each.)
SECONDS, LEAST = 60.0, 4 * MIB
# A .bashrc may print before the file begins.
MARK = b"tandem-file\n"
GREETING = 1 << 16
# From within the folder, since a path from / would be too long for some names.
SEND = (
    'cd "$1" 2>/dev/null || exit 3; '
    'test -e "$2" || test -L "$2" || exit 3; test -f "$2" && test ! -L "$2" || exit 4; '
    'test -r "$2" || exit 5; exec 3<"$2"; echo tandem-file; tail -c "+$4" <&3 | head -c "$3"'
)
ABSENT, IRREGULAR, UNREADABLE = 3, 4, 5
# Errors about a name, on a disk that works.
NAMES = (
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG),
    *(errno.EINVAL, errno.EILSEQ),
)
# Space that the run's own last files need on the disk that the checkpoints go to.
DISK_LEFT = 256 * MIB


class NotHere(Exception):
    """A file did not arrive; the text says why, for a person."""


class Lost(NotHere):
    """No other file will arrive either: the connection is gone, or what answered at its far end."""


class TooLarge(NotHere):
    """A checkpoint is larger than this machine's disk has room for."""


class Unwritable(Exception):
    """This machine's own disk cannot be written to; the text says why."""


def recorded_files(host: str, attempts: list[dict[str, Any]]) -> list[str]:
    """List the names of the files that a node may have written, below the run's folder."""
    names = []
    # A name has the number of a rank, and a node may have other ranks in each attempt.
    for entry in attempts:
        attempt, ranks = entry["attempt"], entry.get("ranks", {}).get(host)
        if ranks is None:  # the node had no part in this attempt
            continue
        names.append(f"nodes/{host}/{records.machine(attempt)}")
        for rank in ranks:
            names.append(f"nodes/{host}/{records.steps(rank, attempt)}")
            names.append(f"samples/rank{rank}.{attempt}.csv")
    return names


def bring(
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    attempts: list[dict[str, Any]],
    folder: Path,
    max_bytes: int,
    more_files: tuple[str, ...] = (),
) -> list[str]:
    """Bring what every node recorded, and `more_files` of each, up to `max_bytes` of a file.
    `run_folders`: the run's folder on each node. Returns a sentence for each file that did not
    arrive. Raises Unwritable."""

    def bring_from(host: str) -> list[str]:
        names = [f"nodes/{host}/{name}" for name in more_files] + recorded_files(host, attempts)
        return one_by_one(host, names, lambda name: bring_record(host, name))

    def bring_record(host: str, name: str) -> list[str]:
        target, source = folder / name, f"{run_folders[host]}/{name}"
        by_lines = not name.endswith(".json")  # the beginning is useful without the end
        with staging(folder) as scratch:
            fresh = scratch / "file"
            # The guard sent the beginning during the run: only what follows is fetched.
            begin = target.stat().st_size if by_lines and target.exists() else 0
            limit = max(0, max_bytes - begin)
            size = receive(nodes[host], run_folders[host], name, fresh, limit, begin)
            if size is None:
                return []
            lines = []
            if size > limit:
                excess = (
                    f"larger than {max_bytes // MIB} MiB (KEEP= raises this limit); the whole file"
                )
                if not by_lines:
                    raise NotHere(f"it is {excess} is {source} on that machine")
                with fresh.open("r+b") as file:  # end with the last complete line
                    near_end = max(0, limit - MIB)
                    file.seek(near_end)
                    file.truncate(near_end + file.read(limit - near_end).rfind(b"\n") + 1)
                lines.append(
                    f"{host}: only the beginning of {name} was copied: it is {excess} is "
                    f"{source} on that machine."
                )
            if not begin:
                move_in(fresh, folder, name)
                return lines
            # Add it to the end of the file, whole or not at all.
            descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(descriptor, "wb") as file, fresh.open("rb") as arrived:
                old_size = os.fstat(descriptor).st_size
                try:
                    shutil.copyfileobj(arrived, file)
                    file.flush()
                except OSError:
                    os.ftruncate(descriptor, old_size)
                    raise
            return lines

    return gather_lines(run_folders, bring_from, nodes)


def one_by_one(host: str, names: Iterable[str], work: Callable[[str], list[str]]) -> list[str]:
    """Do this work for each of a machine's files. Return its sentences, and a sentence for each
    file that did not arrive. Stop once the machine is lost. Raises Unwritable."""
    lines: list[str] = []
    for name in names:
        try:
            lines += work(name)
        except Lost as error:
            return [*lines, f"{host}: {name} and later files were not copied: {error}."]
        except Unwritable:
            raise
        except Exception as error:  # a defect here is that machine's alone
            reason = error if isinstance(error, NotHere) else error_location(error)
            lines.append(f"{host}: {name} was not copied: {reason}.")
    return lines


def gather_lines(
    hosts: Iterable[str], work: Callable[[str], list[str]], nodes: dict[str, Node]
) -> list[str]:
    """Do this work for several hosts at a time, and return all of its sentences. Ctrl-C closes the
    nodes' connections: no thread waits for a machine any more."""
    # Few at a time: this machine's disk and its one cable take everything.
    with ThreadPoolExecutor(max_workers=8) as pool:
        try:
            return [line for lines in pool.map(work, hosts) for line in lines]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            close_all(nodes)
            raise


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Make an empty folder next to the run's files, and remove it afterwards. Raises Unwritable for
    every OSError: an error of the other side has become a NotHere before it gets here."""
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
    """Move what arrived to its place below the folder. Raises OSError, and NotHere for a name that
    this disk cannot have: a machine may call a folder what was a file before."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        base = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:  # below this descriptor, since a path from / would be too long for some names
            for parent in [*PurePosixPath(name).parents][-2::-1]:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=base)
            os.replace(fresh, name, dst_dir_fd=base)
        finally:
            os.close(base)
    except OSError as error:
        if error.errno not in NAMES:
            raise
        raise NotHere(
            f"on the control node, something else has its name ({error.strerror})"
        ) from None


def receive(
    node: Node, folder: str, name: str, target: Path, limit: int, begin: int = 0
) -> int | None:
    """Write the file of this name in a node's folder, from byte `begin` on, to `target`, at most
    one byte more than `limit`. Returns the bytes written, None if the node has no such file. Raises
    NotHere, and OSError if `target` cannot be written."""
    try:
        words = [folder, name, str(limit + 1), str(begin + 1)]
        process = node.start(["sh", "-c", SEND, "sh", *words])
    except (OSError, UserError) as error:
        raise Lost(str(error).rstrip(".")) from None

    def read_content() -> Iterator[bytes]:
        head, has_begun = b"", False
        try:
            for piece in stream_output(process, SECONDS, renewed=LEAST):
                if not has_begun:
                    head, mark, piece = (head + piece).partition(MARK)
                    has_begun = bool(mark)
                    if len(head) > GREETING:
                        raise Lost("the machine sent something else")
                if piece:
                    yield piece
        except TimedOut:
            text = f"the machine sent less than {LEAST // MIB} MiB in {SECONDS:g} s"
            raise Lost(text) from None
        except OSError as error:
            raise NotHere(error.strerror or str(error)) from None

    # One byte beyond the limit is read: it says that the file is larger.
    size = 0
    try:
        with target.open("xb") as file:
            for piece in read_content():
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
        raise NotHere("it is not a regular file on that machine")
    if status == UNREADABLE:
        raise NotHere("the run's user cannot read it on that machine")
    if status != 0:
        raise Lost(f"the connection to the machine broke {stderr}".strip())
    return size


def checkpoints(nodes: dict[str, Node], run_folders: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of the checkpoints that each machine holds."""
    # Without the number of bytes: a size that a machine states is not believed.
    names = {}
    for host, folder in run_folders.items():
        if host not in nodes:
            continue
        # A machine may freeze, lie or go away: the other machines hold the same checkpoints.
        with contextlib.suppress(Exception):
            process = nodes[host].start(["ls", "-1", f"{folder}/checkpoints/{host}"])
            output, _, status = talk(process, b"", LIST_SECONDS)
            if status == 0:
                names[host] = output.decode(errors="replace").split()
    return names


def newest(names: list[str]) -> tuple[int, str] | None:
    """Return step and name of the latest checkpoint among file names."""
    steps = [(int(match[1]), name) for name in names if (match := CHECKPOINT.fullmatch(name))]
    return max(steps, default=None)


def best_and_last(
    names: dict[str, list[str]],
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    folder: Path,
) -> tuple[list[Path], list[str]]:
    """Copy the best and the newest of the checkpoints with these `names` from one machine. Returns
    their paths here, and sentences on those that did not come. Raises Unwritable, also if there is
    no room for any."""
    # Machines with the newest checkpoint are tried first, until one delivers it: none is believed
    # to have it, nor that the file is as large as it sends.
    tips = {host: tip for host, listed in names.items() if (tip := newest(listed))}
    paths: list[Path] = []
    problems: list[str] = []
    no_room: list[TooLarge] = []
    for host in sorted(tips, key=lambda host: tips[host][0], reverse=True):

        def bring_file(name: str, host: str = host) -> list[str]:
            try:
                paths.extend(whole_file(nodes[host], run_folders[host], name, folder))
            except TooLarge as error:
                no_room.append(error)
                raise
            return []

        files = [tips[host][1]] + (["best.pt"] if "best.pt" in names[host] else [])
        problems += one_by_one(host, [f"checkpoints/{host}/{file}" for file in files], bring_file)
        if folder / f"checkpoints/{host}/{tips[host][1]}" in paths:
            break
    if no_room and not paths:
        raise Unwritable(str(no_room[-1]))
    return paths, problems


def bring_results(
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    host: str,
    names: list[str],
    folder: Path,
) -> tuple[list[str], bool]:
    """Bring the files that the trainer wrote on `host` for --predict and --extract. Returns
    sentences on which came and which did not, and whether all came. Raises Unwritable."""
    paths: list[Path] = []

    def bring_file(name: str) -> list[str]:
        if host not in nodes:
            raise Lost("the machine does not answer")
        arrived = whole_file(nodes[host], run_folders[host], name, folder)
        if not arrived:
            raise NotHere("it is gone")
        paths.extend(arrived)
        return []

    problems = one_by_one(host, names, bring_file)
    return [*problems, *(f"results {relative(path)}" for path in paths)], not problems


def hand_on(
    nodes: dict[str, Node],
    run_folders: Mapping[str, str],
    folder: Path,
    give: Callable[[Path, int, str], None],
) -> bool:
    """Bring the trainer's newest checkpoint here from one of these machines, and `give` it, with
    its size and its name, to another machine. Returns whether one arrived. Raises Unwritable."""
    names = checkpoints(nodes, run_folders)
    tips = {host: tip for host, listed in names.items() if (tip := newest(listed))}
    for host in sorted(tips, key=lambda host: tips[host], reverse=True):
        name, room = tips[host][1], max(0, disk_free() - DISK_LEFT)
        path = f"checkpoints/{host}/{name}"
        with staging(folder) as scratch:
            fresh = scratch / "file"
            try:
                size = receive(nodes[host], run_folders[host], path, fresh, room)
            except NotHere:
                continue
            if size and size <= room:
                give(fresh, size, name)
                return True
    return False


def whole_file(node: Node, run_folder: str, name: str, folder: Path) -> list[Path]:
    """Bring one file of the run, as far as this machine's disk allows; return [] if there is none.
    Raises NotHere, Unwritable."""
    with staging(folder) as scratch:
        room = max(0, shutil.disk_usage(folder).free - DISK_LEFT)
        fresh = scratch / "file"
        size = receive(node, run_folder, name, fresh, room)
        if size is None:
            return []
        if size > room:
            raise TooLarge(f"the control node has only {room // MIB} MiB for {Path(name).name}")
        move_in(fresh, folder, name)
    return [folder / name]
