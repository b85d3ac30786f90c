"""The code that goes to the nodes: the tracked files of a few folders of the checkout and, for a
script or a model of one's own that lies elsewhere, of the folder that it is in, compared by
SHA-256.

It is copied once, when it is first asked for. That copy is hashed, recorded and sent, so changes to
the checkout while a run waits or starts again do not become part of the run. `loaded_by` says what
a file imports.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import mmap
import os
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from contract import git
from contract.errors import UserError
from contract.text import read_text
from launcher.machines.engine import MachineError, Node, talk
from launcher.machines.inventory import CHECKOUT
from launcher.node.machine import tree_sha256

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
LIBRARY = "library"  # where a script finds what it may import of ours
# Files and bytes of another folder: who names a file of the home folder does not mean all of it.
MOST_FILES, MOST_BYTES = 4000, 64 << 20
MOST_SOURCE = 1 << 18  # bytes of a file that is parsed, in up to a thousand times as much memory


@dataclass(frozen=True)
class Code:
    """Names relative to `tree`, a copy of the checkout's files, and the hash of that tree."""

    names: tuple[str, ...]
    sha256: str
    git_revision: str | None
    git_diff: str
    tree: Path = CHECKOUT
    kind: str = FOLDER  # the folder of all versions, below node_dir

    @property
    def folder(self) -> str:
        """Of this version, below node_dir."""
        return f"{self.kind}/{self.sha256[:12]}"


@dataclass(frozen=True)
class Source:
    """Files below `root` that go into the folder `into` of the tree; of a repository those that are
    tracked or might be."""

    root: Path
    parts: tuple[str, ...]
    into: str = ""

    def names(self) -> list[str]:
        """The files, relative to `root`, sorted. Raises UserError for too many, and where git
        cannot say which are ignored."""
        names = _listed_by_git(self.root, self.parts)
        if names is None:
            names = [name for part in self.parts for name in _files(self.root, part)]
        if not self.into:
            return sorted(name for name in set(names) if self._goes(name))
        # Of a folder with a million files no more are looked at than are too many.
        kept = sorted(islice(filter(self._goes, dict.fromkeys(names)), MOST_FILES + 1))
        self._check_size(kept)
        return kept

    def _goes(self, name: str) -> bool:
        """Whether a file may leave this machine: .env and the like hold secrets, and a link leads
        to files outside the folder. A name that is not UTF-8 could not be recorded."""
        path = Path(name)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
        linked = any((self.root / one).is_symlink() for one in (path, *path.parents[:-1]))
        text = not any("\ud800" <= letter <= "\udfff" for letter in name)
        return text and not hidden and not linked and (self.root / path).is_file()

    def _check_size(self, names: list[str]) -> None:
        sizes: Counter[str] = Counter()
        for name in names:
            sizes[name.partition("/")[0]] += (self.root / name).stat().st_size
        if len(names) > MOST_FILES or sum(sizes.values()) > MOST_BYTES:
            largest, size = sizes.most_common(1)[0]
            raise UserError(
                f"{self.root} would go to the machines, and has more than {MOST_FILES} files or "
                f"{MOST_BYTES >> 20} MiB ({largest} has {size >> 20}): what is no code let git "
                "ignore or put elsewhere, or give a folder that has the code alone (FOLDER=, or "
                "the one of MODEL)."
            )


@lru_cache(maxsize=1)
def current(own: Path | None = None) -> Code:
    """The code as it was when this was first called, including uncommitted changes: that of the
    checkout, and the folder `own` (absolute) if there is one. Raises UserError."""
    sources = [Source(CHECKOUT, FOLDERS)] + ([Source(own, (".",), OWN)] if own else [])
    try:
        return _snapshot(sources)
    except OSError as error:
        raise UserError(
            f"the code cannot be copied to {tempfile.gettempdir()} "
            f"({error.filename}: {error.strerror}): make room there, or name another folder by "
            "TMPDIR."
        ) from None


def _snapshot(sources: list[Source]) -> Code:
    """A copy of the files that did not change meanwhile. Raises UserError, OSError."""
    tree = _scratch()
    for _ in range(TRIES):
        named = [source.names() for source in sources]  # all, before any file is read
        copied = [[n for n in some if _copied(s, n, tree)] for s, some in zip(sources, named)]
        names = [f"{s.into}/{name}".lstrip("/") for s, own in zip(sources, copied) for name in own]
        if len(sources) > 1:  # beside a folder of the user's own
            names += _library(tree)
        revision, diff = _revision()
        sha256 = tree_sha256(tree, names)
        if sha256 and all(_unchanged(s, own, tree) for s, own in zip(sources, copied)):
            return Code(tuple(names), sha256, revision, diff, tree)
    folders = ", ".join([*FOLDERS, *(str(source.root) for source in sources[1:])])
    raise UserError(
        f"the files of {folders} change while they are copied: let what writes them end, then "
        "start again."
    )


def _library(tree: Path) -> list[str]:
    """Write tandem/ as a script imports it; the names of its files in the tree."""
    from tandem import standalone  # which no run of our own trainer needs

    standalone.write(tree / LIBRARY)
    return [f"{LIBRARY}/{name}" for name in standalone.files()]


def _unchanged(source: Source, names: list[str], tree: Path) -> bool:
    same = tree_sha256(source.root, names) == tree_sha256(tree / source.into, names)
    return same and names == source.names()


