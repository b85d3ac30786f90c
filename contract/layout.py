"""What a data set is, by the names of files and folders alone: ROOT/{train,val}/<class>/<image>, or
any folder that is not empty (the kind `files`).

The layout is defined only here. The trainer lists its images with this module; launcher/remote.py
and the role share_client send its source to machines that have neither the code nor any package
yet. So it imports only the standard library, and runs on Python >= 3.6. Read `read_split` first.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
import stat
import unicodedata
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

SPLITS = ("train", "val")
IMAGES, FILES = KINDS = ("images", "files")  # kinds of data sets
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm"),
)
# What file servers, desktops and archives leave among one's folders; so do hidden ones.
SYSTEM_FOLDERS = (
    *("@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot", "lost+found"),
    *("$RECYCLE.BIN", "System Volume Information", "__MACOSX"),
)
KINDS_SHOWN, NOTE = 6, 1000  # and characters
LAYOUT = "the layout is DATA/train/<class>/<image> and DATA/val/<class>/<image>"
# Systems that keep large files elsewhere until they are fetched, the command that fetches them, and
# how the text or the link begins that is in the place of such a file.
POINTERS = (
    # Without its first command a clone that was made without Git LFS stays as it is.
    (
        *("Git LFS", "git lfs install --local && git lfs pull"),
        rb"version https://(git-lfs|hawser)\.github\.com/spec/",
    ),
    ("git-annex", "git annex get .", rb"[^\n\0]*/annex/objects/"),
    ("DVC", "dvc pull", rb"[^\n\0]*/(\.dvc/cache|files/md5)/"),
)


# What a disk or a file server that fails answers: no file is at fault, and it may be well again.
FAILING = (
    errno.EIO,
    errno.EREMOTEIO,
    errno.ENODEV,  # of systemd's automount, where the mount does not come
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ECONNRESET,
)


def printable(text: str) -> str:
    """In one line, whatever characters the names of files in it have."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def pointer_kind(text: bytes) -> str:
    """The system whose pointer a text or the target of a link is; "" if it is none."""
    for kind, command, begin in POINTERS:
        if re.match(begin, text):
            return f"{kind} (`{command}` in the clone fetches the files)"
    return ""


DVC = pointer_kind(b"/.dvc/cache/")


class LayoutError(Exception):
    """The text says in a sentence why a folder is not a data set."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class NoAnswer(LayoutError):
    """Its disk or file server fails."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turns an OSError raised within the block into a LayoutError."""
    try:
        yield
    except OSError as error:
        if error.errno in FAILING:
            raise NoAnswer(
                f"cannot read {error.filename}: {error.strerror}. Check its disk or file server."
            ) from error
        raise LayoutError(
            f"cannot read {error.filename}: {error.strerror}. "
            "Every user that trains must be able to read and enter all its folders."
        ) from error


