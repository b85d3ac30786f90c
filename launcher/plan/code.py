"""Copies and sends the code for the nodes: the files of a few folders of the checkout and, for a
script or model of the user's, of the folder that it is in (files.py), compared by SHA-256.

The code is copied once, when it is first needed. The copy is hashed, recorded and sent. Changes to
the checkout while a run waits or restarts do not become part of the run.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import shutil
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from contract import git
from contract.errors import UserError
from contract.scratch import make_scratch, remove_scratch
from launcher.machines.engine import MachineError, Node, talk
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import tree_sha256
from launcher.plan.files import Files, has_repository, list_files

TRIES = 3
SECONDS, LEAST = 60.0, 16 << 20  # for each begun LEAST bytes: eight machines may share 1 Gbit/s
# Each version has a folder of its own, which is there whole or not at all: other runs may start or
# train from another one, and of two that send the same one in a moment the first stays.
FOLDER = "code"  # below node_dir
UNPACK = (
    'mkdir -p "${1%/*}" && new=$(mktemp -d "$1.XXXXXX") && trap \'rm -rf "$new"\' EXIT && '
    'chmod 755 "$new" && tar --extract --gzip --no-same-owner --directory="$new" && '
    '{ mv -T "$new" "$1" || [ -d "$1" ]; }'
)
FOLDERS = (
    "trainer",
    "tandem",
    "contract",
    "launcher/__init__.py",
    "launcher/node",
    "recipes",
    "examples",
)
OWN = "own"  # where another folder goes in the tree
WORK = "work"  # of a run, on a machine and here: where a copy of OWN runs, by machine
LIBRARY = "library"  # where a script finds what it may import of ours


@dataclass(frozen=True)
class Code:
    """Files to send: names relative to `tree`, a copy, and the hash of that tree. `files`: which
    files of the user's folder, if there is one, are sent and which are not."""

    names: tuple[str, ...]
    sha256: str
    git_revision: str | None
    git_diff: str
    tree: Path = CHECKOUT
    kind: str = FOLDER  # the folder of all versions, below node_dir
    files: Files = field(default_factory=Files)

    @property
    def folder(self) -> str:
        """Return the folder of this version, below node_dir."""
        return f"{self.kind}/{self.sha256[:12]}"


@dataclass(frozen=True)
class Delivery:
    """Files for each machine. `lead`: the start of a sentence that ends with their names."""

    code: Code
    lead: str


@dataclass(frozen=True)
class Source:
    """The files in `folders` of the folder `root`, for the folder `into` of the tree."""

    root: Path
    folders: tuple[str, ...]
    into: str = ""
    script_folder: str = ""

    def files(self) -> Files:
        """List the files. Raises UserError."""
        return list_files(self.root, self.folders, self.script_folder)

    def copy(self, names: tuple[str, ...], tree: Path) -> bool:
        """Copy the files. Returns whether nothing changed meanwhile. Raises UserError, OSError."""
        for name in names:
            target = tree / self.into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy2(self.root / name, target)
                target.chmod(target.stat().st_mode | 0o200)  # another try may write it again
            except FileNotFoundError:  # it has just been removed
                return False
        is_same = tree_sha256(self.root, names) == tree_sha256(tree / self.into, names)
        return is_same and names == self.files().sent


@lru_cache(maxsize=1)
def current(user_folder: Path | None = None, script_folder: str = ".") -> Code:
    """Return the code as it was when this was first called, including uncommitted changes: the
    checkout's, and the files of `user_folder` (absolute), with the script in a folder below. Raises
    UserError."""
    sources = [Source(CHECKOUT, FOLDERS)]
    sources += [Source(user_folder, (".",), OWN, script_folder)] if user_folder else []
    try:
        folder, lock = make_scratch()
        atexit.register(remove_scratch, folder, lock)  # the copy is needed as long as this process
        tree = Path(folder) / "code"
        # A copy counts only if the folder had the same files before and after it: an editor may
        # save, or git check out, in between.
        for _ in range(TRIES):
            listed = [source.files() for source in sources]  # all, before any file is read
            if not all(source.copy(files.sent, tree) for source, files in zip(sources, listed)):
                continue
            pairs = [
                (source.into, name) for source, files in zip(sources, listed) for name in files.sent
            ]
            names = [Path(into, name).as_posix() for into, name in pairs]
            if user_folder:
                from tandem import standalone  # which no run of our own trainer needs

                standalone.write(tree / LIBRARY)
                names += [f"{LIBRARY}/{name}" for name in standalone.files()]
            # The checkout's commit and its uncommitted changes, for the record of the run.
            revision, diff = None, ""
            if has_repository(CHECKOUT):
                with contextlib.suppress(UserError):  # git has no answer
                    commit = git.run(CHECKOUT, "rev-parse", "HEAD").strip()
                    diff = os.fsencode(git.diff(CHECKOUT, *FOLDERS)).decode(errors="replace")
                    revision = commit
            if sha256 := tree_sha256(tree, names):
                return Code(tuple(names), sha256, revision, diff, tree, files=listed[-1])
    except OSError as error:
        raise UserError(
            f"the code cannot be copied to {tempfile.gettempdir()} ({error.filename}: "
            f"{error.strerror}): free space in that folder, or set TMPDIR to another folder."
        ) from None
    folders = ", ".join([*FOLDERS, *(str(source.root) for source in sources[1:])])
    raise UserError(
        f"the files of {folders} change while Tandem copies them: end the program that writes "
        "them, then start again."
    )


def send(code: Code, nodes: dict[str, Node], folders: dict[str, str]) -> None:
    """Write the code into `folders[host]` of these machines, unless that exists. Raises
    MachineError for those that failed."""
    # All machines get the same bytes, which are packed once.
    archive = packed(code)
    seconds = SECONDS * (1 + len(archive) // LEAST)

    def unpack(node: Node) -> str | None:
        folder = folders[node.host.name]
        try:
            process = node.start(["sh", "-c", UNPACK, "sh", folder])
            _, reason, status = talk(process, archive, seconds)
        except MachineError as error:
            return str(error)
        except (OSError, UserError) as error:
            reason, status = str(error), None
        if status == 0:
            return None
        reason = reason or f"no answer within {seconds:.0f} s"
        return (
            f"{node.host.label()}: {folder} could not be written: {reason}: free space on "
            "that disk, or make your user the owner of the folder."
        )

    with ThreadPoolExecutor(max_workers=8) as pool:
        results = zip(nodes, pool.map(unpack, nodes.values()))
        problems = {name: problem for name, problem in results if problem}
    if problems:
        raise MachineError([*problems], *problems.values())


def packed(code: Code) -> memoryview:
    """Return the files as tar.gz, on disk: weights may be larger than memory."""
    with tempfile.TemporaryFile() as archive:
        # Weights do not get smaller by more work.
        with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
            for name in code.names:
                tar.add(code.tree / name, name)
        archive.flush()
        # The map outlives the file, which has no name and goes with it.
        return memoryview(mmap.mmap(archive.fileno(), 0, access=mmap.ACCESS_READ))
