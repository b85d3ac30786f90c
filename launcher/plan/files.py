"""Lists the files of a folder that are sent to the machines, and a reason for each that is not. Git
decides which files it ignores, in each repository of the folder by the rules of that repository."""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from contract import git
from contract.errors import UserError
from contract.text import pluralize, size
from launcher.machines.inventory import CHECKOUT

MOST_FILES, MOST_BYTES, MOST_LEVELS = 50_000, 1 << 30, 100
TOO_DEEP = f"nested in more than {MOST_LEVELS} folders"
# By these names a file is never sent, tracked or not. (id_rsa is one, id_mapping.py is none.)
SECRETS = re.compile(
    r"\.env.*|.*\.(pem|key|p12|pfx|ppk|jks|kdbx|ovpn)|id_\w+|[._]netrc|\.\w+_history|\.pgpass"
    r"|\.git-credentials|\.pypirc|\.npmrc|\.s3cfg|\.boto|\.my\.cnf|\.htpasswd|\.[XI]\w*authority"
    r"|credentials(\.json)?|client_secret.*\.json|kaggle\.json",
    re.IGNORECASE,
)
CACHES = {"__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta/history")
MOST_NAMES = 5  # names listed for each reason


@dataclass(frozen=True)
class Files:
    """Names below a folder: of the files that are sent, and of unsent ones with the reason. A name
    that ends in a slash means all files in a folder."""

    sent: tuple[str, ...] = ()
    unsent: tuple[tuple[str, str], ...] = ()
    size: int = 0

    def lines(self) -> list[str]:
        """Return a line on the files that are sent, and one for each reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.unsent:
            reasons.setdefault(reason, []).append(name)
        lines = [f"sent: {pluralize(len(self.sent), 'file')}, {size(self.size)}"]
        for reason, names in reasons.items():
            rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            lines.append(f"not sent, {reason}: {', '.join(names[:MOST_NAMES])}{rest}")
        return lines

    def modules(self) -> set[str]:
        """Return all names by which these files, or folders of them, could be imported."""
        segments = (text for name in self.sent for text in PurePosixPath(name).parts)
        return {text.partition(".")[0] for text in segments}

    def folder_of(self, module: str) -> str | None:
        """Return the folder that a module or package of this name is sent in, if it is not the
        first one."""
        for path in map(PurePosixPath, self.sent):
            name = path.with_suffix("") if path.parent.name != module else path.parent
            if path.suffix == ".py" and name.name == module and name.parent.name:
                return str(name.parent)
        return None

    def why_not(self, name: str) -> str | None:
        """Return why the file or folder of this name is not sent; None if it is unknown."""
        matches = (reason for item, reason in self.unsent if _is_in(name, item.rstrip("/")))
        return next(matches, None)


def list_files(root: Path, folders: tuple[str, ...] = (".",), script_folder: str = ".") -> Files:
    """Return which files in these folders below `root` are sent. `script_folder` is sent even if
    git ignores all of it. Raises UserError if git does not list the files that it ignores, and for
    too many files or bytes."""
    unsent: dict[str, str] = {}
    sent, links = dict[str, int](), dict[str, None]()

    @functools.cache
    def is_environment(below: str) -> bool:
        return any((root / below / mark).is_file() for mark in ENVIRONMENT_MARKS)

    for name, tracked in _candidates(root, "", folders, unsent, script_folder):
        # A folder may have a million files. Those that are not sent do not count.
        if len(sent) > MOST_FILES:
            break
        path = root / name
        if stays := _stays(name, tracked, is_environment):
            unsent.update([stays])
        elif path.is_symlink():
            links[name] = None
        elif path.is_file() and os.access(path, os.R_OK):
            sent[name] = path.stat().st_size
        elif os.path.lexists(path):  # git lists what was removed, too
            unsent[name] = "unreadable"
    ordered = sorted(sent)
    # The deepest first, for a link may lead to a folder with others in it.
    for name in sorted(links, key=lambda name: -name.count("/")):
        target = _resolve_link(root, name)
        if target is None:
            unsent[name] = "links that lead out"
            continue
        sources = [] if _is_in(name, target) else _list_files_behind(target, ordered)
        if not sources:
            unsent[name] = "links to files that are not sent, or to their own folder"
        for source in sources:
            copy = name + source[len(target) :]
            sent[copy] = sent[source]
            bisect.insort(ordered, copy)
        if len(sent) > MOST_FILES:  # a few links that lead to one another double it each time
            break
    if len(sent) > MOST_FILES or sum(sent.values()) > MOST_BYTES:
        sizes: Counter[str] = Counter()
        for name, bytes_sent in sent.items():
            sizes[name.partition("/")[0]] += bytes_sent
        largest, bytes_sent = sizes.most_common(1)[0]
        raise UserError(
            f"{root} would go to the machines, and has more than {MOST_FILES} files or "
            f"{size(MOST_BYTES)} ({largest} has {size(bytes_sent)}): let git ignore what is no "
            "code, put it elsewhere, or give a folder that has only the code (FOLDER=, or the one "
            "of MODEL)."
        )
    printable = {os.fsencode(n).decode(errors="backslashreplace"): w for n, w in unsent.items()}
    return Files(tuple(sorted(sent)), tuple(sorted(printable.items())), sum(sent.values()))


def _list_files_behind(target: str, ordered: list[str]) -> list[str]:
    """Return the names among `ordered`, sorted ones, of the file or of the folder `target`: for
    `a`, the name `a` or all names that begin with `a/`."""
    begin = bisect.bisect_left(ordered, target)
    is_file = begin < len(ordered) and ordered[begin] == target
    begin = end = bisect.bisect_left(ordered, f"{target}/")
    while end < len(ordered) and ordered[end].startswith(f"{target}/"):
        end += 1
    return [*ordered[begin:end], *([target] if is_file else [])]


def _candidates(
    root: Path,
    below: str,
    folders: tuple[str, ...],
    unsent: dict[str, str],
    script_folder: str = "",
) -> Iterator[tuple[str, bool]]:
    """Yield the files in a folder below the root, and whether git tracks them. Ignored files go to
    `unsent`. Raises UserError."""
    folder = root / below
    if below.count("/") > MOST_LEVELS:
        unsent[below] = TOO_DEEP
        return
    if not has_repository(folder):
        for name in folders:
            yield from _walk(root, below + name, unsent)
        return
    untracked = ("--others", "--exclude-standard")
    tracked = dict.fromkeys(_listed(folder, below, folders, "--cached"), True)
    names = dict.fromkeys(_listed(folder, below, folders, *untracked), False) | tracked
    if names:  # git ends with an error in a folder that it ignores
        ignored = _listed(folder, below, folders, *untracked, "--ignored", "--directory")
        unsent |= dict.fromkeys(ignored, "ignored by git")
    if script_folder and not any(
        # It may also be in a repository within this one, which is listed as one name.
        _is_in(name, script_folder) or _is_in(script_folder, name.rstrip("/"))
        for name in names
    ):
        # People keep scripts in folders that are not for others, like scratch/. As git has no rules
        # for what is in them, all of it is sent, as without git.
        for name in [name for name in unsent if _is_in(name.rstrip("/"), script_folder)]:
            del unsent[name]
        for name in [name for name in unsent if _is_in(script_folder, name.rstrip("/"))]:
            unsent[name] = "ignored by git, except the script's folder"
        yield from _walk(root, script_folder, unsent)
    for name, is_tracked in names.items():
        path = root / name
        if path.is_symlink() or not path.is_dir():
            yield name, is_tracked
        elif os.path.lexists(path / ".git"):
            script = script_folder if _is_in(script_folder, name.rstrip("/")) else ""
            yield from _candidates(root, name.rstrip("/") + "/", (".",), unsent, script)
        else:
            unsent[f"{name}/"] = "submodules without their files (git submodule update --init)"


def has_repository(folder: Path) -> bool:
    """Return whether a folder is in a repository that git reads."""
    # Tandem's folder may have been unpacked in another repository, or git may not read it (NTFS, a
    # container). The files to send are known without git.
    if folder != CHECKOUT:
        return git.root_of(folder.resolve()) is not None
    try:
        return os.path.lexists(folder / ".git") and bool(git.run(folder, "rev-parse", "HEAD"))
    except UserError:
        return False


def _listed(folder: Path, below: str, folders: tuple[str, ...], *words: str) -> list[str]:
    """Return the names that git lists. Raises UserError if it does not: it may ignore keys."""
    try:
        output = git.run(folder, "ls-files", "-z", *words, "--", *folders)
    except UserError as error:
        remedy = (
            "Do so, or give another FOLDER="
            if "safe.directory" in str(error)
            else f"Repair the repository, or remove {git.root_of(folder.resolve())}/.git if it is "
            "not a repository any more"
        )
        raise UserError(
            f"Tandem does not send {folder}, because git failed to list the files that it "
            f"ignores, such as keys and data. git prints: {error}\n{remedy}."
        ) from None
    return [below + name for name in output.split("\0") if name]


def _walk(root: Path, start: str, unsent: dict[str, str]) -> Iterator[tuple[str, bool]]:
    """Yield the files of a folder without a repository, and those of repositories below it. Raises
    UserError."""
    has_home = False
    with contextlib.suppress(RuntimeError):  # a container's user may have none
        has_home = Path.home().resolve().is_relative_to((root / start).resolve())
    if has_home:
        raise UserError(
            f"{root} is or contains your home, and Tandem would send everything in it: move "
            "the code into a folder of its own."
        )
    if (root / start).is_file():
        yield start, False
        return

    def name_of(path: str) -> str:
        return Path(path).relative_to(root).as_posix()

    def keep(error: OSError) -> None:
        unsent[f"{name_of(error.filename)}/"] = "unreadable"

    for place, inner, names in os.walk(root / start, onerror=keep):
        if name_of(place).count("/") >= MOST_LEVELS:  # what copies and removes them would recurse
            unsent[f"{name_of(place)}/"], inner[:] = TOO_DEEP, []
            continue
        paths = [Path(place) / name for name in sorted(inner)]
        links = [path for path in paths if path.is_symlink()]
        repositories = [path for path in paths if os.path.lexists(path / ".git")]
        inner[:] = [path.name for path in paths if path not in links + repositories]
        for path in repositories:
            yield from _candidates(root, f"{name_of(str(path))}/", (".",), unsent)
        for name in [*names, *(path.name for path in links)]:
            yield name_of(f"{place}/{name}"), False


def _stays(
    name: str, tracked: bool, is_environment: Callable[[str], bool]
) -> tuple[str, str] | None:
    """Return the file or folder that stays here, and why; None if the file is sent."""
    path = PurePosixPath(name)
    if name.count("/") > MOST_LEVELS:
        return name, TOO_DEEP
    # The outermost folder is named: one line for an environment, not one for each of its files.
    for folder in list(map(str, path.parents))[-2::-1]:
        folder_name = PurePosixPath(folder).name
        if folder_name in CACHES:
            return f"{folder}/", "caches"
        if is_environment(folder):
            return f"{folder}/", "environments of Python"
        if folder_name.startswith(".") and not tracked:
            return f"{folder}/", "hidden folders that git does not track"
    if SECRETS.fullmatch(path.name):
        return name, "names of secret files"
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return name, "names that are not UTF-8"
    return None


def _resolve_link(root: Path, name: str) -> str | None:
    """Return the target of a link, by its name below the root; None for a place outside."""
    try:
        target, real_root = (root / name).resolve(), root.resolve()
    except (OSError, RuntimeError):  # it leads to itself
        return name
    is_inside = target.is_relative_to(real_root)
    return target.relative_to(real_root).as_posix() if is_inside else None


def _is_in(name: str, folder: str) -> bool:
    return folder == "." or name == folder or name.startswith(f"{folder}/")