class Split:
    """One split, as it was read.

    `images`: of each class of train, in the order of the class numbers, by paths from the root with
    slashes, sorted; of a class that val lacks, none. `folders`: when each last changed. `unread`:
    how many there are of each kind that is left out.
    """

    def __init__(self) -> None:
        self.images = {}  # type: Dict[str, List[str]]
        self.folders = {}  # type: Dict[str, int]
        self.unread = {}  # type: Dict[str, int]
        self.broken_links = []  # type: List[str]
        self.alike = ""

    def entries(self, folder: str) -> List["os.DirEntry[str]"]:
        """What a folder has, but for system folders and links that cannot be followed."""
        self.folders[folder] = Path(folder).stat().st_mtime_ns  # before: so later changes are seen
        entries = []
        with os.scandir(folder) as scan:
            for entry in scan:
                if entry.name.endswith(".dvc") and not os.path.lexists(entry.path[:-4]):
                    self.leave_out("pointers of " + DVC)
                elif entry.is_symlink() and not _leads_on(entry):
                    target = os.readlink(entry.path)  # noqa: PTH115 - pathlib has it since 3.9
                    kind = pointer_kind(os.fsencode(target))
                    if kind:
                        self.leave_out("pointers of " + kind)
                    else:
                        self.broken_links.append(entry.path)
                elif (entry.name[0] == "." or entry.name in SYSTEM_FOLDERS) and entry.is_dir():
                    self.leave_out("in " + entry.name, _count(entry.path))
                else:
                    entries.append(entry)
        return entries

    def leave_out(self, kind: str, count: int = 1) -> None:
        self.unread[kind] = self.unread.get(kind, 0) + count

    def add(self, other: "Split") -> None:
        self.images.update(other.images)
        self.folders.update(other.folders)
        self.broken_links += other.broken_links
        for kind, count in other.unread.items():
            self.leave_out(kind, count)

    def left_out(self) -> str:
        """`40 .avif, 12 in @eaDir`, or nothing."""
        kinds = sorted(self.unread.items(), key=lambda kind: (-kind[1], kind[0]))
        kinds = [("links that cannot be followed", len(self.broken_links)), *kinds]
        texts = [f"{count} {kind}" for kind, count in kinds if count]
        if texts[KINDS_SHOWN:]:
            texts[KINDS_SHOWN:] = [f"{len(texts) - KINDS_SHOWN} more kinds"]
        return printable(", ".join(texts))

    def note(self, split: str) -> str:
        """What people should know of it: `not read in train: 40 .avif`; or nothing."""
        left_out = self.left_out() and f"not read in {split}: {self.left_out()}"
        return "; ".join(text for text in (left_out, self.alike) if text)[:NOTE]


@readable()
def read_split(root: Path, split: str, progress: Callable[[], None] = lambda: None) -> Split:
    """The images of one split, and what else lies there. Raises LayoutError."""
    read = Split()
    names = class_names(root, split, read)
    known = names if split == "train" else class_names(root, "train", Split())
    for name in names:
        if name not in known:
            raise LayoutError(_unknown_class(root / split, name, known))
    read.images = {name: [] for name in known}
    for name in names:
        read.add(read_class(root, split, name))
        progress()
    return read


def class_names(root: Path, split: str, read: Split) -> List[str]:
    """The class folders of a split, sorted. Raises LayoutError."""
    folder = root / split
    if not folder.is_dir():
        for path in (root, folder):
            if not path.exists() and path.with_name(path.name + ".dvc").is_file():
                raise LayoutError(f"{path} is not here; in its place is a pointer of {DVC}.")
        if not root.is_dir():
            raise LayoutError(f"there is no such folder; {LAYOUT}.")
        there = ", ".join(sorted(entry.name for entry in root.iterdir())[:5])
        what = f"it has no folder {split}, but {there}" if there else "it is an empty folder"
        raise LayoutError(f"{what}; {LAYOUT}.")
    entries = [entry for entry in read.entries(str(folder)) if entry.name[0] != "."]
    for link in sorted(read.broken_links)[:1]:  # a class may be lost, unlike by one in a class
        raise LayoutError(f"{describe_link(link)}: repair it, or remove it if it is no class.")
    names = sorted(entry.name for entry in entries if entry.is_dir())
    files = len(entries) - len(names)
    if not names:
        texts = {0: "is empty", 1: "has one file and no class folders"}
        text = texts.get(files, f"has {files} files and no class folders")
        text += read.left_out() and f", but {read.left_out()}"
        raise LayoutError(f"{folder} {text}; {LAYOUT}.")
    if split == "train" and len(names) == 1:
        raise LayoutError(
            f"{folder} has one class, {names[0]}: to tell images apart takes two or more."
        )
    if files:
        read.leave_out("beside the classes", files)
    read.alike = _alike(names)
    return names


@readable()
def read_class(root: Path, split: str, name: str) -> Split:
    """The images of one class, at any depth; links are followed. Raises LayoutError."""
    read, paths = Split(), []  # type: Split, List[str]
    begin = len(str(root / split)) - len(split)
    folders = [str(root / split / name)]
    while folders:
        for entry in read.entries(folders.pop()):
            if entry.is_dir():
                folders.append(entry.path)
            elif entry.name[0] != "." and entry.name.lower().endswith(SUFFIXES):
                paths.append(entry.path[begin:])
            else:
                read.leave_out(_kind(entry.name))
    if not paths:
        there = read.left_out() and f", but {read.left_out()}"
        raise LayoutError(
            f"{root / split / name} has no images ({', '.join(SUFFIXES)}){there}; remove it or "
            "fill it."
        )
    read.images = {name: sorted(paths)}
    return read


