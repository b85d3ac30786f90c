"""Copies and sends the code for the nodes: the files of a few folders of the checkout and, for a
user's script or model, the files of its folder. files.py lists the files.

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

COPY_TRIES = 3  # until the files stay the same while they are copied
# Sending may take SEND_SECONDS for each begun SEND_BYTES: eight machines may share 1 Gbit/s.
SEND_SECONDS, SEND_BYTES = 60.0, 16 << 20
FOLDER = "code"  # below node_dir
# $1 is the folder of a version. Other runs may use other versions at this moment, so each version
# has its own folder. mv makes it appear complete; if two runs send it at once, the first one stays.
UNPACK = (
    'mkdir -p "${1%/*}" && new=$(mktemp -d "$1.XXXXXX") && trap \'rm -rf "$new"\' EXIT && '
    'chmod 755 "$new" && tar --extract --gzip --no-same-owner --directory="$new" && '
    '{ mv -T "$new" "$1" || [ -d "$1" ]; }'
)
# What a machine gets of the checkout: the trainer, the guard and the modules that they import.
SENT_FOLDERS = (
    "trainer",
    "tandem",
    "contract",
    "launcher/__init__.py",
    "launcher/node",
    "recipes",
    "examples",
)
USER_FILES = "own"  # the folder in the tree for the user's files
WORK = "work"  # in a run's folder, here and on machines; for each machine a copy of USER_FILES
LIBRARY = "library"  # the folder in the tree with the modules of Tandem that a script may import


@dataclass(frozen=True)
class Code:
    """Describes one version of files to send: code, weights or packages."""

    names: tuple[str, ...]  # relative to `tree`
    sha256: str  # of the files in `tree`
    git_revision: str | None
    git_diff: str
    tree: Path = CHECKOUT  # the folder that is sent, for code a copy
    kind: str = FOLDER  # the folder of all versions, below node_dir
    files: Files = field(default_factory=Files)  # sent and unsent files of the user's folder

    @property
    def folder(self) -> str:
        """The folder of this version, below node_dir."""
        return f"{self.kind}/{self.sha256[:12]}"


@dataclass(frozen=True)
class Delivery:
    """Describes files for each machine. `lead` begins a sentence that ends with machine names."""

    code: Code
    lead: str


@dataclass(frozen=True)
class Source:
    """Describes which files to copy: those in `folders` below `root`, into tree/into."""

    root: Path
    folders: tuple[str, ...]
    into: str = ""
    script_folder: str = ""

    def files(self) -> Files:
        """List the files. Raises UserError."""
        return list_files(self.root, self.folders, self.script_folder)

    def copy(self, names: tuple[str, ...], tree: Path) -> bool:
        """Copy the files. Return whether they stayed the same. Raises UserError and OSError."""
        for name in names:
            target = tree / self.into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy2(self.root / name, target)
                target.chmod(target.stat().st_mode | 0o200)  # the next try may overwrite it
            except FileNotFoundError:  # the file has just been removed
                return False
        is_same = tree_sha256(self.root, names) == tree_sha256(tree / self.into, names)
        return is_same and names == self.files().sent


@lru_cache(maxsize=1)
def take_snapshot(user_folder: Path | None = None, script_folder: str = ".") -> Code:
    """Copy the code at the first call, with uncommitted changes, and return the copy: the
    checkout's SENT_FOLDERS and the files of `user_folder`, an absolute path. `script_folder` below
    it has the script. Raises UserError."""
    sources = [Source(CHECKOUT, SENT_FOLDERS)]
    sources += [Source(user_folder, (".",), USER_FILES, script_folder)] if user_folder else []
    try:
        folder, lock = make_scratch()
        atexit.register(remove_scratch, folder, lock)  # later attempts send the same copy
        tree = Path(folder) / "code"
        # An editor or git may write files during the copying. So the copy counts only if the
        # folders have the same files before and after the copying.
        for _ in range(COPY_TRIES):
            listed = [source.files() for source in sources]
            if not all(source.copy(files.sent, tree) for source, files in zip(sources, listed)):
                continue
            names = [
                Path(source.into, name).as_posix()
                for source, files in zip(sources, listed)
                for name in files.sent
            ]
            if user_folder:
                from tandem import standalone  # imported late: only scripts need it

                standalone.write(tree / LIBRARY)
                names += [f"{LIBRARY}/{name}" for name in standalone.files()]
            # plan.json records the checkout's commit and its uncommitted changes.
            revision, diff = None, ""
            if has_repository(CHECKOUT):
                with contextlib.suppress(UserError):  # git may fail in any of its commands
                    commit = git.run(CHECKOUT, "rev-parse", "HEAD").strip()
                    diff = os.fsencode(git.diff(CHECKOUT, *SENT_FOLDERS)).decode(errors="replace")
                    revision = commit  # only together with its diff
            if sha256 := tree_sha256(tree, names):
                return Code(tuple(names), sha256, revision, diff, tree, files=listed[-1])
    except OSError as error:
        raise UserError(
            f"the code cannot be copied to {tempfile.gettempdir()} ({error.filename}: "
            f"{error.strerror}): free space in that folder, or set TMPDIR to another folder."
        ) from None
    folders = ", ".join([*SENT_FOLDERS, *(str(source.root) for source in sources[1:])])
    raise UserError(
        f"the files of {folders} change while Tandem copies them: end the program that writes "
        "them, then start again."
    )


def send(code: Code, nodes: dict[str, Node], folders: dict[str, str]) -> None:
    """Write the code into `folders[host]` on these machines, unless the folder exists. Raises
    MachineError with a problem for each machine that failed."""
    archive = pack(code)  # the same for all machines
    seconds = SEND_SECONDS * (1 + len(archive) // SEND_BYTES)

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


def pack(code: Code) -> memoryview:
    """Return a tar.gz of the files. It is a mapped file, as weights may be larger than memory."""
    with tempfile.TemporaryFile() as archive:
        # A higher compression level hardly makes weights smaller.
        with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
            for name in code.names:
                tar.add(code.tree / name, name)
        archive.flush()
        # The map stays valid after the file is closed, and the disk space is freed with the map.
        return memoryview(mmap.mmap(archive.fileno(), 0, access=mmap.ACCESS_READ))
