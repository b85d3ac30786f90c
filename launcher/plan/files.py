"""Lists the files of a folder that are sent to the machines, and why each other file is not sent.

code.py lists the checkout and the user's folder here, then copies the files. Git decides which
files are ignored, in each repository below the folder by the rules of that repository.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from contract import git
from contract.errors import UserError
from contract.text import pluralize, size
from launcher.machines.inventory import CHECKOUT

# Code has far fewer files and bytes. A folder with more also has data or environments, which the
# user did not mean to send.
MAX_FILES, MAX_BYTES = 50_000, 1 << 30
MAX_LEVELS = 100  # of folders; Python's recursion limit stops the copying of far deeper folders
TOO_DEEP = f"nested in more than {MAX_LEVELS} folders"
# Files with these names are never sent, even if git tracks them: id_rsa, but not id_mapping.py.
SECRETS = re.compile(
    r"\.env.*|.*\.(pem|key|p12|pfx|ppk|jks|kdbx|ovpn)|id_\w+|[._]netrc|\.\w+_history|\.pgpass"
    r"|\.git-credentials|\.pypirc|\.npmrc|\.s3cfg|\.boto|\.my\.cnf|\.htpasswd|\.[XI]\w*authority"
    r"|credentials(\.json)?|client_secret.*\.json|kaggle\.json",
    re.IGNORECASE,
)
CACHES = {"__pycache__", ".ipynb_checkpoints", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta/history")  # files of an environment of Python
MAX_NAMES = 5  # names listed for each reason


@dataclass(frozen=True)
class Files:
    """Names the files below a folder that are sent, and the files that are not sent."""

    sent: tuple[str, ...] = ()
    unsent: tuple[tuple[str, str], ...] = ()  # (name, reason); `data/` means all files in data
    size: int = 0  # bytes of the sent files

    def lines(self) -> list[str]:
        """Return a line on the sent files, and for each reason a line on unsent files."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.unsent:
            reasons.setdefault(reason, []).append(name)
        lines = [f"sent: {pluralize(len(self.sent), 'file')}, {size(self.size)}"]
        for reason, names in reasons.items():
            ending = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            lines.append(f"not sent, {reason}: {', '.join(names[:MAX_NAMES])}{ending}")
        return lines

    def modules(self) -> set[str]:
        """Return the names by which sent files and their folders could be imported: `src` and
        `net` for `src/net.py`."""
        segments = (segment for name in self.sent for segment in PurePosixPath(name).parts)
        return {segment.partition(".")[0] for segment in segments}

    def folder_of(self, module: str) -> str | None:
        """Return the folder from which a sent module or package of this name could be imported:
        `src` for `src/net.py` and for `src/net/layers.py`. None if that is the root."""
        for path in map(PurePosixPath, self.sent):
            target = path.with_suffix("") if path.parent.name != module else path.parent
            if path.suffix == ".py" and target.name == module and target.parent.name:
                return str(target.parent)
        return None

    def reason_unsent(self, name: str) -> str | None:
        """Return why a file or folder is not sent; None if it is sent or does not exist."""
        matches = (reason for item, reason in self.unsent if _is_in(name, item.rstrip("/")))
        return next(matches, None)


def list_files(root: Path, folders: tuple[str, ...] = (".",), script_folder: str = ".") -> Files:
    """Return which files in these folders below `root` are sent. `script_folder` is sent even if
    git ignores the whole folder. Raises UserError if git cannot list its ignored files, and for too
    many files or bytes."""
    unsent: dict[str, str] = {}  # {name: reason}
    sent: dict[str, int] = {}  # {name: bytes}
    links: dict[str, None] = {}  # names in the order in which they were found

    @functools.cache
    def is_environment(folder: str) -> bool:
        return any((root / folder / mark).is_file() for mark in ENVIRONMENT_MARKS)

    for name, is_tracked in _find_candidates(root, "", folders, unsent, script_folder):
        # A folder may have a million files, so the search ends once too many are to be sent.
        if len(sent) > MAX_FILES:
            break
        path = root / name
        if exclusion := _find_exclusion(name, is_tracked, is_environment):
            excluded_name, reason = exclusion
            unsent[excluded_name] = reason
        elif path.is_symlink():
            links[name] = None
        elif path.is_file() and os.access(path, os.R_OK):
            sent[name] = path.stat().st_size
        elif os.path.lexists(path):  # git also lists files that were removed
            unsent[name] = "unreadable"
    _replace_links(root, links, sent, unsent)
    if len(sent) > MAX_FILES or sum(sent.values()) > MAX_BYTES:
        sizes: Counter[str] = Counter()  # of the folders in `root`
        for name, file_bytes in sent.items():
            sizes[name.partition("/")[0]] += file_bytes
        largest, largest_bytes = sizes.most_common(1)[0]
        raise UserError(
            f"{root} would go to the machines, and has more than {MAX_FILES} files or "
            f"{size(MAX_BYTES)} ({largest} has {size(largest_bytes)}): let git ignore what is no "
            "code, put it elsewhere, or give a folder that has only the code (FOLDER=, or the one "
            "of MODEL)."
        )
    # Names that are not UTF-8 are never sent. Here they become printable, since users read them.
    printable = {
        os.fsencode(name).decode(errors="backslashreplace"): reason
        for name, reason in unsent.items()
    }
    return Files(tuple(sorted(sent)), tuple(sorted(printable.items())), sum(sent.values()))