@readable()
def list_files(root: Path, progress: Callable[[], None]) -> Tuple[Dict[str, Any], Split]:
    """Return the listing of all files below a folder, hidden ones and those that links lead to
    included, and the folders and broken links that were met. Raises LayoutError if there is no
    file.

    Only the names of one folder are kept at a time, since there may be millions.
    """
    read, total, files, size = Split(), hashlib.sha256(), 0, 0
    begin = len(str(root)) + 1
    folders = [str(root)]
    while folders:
        folder = folders.pop()
        try:
            read.folders[folder] = Path(folder).stat().st_mtime_ns
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        except (PermissionError, FileNotFoundError):
            # The script may well do without it, as without a disk's lost+found.
            if folder == str(root):
                raise
            read.leave_out("folders that cannot be read")
            continue
        for entry in entries:
            progress()
            if entry.is_symlink() and not _leads_on(entry):
                read.broken_links.append(entry.path)
            elif entry.is_dir():
                folders.append(entry.path)
            elif entry.is_file():
                try:
                    bytes_of_file = entry.stat().st_size
                except FileNotFoundError:  # a lock or a cache, which is gone meanwhile
                    continue
                files, size = files + 1, size + bytes_of_file
                total.update(os.fsencode(f"{entry.path[begin:]}\0{bytes_of_file}\n"))
            else:
                read.leave_out("that are no files")  # sockets and named pipes
    if not files:
        there = read.left_out() and f", but {read.left_out()}"
        raise LayoutError(f"{root} has no files{there}.")
    listing = {"classes": 0, "images": files, "bytes": size, "sha256": total.hexdigest()}
    return {**listing, "note": read.note("the folder")}, read


def _kind(name: str) -> str:
    """Of a file that is no image."""
    if name[0] == ".":
        return "hidden"
    return Path(name).suffix.lower()[:20] or "without a suffix"


def _count(folder: str) -> int:
    """How much a folder has that is left out, without looking deeper: that of thumbnails has a
    folder for each image."""
    try:
        return sum(1 for _ in Path(folder).iterdir())
    except OSError:
        return 0  # lost+found is root's


def _leads_on(link: "os.DirEntry[str]") -> bool:
    """Whether a link leads to a file, or to a folder that it is not in: two links that are in
    theirs would have 2**40 folders."""
    try:
        is_file = not stat.S_ISDIR(link.stat().st_mode)
    except OSError as error:
        if error.errno in FAILING:
            raise
        return False
    above = Path(link.path).parent
    return is_file or os.path.realpath(link.path) not in {
        os.path.realpath(str(folder)) for folder in (above, *above.parents)
    }


def describe_link(path: str) -> str:
    target = os.readlink(path)  # noqa: PTH115 - pathlib has it since Python 3.9
    return f"{path} is a link that cannot be followed (to {target})"


# ---- names that look the same ----


