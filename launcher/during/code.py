"""The code that goes to the nodes: the tracked files of a few folders, compared by SHA-256.

It is copied once, when it is first asked for. That copy is hashed, recorded and sent, so changes to
the checkout while a run waits or starts again do not become part of the run.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from launcher.engine import Node, talk
from launcher.errors import MachineError, UserError
from launcher.inventory import CHECKOUT
from launcher.node.tree import tree_sha256

TRIES = 3
SECONDS = 60.0
# The old tree is replaced as a whole, so that no file of another version stays.
UNPACK = (
    'rm -rf "$1.new" && mkdir -p "$1.new" && tar --extract --gzip --no-same-owner '
    '--directory="$1.new" && rm -rf "$1" && mv "$1.new" "$1"'
)
FOLDERS = ("trainer", "launcher/__init__.py", "launcher/node", "recipes", "examples")


@dataclass(frozen=True)
class Code:
    """Names relative to `tree`, a copy of the checkout's files, and the hash of that tree."""

    names: tuple[str, ...]
    sha256: str
    git_revision: str | None
    git_diff: str
    tree: Path = CHECKOUT


@lru_cache(maxsize=1)
def current() -> Code:
    """The code as it was in the checkout when this was first called, including uncommitted changes.
    Raises UserError."""
    try:
        return _snapshot()
    except OSError as error:
        raise UserError(
            f"the code cannot be copied to {tempfile.gettempdir()} "
            f"({error.filename}: {error.strerror}): make room there, or name another folder by "
            "TMPDIR."
        ) from None


def _snapshot() -> Code:
    """A copy of the checkout's files that did not change meanwhile. Raises UserError, OSError."""
    tree = _scratch()
    for _ in range(TRIES):
        names = [name for name in _names() if _copied(name, tree)]
        revision = _git("rev-parse", "HEAD")
        diff = os.fsencode(_git("diff", "HEAD", "--", *FOLDERS) or "").decode(errors="replace")
        sha256 = tree_sha256(tree, names)
        if sha256 and names == _names() and sha256 == tree_sha256(CHECKOUT, names):
            return Code(tuple(names), sha256, revision.strip() if revision else None, diff, tree)
    raise UserError(
        f"the files of {', '.join(FOLDERS)} change while they are copied: let what writes them "
        "end, then start again."
    )


def _scratch() -> Path:
    """A temporary folder that exists as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="tandem-code-")
    atexit.register(folder.cleanup)
    return Path(folder.name) / "code"


def _copied(name: str, tree: Path) -> bool:
    """Copy one file of the checkout; False when it has just been removed."""
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy2(CHECKOUT / name, tree / name)
    except FileNotFoundError:
        return False
    return True


def _names() -> list[str]:
    """The files of the code, sorted."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS)
    if listed is None:  # an unpacked archive rather than a checkout
        files = [p for folder in FOLDERS for p in _files(CHECKOUT / folder)]
        names = [str(p.relative_to(CHECKOUT)) for p in files if "__pycache__" not in p.parts]
    else:
        names = [name for name in listed.split("\0") if name]
    return sorted(name for name in set(names) if _goes(name))


def _goes(name: str) -> bool:
    """Whether a file may leave this machine: .env and the like hold secrets, and a link leads to
    files outside the checkout. A name that is not UTF-8 could not be recorded."""
    path = Path(name)
    hidden = any(part.startswith(".") for part in path.parts)
    linked = any((CHECKOUT / one).is_symlink() for one in (path, *path.parents[:-1]))
    text = not any("\ud800" <= letter <= "\udfff" for letter in name)
    return text and not hidden and not linked and (CHECKOUT / path).is_file()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", "-c", "core.quotePath=off", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        check=False,
    )
    # Names and contents may be of any encoding.
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def send(code: Code, nodes: dict[str, Node], folders: dict[str, str]) -> None:
    """Make `folders[host]` hold exactly the code on these machines. Raises MachineError for those
    where it failed."""
    archive = packed(code)

    def one(node: Node) -> str | None:
        folder = folders[node.host.name]
        try:
            _, said, status = talk(node.start(["sh", "-c", UNPACK, "sh", folder]), archive, SECONDS)
        except MachineError as error:
            return str(error)
        except (OSError, UserError) as error:
            said, status = str(error), None
        if status == 0:
            return None
        said = said or f"no answer within {SECONDS:.0f} s"
        return (
            f"{node.host.label()}: the code could not be written to {folder}: {said}: make room "
            "there or give the folder to your user."
        )

    with ThreadPoolExecutor(max_workers=8) as pool:
        results = zip(nodes, pool.map(one, nodes.values()))
        problems = {name: problem for name, problem in results if problem}
    if problems:
        raise MachineError([*problems], *problems.values())


def packed(code: Code) -> bytes:
    """The files of the code as tar.gz."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name in code.names:
            tar.add(code.tree / name, name)
    return archive.getvalue()