def _replace_links(
    root: Path, links: Iterable[str], sent: dict[str, int], unsent: dict[str, str]
) -> None:
    """Add the files behind each link to `sent`, under the link's name, or the link to `unsent`."""
    sorted_names = sorted(sent)
    for name, target in _order_links(root, links):
        if target is None:
            unsent[name] = "links that lead out"
            continue
        sources = []
        # A link to a folder above itself would contain itself without end.
        if not _is_in(name, target):
            inside = sorted_names[_slice_inside(sorted_names, target)]
            sources = [*inside, *([target] if target in sent else [])]
        if not sources:
            unsent[name] = "links to files that are not sent, or to their own folder"
        for source in sources:
            copy = name + source[len(target) :]  # `link/a.py` for `target/a.py`
            sent[copy] = sent[source]
            bisect.insort(sorted_names, copy)
        # A few links that lead to each other's folders may double the number of files each time.
        if len(sent) > MAX_FILES:
            break


def _order_links(root: Path, links: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (link, target), with the links in a folder before the links to this folder: the files
    behind them are in the folder, too. The target is None if it is outside of `root`."""
    sorted_links, real_root = sorted(links), root.resolve()
    visited: set[str] = set()  # also ends the search if links lead to each other's folders
    stack: list[tuple[str, str | None, bool]] = [(name, None, False) for name in sorted_links]
    while stack:
        name, target, is_ready = stack.pop()
        if is_ready:
            yield name, target
        elif name not in visited:
            visited.add(name)
            try:
                path = (root / name).resolve()
            except (OSError, RuntimeError):  # the link leads to itself
                path = real_root / name
            if path.is_relative_to(real_root):
                target = path.relative_to(real_root).as_posix()
            stack.append((name, target, True))
            if target is not None:
                inside = sorted_links[_slice_inside(sorted_links, target)]
                stack += [(link, None, False) for link in inside]


def _slice_inside(sorted_names: list[str], folder: str) -> slice:
    """Return the slice of the names below a folder."""
    # These names begin with `folder/`, so sorting puts them together. `0` follows `/` in ASCII.
    begin = bisect.bisect_left(sorted_names, f"{folder}/")
    return slice(begin, bisect.bisect_left(sorted_names, f"{folder}0", begin))


def _find_candidates(
    root: Path,
    below: str,
    folders: tuple[str, ...],
    unsent: dict[str, str],
    script_folder: str = "",
) -> Iterator[tuple[str, bool]]:
    """Yield (name, is_tracked) for the files in the folders `folders` of root/below, by the rules
    of git there. Add ignored files to `unsent`. All names are relative to `root`; `below` is "" or
    ends in a slash. Raises UserError."""
    folder = root / below
    if below.count("/") > MAX_LEVELS:
        unsent[below] = TOO_DEEP
        return
    if not has_repository(folder):
        for name in folders:
            yield from _walk(root, below + name, unsent)
        return
    untracked = ("--others", "--exclude-standard")  # the words of git for files that it could track
    # {name: is_tracked}. In a conflict git lists a tracked file several times.
    names = dict.fromkeys(_list_by_git(folder, below, folders, *untracked), False)
    names |= dict.fromkeys(_list_by_git(folder, below, folders, "--cached"), True)
    if names:  # git fails in a folder that it ignores
        ignored = _list_by_git(folder, below, folders, *untracked, "--ignored", "--directory")
        unsent |= dict.fromkeys(ignored, "ignored by git")
    if script_folder and not any(
        # The script may also be in a nested repository, which git lists as one name.
        _is_in(name, script_folder) or _is_in(script_folder, name.rstrip("/"))
        for name in names
    ):
        # Git ignores the script's folder: people keep private scripts in folders such as scratch/.
        # Git has no further rules for such a folder, so all its files are sent.
        for name in [name for name in unsent if _is_in(name.rstrip("/"), script_folder)]:
            del unsent[name]
        for name in [name for name in unsent if _is_in(script_folder, name.rstrip("/"))]:
            unsent[name] = "ignored by git, except the script's folder"
        yield from _walk(root, script_folder, unsent)
    for name, is_tracked in names.items():
        path = root / name
        # Git lists a nested repository, such as a submodule, as one name.
        if path.is_symlink() or not path.is_dir():
            yield name, is_tracked
        elif os.path.lexists(path / ".git"):
            script = script_folder if _is_in(script_folder, name.rstrip("/")) else ""
            yield from _find_candidates(root, name.rstrip("/") + "/", (".",), unsent, script)
        else:
            unsent[f"{name}/"] = "submodules without their files (git submodule update --init)"


def has_repository(folder: Path) -> bool:
    """Return whether a folder is in a repository. For the checkout, git also has to read it."""
    if folder != CHECKOUT:
        return git.root_of(folder.resolve()) is not None
    # The checkout may have been unpacked inside another repository, or git may refuse to read it
    # (NTFS, a container). Then git is not needed, since code.py names the folders to send.
    try:
        return os.path.lexists(folder / ".git") and bool(git.run(folder, "rev-parse", "HEAD"))
    except UserError:
        return False


def _list_by_git(folder: Path, below: str, folders: tuple[str, ...], *words: str) -> list[str]:
    """Return the names that `git ls-files` with these words prints in `folder`, with `below` before
    each name. Raises UserError if git fails: without its rules, keys and data might be sent."""
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
    """Yield (name, is_tracked) for root/start, a file, or for all files of this folder, which is in
    no repository. For repositories below this folder, yield their candidates. Raises UserError."""
    contains_home = False
    with contextlib.suppress(RuntimeError):  # a container's user may have no home
        contains_home = Path.home().resolve().is_relative_to((root / start).resolve())
    if contains_home:
        raise UserError(
            f"{root} is or contains your home, and Tandem would send everything in it: move "
            "the code into a folder of its own."
        )
    if (root / start).is_file():
        yield start, False
        return

    def relative_name(path: str) -> str:
        return Path(path).relative_to(root).as_posix()

    unreadable: list[OSError] = []
    for folder, subfolders, file_names in os.walk(root / start, onerror=unreadable.append):
        # os.walk enters the subfolders that remain in its list.
        if relative_name(folder).count("/") >= MAX_LEVELS:
            unsent[f"{relative_name(folder)}/"], subfolders[:] = TOO_DEEP, []
            continue
        paths = [Path(folder) / name for name in sorted(subfolders)]
        links = [path for path in paths if path.is_symlink()]
        repositories = [path for path in paths if os.path.lexists(path / ".git")]
        subfolders[:] = [path.name for path in paths if path not in links + repositories]
        for path in repositories:
            yield from _find_candidates(root, f"{relative_name(str(path))}/", (".",), unsent)
        for name in [*file_names, *(path.name for path in links)]:
            yield relative_name(f"{folder}/{name}"), False
    unsent.update((f"{relative_name(error.filename)}/", "unreadable") for error in unreadable)


def _find_exclusion(
    name: str, is_tracked: bool, is_environment: Callable[[str], bool]
) -> tuple[str, str] | None:
    """Return (name, reason) of the file, or of a folder around it, that must not be sent; None if
    the file may be sent."""
    path = PurePosixPath(name)
    if name.count("/") > MAX_LEVELS:
        return name, TOO_DEEP
    # The outermost folder decides, so that an environment is one entry, not one for each file.
    # For a/b/c.py the parents are a/b, a and `.`, in this order; `.` is left out.
    for folder in reversed(list(path.parents)[:-1]):
        if folder.name in CACHES:
            return f"{folder}/", "caches"
        if is_environment(str(folder)):
            return f"{folder}/", "environments of Python"
        if folder.name.startswith(".") and not is_tracked:
            return f"{folder}/", "hidden folders that git does not track"
    if SECRETS.fullmatch(path.name):
        return name, "names of secret files"
    # Python decodes bytes that are not UTF-8 as characters of this range.
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return name, "names that are not UTF-8"
    return None


def _is_in(name: str, folder: str) -> bool:
    """Return whether a name is that of `folder` or of something below it."""
    return folder == "." or name == folder or name.startswith(f"{folder}/")