def _seen(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _alike(names: List[str]) -> str:
    """Of two classes whose names look the same."""
    known = {}  # type: Dict[str, str]
    for name in names:
        other = known.setdefault(_seen(name), name)
        if other != name:
            return f"{_quoted(other)} and {_quoted(name)} are two classes: {_differ(other, name)}"
    return ""


def _unknown_class(folder: Path, name: str, known: List[str]) -> str:
    """Why a class is refused that train lacks, which may have one whose name looks the same."""
    text = f"{folder / name} is a class that {folder.parent / 'train'} lacks"
    for other in known:
        if _seen(other) == _seen(name):
            old, new = (shlex.quote(str(folder)) + "/" + _quoted(n) for n in (name, other))
            return (
                f"{text}, where it is {_quoted(other)}: {_differ(name, other)}. `mv -T {old} {new}`"
            )
    return text + "."


def _differ(one: str, other: str) -> str:
    if unicodedata.normalize("NFC", one) == unicodedata.normalize("NFC", other):
        return "one has its accents as characters of their own, as macOS writes them"
    if one.split() == other.split():
        return "they differ in blanks"
    if one.casefold() == other.casefold():
        return "they differ in capitals"
    return "some of their characters only look the same"


def _quoted(name: str) -> str:
    """As bash reads it, with bytes for what is not ASCII: so it can be copied from any terminal."""
    if all(" " <= letter <= "~" for letter in name):
        return shlex.quote(name)
    octets = [
        chr(b) if 32 <= b < 127 and b not in b"\\'" else f"\\x{b:02x}" for b in os.fsencode(name)
    ]
    return "$'{}'".format("".join(octets))


# ---- data sets that are copied and compared ----


def read_data_sets(entries: List[Any]) -> List[Dict[str, str]]:
    """Return name and kind of each entry of the setting data_sets: a name alone (image classes), or
    {name: coco, kind: files}. Raises LayoutError."""
    sets = []
    for entry in entries:
        row = entry if isinstance(entry, dict) else {"name": entry, "kind": IMAGES}
        name, kind = row.get("name"), row.get("kind")
        if set(row) != {"name", "kind"} or kind not in KINDS or not isinstance(name, str):
            raise LayoutError(
                f"data_sets: {entry} is neither a name nor like {{name: coco, kind: {FILES}}}."
            )
        if not name or "/" in name or name in (".", "..") or not name.isprintable():
            raise LayoutError(f"data_sets: {name!a} is no name of a folder in data/.")
        sets.append({"name": name, "kind": str(kind)})
    return sets


def data_sets(folder: Path) -> List[str]:
    """The names of the data sets in a folder. Raises OSError."""
    return sorted(path.name for path in folder.iterdir() if (path / "train").is_dir())


def print_listings(folder: Path, node_dir: Path) -> None:
    """One line of JSON: of each data set its listings, or what is wrong with it."""
    answers = {}  # type: Dict[str, Any]
    for name in data_sets(folder):
        try:
            answers[name] = listings(folder / name, node_dir)
        except LayoutError as error:
            answers[name] = str(error)
    print(json.dumps(answers))


@readable()
def listings(
    root: Path, node_dir: Path, progress: Callable[[], None] = lambda: None, kind: str = IMAGES
) -> Dict[str, Dict[str, Any]]:
    """Return classes, images and a hash of names and sizes of each split, and of a data set of the
    kind `files` those of all its files, as the split FILES. They are made again only when one of
    the folders has changed. `progress` is called after each class or file. Raises LayoutError.
    """
    real = root.resolve()
    cache = node_dir / "manifests" / hashlib.sha256(os.fsencode(str(real))).hexdigest()[:16]
    key = [kind, str(real), *SUFFIXES, *SYSTEM_FOLDERS]
    try:
        cached = json.loads(cache.read_text())
        known = cached["folders"]
        if cached["key"] == key and all(Path(f).stat().st_mtime_ns == t for f, t in known.items()):
            return dict(cached["splits"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    if kind == FILES:
        listing, tree = list_files(real, progress)
        made, folders = {FILES: listing}, tree.folders
    else:
        read = {name: read_split(real, name, progress) for name in SPLITS}
        made = {name: _listing(real, name, split, progress) for name, split in read.items()}
        folders = {path: time for split in read.values() for path, time in split.folders.items()}
    keep({"key": key, "folders": folders, "splits": made}, cache)
    return made


def _listing(root: Path, split: str, read: Split, progress: Callable[[], None]) -> Dict[str, Any]:
    total, images = hashlib.sha256(), 0
    for paths in read.images.values():
        images += len(paths)
        for path in paths:
            total.update(os.fsencode(f"{path}\0{_size(f'{root}/{path}')}\n"))
        progress()
    return {
        "classes": sum(bool(paths) for paths in read.images.values()),
        "images": images,
        "sha256": total.hexdigest(),
        "note": read.note(split),
    }


def _size(path: str) -> Optional[int]:
    """In bytes; None for a file that cannot be reached, a bad image in training."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - a million of them
    except OSError:
        return None


def keep(value: Dict[str, Any], path: Path) -> None:
    """Write a cache, if it can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except OSError:
        pass  # a full disk is reported elsewhere; it is only made again