def _scratch() -> Path:
    """A temporary folder that exists as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="tandem-code-")
    atexit.register(folder.cleanup)
    return Path(folder.name) / "code"


def _copied(source: Source, name: str, tree: Path) -> bool:
    """Copy one file; False when it has just been removed."""
    to = tree / source.into / name
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy2(source.root / name, to)
    except FileNotFoundError:
        return False
    return True


def _files(root: Path, part: str) -> Iterator[str]:
    """The files of a part of a folder, relative to it; not many more than may go."""
    if (root / part).is_file():
        yield part
        return
    seen = 0
    for folder, inner, names in os.walk(root / part):
        inner[:] = [one for one in inner if not one.startswith(".") and one != "__pycache__"]
        yield from (str((Path(folder) / name).relative_to(root)) for name in names)
        seen += len(names)
        if seen > 2 * MOST_FILES and root != CHECKOUT:
            return


def _listed_by_git(root: Path, parts: tuple[str, ...]) -> list[str] | None:
    """The files that git does not ignore; None where there is no repository. Raises UserError where
    git does not list one: what it ignores may be keys."""
    repository = git.root_of(root.resolve())
    if repository is None or (root == CHECKOUT and not _is_repository()):
        return None
    words = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *parts)
    try:
        return [name for name in git.run(root, *words).split("\0") if name]
    except UserError as error:
        if root == CHECKOUT:  # on NTFS, or in a container: its folders are known
            return None
        remedy = (
            "do so, or give another FOLDER="
            if "safe.directory" in str(error)
            else f"repair it, or remove {repository}/.git where it is no repository any more"
        )
        raise UserError(
            f"{root} is not sent, since git does not say what it ignores there, such as keys and "
            f"data. git says: {error}: {remedy}."
        ) from None


def _is_repository() -> bool:
    """Whether the checkout is one: an archive may have been unpacked in somebody's repository."""
    return os.path.lexists(CHECKOUT / ".git")


def _revision() -> tuple[str | None, str]:
    """The checkout's commit and what differs from it; None and nothing where git has no answer."""
    if not _is_repository():
        return None, ""
    try:
        revision = git.run(CHECKOUT, "rev-parse", "HEAD").strip()
        return revision, os.fsencode(git.diff(CHECKOUT, *FOLDERS)).decode(errors="replace")
    except UserError:
        return None, ""


def send(code: Code, nodes: dict[str, Node], folders: dict[str, str]) -> None:
    """Make `folders[host]`, where there is none yet, hold the code on these machines. Raises
    MachineError for those where it failed."""
    archive = packed(code)
    seconds = SECONDS * (1 + len(archive) // LEAST)

    def one(node: Node) -> str | None:
        folder = folders[node.host.name]
        try:
            _, said, status = talk(node.start(["sh", "-c", UNPACK, "sh", folder]), archive, seconds)
        except MachineError as error:
            return str(error)
        except (OSError, UserError) as error:
            said, status = str(error), None
        if status == 0:
            return None
        said = said or f"no answer within {seconds:.0f} s"
        return (
            f"{node.host.label()}: {folder} could not be written: {said}: make room "
            "there or give the folder to your user."
        )

    with ThreadPoolExecutor(max_workers=8) as pool:
        results = zip(nodes, pool.map(one, nodes.values()))
        problems = {name: problem for name, problem in results if problem}
    if problems:
        raise MachineError([*problems], *problems.values())


def packed(code: Code) -> memoryview:
    """The files of the code as tar.gz, on disk: weights may be larger than memory."""
    with tempfile.TemporaryFile() as archive:
        # Weights do not get smaller by more work.
        with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
            for name in code.names:
                tar.add(code.tree / name, name)
        archive.flush()
        return memoryview(mmap.mmap(archive.fileno(), 0, access=mmap.ACCESS_READ))


@dataclass(frozen=True)
class Loaded:
    """`packages`: their names, without the standard library; `texts`: the sources that were
    read; `broken`: what is no Python in those that were not, a clause each."""

    packages: set[str]
    texts: list[str]
    broken: list[str]


def loaded_by(file: Path, roots: Sequence[Path]) -> Loaded:
    """What `file` imports as it is loaded, and the modules below `roots` in their turn."""
    left, seen = [file], set[Path]()
    packages, texts, broken = set[str](), list[str](), list[str]()
    while left:
        file = left.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        with contextlib.suppress(OSError, ValueError):
            try:
                text, body = parsed(file)
            except SyntaxError as error:
                broken.append(f"{file.name}, line {error.lineno}: {error.msg}")
                continue
            texts.append(text)
            for module in _imported(body):
                beside = [root / module.replace(".", "/") for root in roots]
                left += [one.with_suffix(".py") for one in beside]
                left += [one / "__init__.py" for one in beside]
                top = module.partition(".")[0]
                if not any(_holds(root, top) for root in roots):
                    packages.add(top)
    return Loaded(packages - sys.stdlib_module_names, texts, broken)


def _holds(root: Path, top: str) -> bool:
    return (root / top).is_dir() or (root / f"{top}.py").is_file()


def first_line(file: Path) -> str:
    with file.open("rb") as start:
        return start.readline(200).decode(errors="replace").strip()


def parsed(file: Path) -> tuple[str, list[ast.stmt]]:
    """The text and the statements of a Python file. Raises SyntaxError, OSError and ValueError."""
    text = read_text(file, MOST_SOURCE)
    try:
        return text, ast.parse(text).body
    except (MemoryError, RecursionError):  # of the parser's own stack
        raise ValueError("it is nested too deeply") from None


def _imported(body: list[ast.stmt]) -> list[str]:
    """The modules that a source imports in any case: what it tries to import may be missing."""
    found = []
    for node in body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return found
