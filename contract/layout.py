"""Define what a data set is by the names of files and folders: ROOT/{train,val}/<class>/<image>, or
any folder that is not empty (the kind `files`). No image is opened here. Read `read_split` first.

The trainer lists its images with this module. launcher/remote.py and the role share_client send its
source to machines that have neither the code nor any package yet. Therefore the module imports only
the standard library, and runs on Python >= 3.6.
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
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

SPLITS = ("train", "val")
IMAGES, FILES = KINDS = ("images", "files")  # kinds of data sets
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif"),
    *(".ppm", ".pgm"),
)
# Folders that file servers, desktops and archives make. Tandem skips them, and hidden folders.
SYSTEM_FOLDERS = (
    *("@eaDir", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot", "lost+found"),
    *("$RECYCLE.BIN", "System Volume Information", "__MACOSX"),
)
KINDS_SHOWN = 6  # of the kinds of skipped files, in a note for people
NOTE_CHARACTERS = 1000  # at most, in a note for people
LAYOUT = "the layout is DATA/train/<class>/<image> and DATA/val/<class>/<image>"


class PointerSystem(NamedTuple):
    """A system that keeps large files elsewhere, and puts a pointer in a file's place until
    `command` fetches the file. A pointer is a small file with a text, or a link. `pattern` matches
    the beginning of that text, or of the link's target."""

    name: str
    command: str
    pattern: bytes


POINTER_SYSTEMS = (
    # `version https://git-lfs.github.com/spec/v1`. `git lfs pull` alone changes nothing in a clone
    # that was made without Git LFS.
    PointerSystem(
        "Git LFS",
        "git lfs install --local && git lfs pull",
        rb"version https://(git-lfs|hawser)\.github\.com/spec/",
    ),
    # `../../.git/annex/objects/Xq/3K/SHA256E-s48--ab12.jpg/SHA256E-s48--ab12.jpg`
    PointerSystem("git-annex", "git annex get .", rb"[^\n\0]*/annex/objects/"),
    # `/home/anna/flowers/.dvc/cache/files/md5/ab/12cd`
    PointerSystem("DVC", "dvc pull", rb"[^\n\0]*/(\.dvc/cache|files/md5)/"),
)

# Errors of a disk or a file server that fails, not of a file. The same call may succeed later.
FAILING = (
    errno.EIO,
    errno.EREMOTEIO,
    errno.ENODEV,  # from systemd's automount, if it cannot mount
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
    """Return a text with escapes for control characters: the name of a file may contain any."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def describe_pointer(text: bytes) -> str:
    """Return the system whose pointer a file's text or a link's target is, and the command that
    fetches the file; "" if it is not a pointer."""
    for system in POINTER_SYSTEMS:
        if re.match(system.pattern, text):
            return f"{system.name} (`{system.command}` in the clone fetches the files)"
    return ""


DVC = describe_pointer(b"/.dvc/cache/")  # the description of DVC's pointers


class LayoutError(Exception):
    """A folder is not a data set; the text is a sentence with the reason."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class NoAnswer(LayoutError):
    """The disk or the file server of a folder fails, so nobody knows what the folder contains."""


@contextlib.contextmanager
def translate_os_errors() -> Iterator[None]:
    """Turn an OSError raised within the block into a LayoutError."""
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
    """Hold the content of one split, or of one class of a split.

    `images`: {class of train: its sorted paths}, in the order of the class numbers. A path starts
    at the root: `train/cat/1.jpg`. A class that val lacks has no paths. `folders`: {path: when the
    folder last changed, in ns}. `skipped`: {kind of files that are not images: their number}.
    `twin_note`: a clause on two classes whose names look the same, or "".
    """

    def __init__(self) -> None:
        self.images = {}  # type: Dict[str, List[str]]
        self.folders = {}  # type: Dict[str, int]
        self.skipped = {}  # type: Dict[str, int]
        self.broken_links = []  # type: List[str]
        self.twin_note = ""

    def list_entries(self, folder: str) -> List["os.DirEntry[str]"]:
        """Return the entries of a folder, without system folders, pointers, and links that cannot
        be followed. Counts these in `skipped` and `broken_links`."""
        # The time is read before the listing: if the folder changes meanwhile, its time differs.
        self.folders[folder] = Path(folder).stat().st_mtime_ns
        entries = []
        with os.scandir(folder) as scan:
            for entry in scan:
                # DVC writes `cats.dvc` beside `cats`. Before `dvc pull` there is no `cats`.
                if entry.name.endswith(".dvc") and not os.path.lexists(entry.path[:-4]):
                    self.skip("pointers of " + DVC)
                elif entry.is_symlink() and not _can_be_followed(entry):
                    target = os.readlink(entry.path)  # noqa: PTH115 - pathlib has it since 3.9
                    system = describe_pointer(os.fsencode(target))
                    if system:
                        self.skip("pointers of " + system)
                    else:
                        self.broken_links.append(entry.path)
                elif (entry.name[0] == "." or entry.name in SYSTEM_FOLDERS) and entry.is_dir():
                    # Count one level only: a folder of thumbnails has a folder for each image.
                    try:
                        count = sum(1 for _ in Path(entry.path).iterdir())
                    except OSError:  # only root can read lost+found
                        count = 0
                    self.skip("in " + entry.name, count)
                else:
                    entries.append(entry)
        return entries

    def skip(self, kind: str, count: int = 1) -> None:
        """Count files that are not images."""
        self.skipped[kind] = self.skipped.get(kind, 0) + count

    def count_skipped(self) -> str:
        """Return text like `40 .avif, 12 in @eaDir`; "" if nothing was skipped."""
        # The most frequent kind comes first; kinds of equal number are in the order of their names.
        kinds = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        kinds = [("links that cannot be followed", len(self.broken_links)), *kinds]
        texts = [f"{count} {kind}" for kind, count in kinds if count]
        if texts[KINDS_SHOWN:]:
            texts[KINDS_SHOWN:] = [f"{len(texts) - KINDS_SHOWN} more kinds"]
        return printable(", ".join(texts))

    def skipped_clause(self) -> str:
        """Return a clause for an error, like `, but 40 .avif`; "" if nothing was skipped."""
        counts = self.count_skipped()
        return f", but {counts}" if counts else ""

    def note(self, split: str) -> str:
        """Return a note for people like `Tandem skips these files in train: 40 .avif`, or ""."""
        counts = self.count_skipped()
        skipped = f"Tandem skips these files in {split}: {counts}" if counts else ""
        clauses = [skipped, self.twin_note]
        return "; ".join(clause for clause in clauses if clause)[:NOTE_CHARACTERS]


@translate_os_errors()
def read_split(root: Path, split: str, progress: Callable[[], None] = lambda: None) -> Split:
    """Read the images of one split, and count the files that are not images. Calls `progress` after
    each class. Raises LayoutError."""
    content = Split()
    names = read_class_names(root, split, content)
    # Only the classes of train have class numbers, so train must have every class of val.
    train_names = names if split == "train" else read_class_names(root, "train", Split())
    for name in names:
        if name in train_names:
            continue
        text = f"{root / split / name} is a class, but {root / 'train'} does not have it"
        # If a class of train has a name that looks the same, add the command that renames the
        # folder of val.
        for train_name in train_names:
            if _appearance(train_name) == _appearance(name):
                difference = _explain_difference(name, train_name)
                folder, target = shlex.quote(str(root / split)), _quote_for_bash(train_name)
                raise LayoutError(
                    f"{text}. It has {target}: {difference}. "
                    f"`mv -T {folder}/{_quote_for_bash(name)} {folder}/{target}`"
                )
        raise LayoutError(f"{text}.")
    content.images = {name: [] for name in train_names}
    for name in names:
        content_of_class = read_class(root, split, name)
        content.images.update(content_of_class.images)
        content.folders.update(content_of_class.folders)
        content.broken_links += content_of_class.broken_links
        for kind, count in content_of_class.skipped.items():
            content.skip(kind, count)
        progress()
    return content


def read_class_names(root: Path, split: str, content: Split) -> List[str]:
    """Return the sorted names of a split's classes. Counts other files in `content`, and sets its
    `twin_note`. Raises LayoutError."""
    folder = root / split
    # Say what is in the folder's place: a pointer, nothing, or folders with other names.
    if not folder.is_dir():
        for path in (root, folder):
            if not path.exists() and path.with_name(path.name + ".dvc").is_file():
                raise LayoutError(f"{path} is missing: a pointer of {DVC} is in its place.")
        if not root.is_dir():
            raise LayoutError(f"there is no such folder; {LAYOUT}.")
        names_text = ", ".join(sorted(entry.name for entry in root.iterdir())[:5])
        reason = "it is an empty folder"
        if names_text:
            reason = f"it has no folder {split}. It has {names_text}"
        raise LayoutError(f"{reason}; {LAYOUT}.")
    entries = [entry for entry in content.list_entries(str(folder)) if entry.name[0] != "."]
    # A broken link here may stand for a whole class, so it is an error. Within a class, a broken
    # link stands for one image, and read_class only counts it.
    if content.broken_links:
        link_text = describe_link(min(content.broken_links))
        raise LayoutError(f"{link_text}: repair it, or remove it if it is not a class.")
    names = sorted(entry.name for entry in entries if entry.is_dir())
    file_count = len(entries) - len(names)
    if not names:
        texts = {0: "is empty", 1: "has one file, but no class folders"}
        text = texts.get(file_count, f"has {file_count} files, but no class folders")
        raise LayoutError(f"{folder} {text}{content.skipped_clause()}; {LAYOUT}.")
    if split == "train" and len(names) == 1:
        raise LayoutError(f"{folder} has one class, {names[0]}: a classifier needs two or more.")
    if file_count:
        content.skip("beside the classes", file_count)
    # Two names that look the same usually are one class, copied from two systems. A note suffices,
    # because some users mean two classes.
    by_appearance = {}  # type: Dict[str, str]
    for name in names:
        twin = by_appearance.setdefault(_appearance(name), name)
        if twin != name:
            difference = _explain_difference(twin, name)
            content.twin_note = (
                f"{_quote_for_bash(twin)} and {_quote_for_bash(name)} are different classes: "
                f"{difference}"
            )
            break
    return names


@translate_os_errors()
def read_class(root: Path, split: str, name: str) -> Split:
    """Read the images of one class, at any depth. Follows links. Raises LayoutError."""
    content, paths = Split(), []  # type: Split, List[str]
    # Paths start at the root, so that /data/flowers/train/cat/1.jpg becomes train/cat/1.jpg.
    begin = len(str(root / split)) - len(split)
    folders = [str(root / split / name)]
    while folders:
        for entry in content.list_entries(folders.pop()):
            if entry.is_dir():
                folders.append(entry.path)
            elif entry.name[0] != "." and entry.name.lower().endswith(SUFFIXES):
                paths.append(entry.path[begin:])
            else:
                suffix = Path(entry.name).suffix.lower()[:20] or "without a suffix"
                content.skip("hidden" if entry.name[0] == "." else suffix)
    if not paths:
        raise LayoutError(
            f"{root / split / name} has no images ({', '.join(SUFFIXES)})"
            f"{content.skipped_clause()}; remove it or fill it."
        )
    content.images = {name: sorted(paths)}
    return content


@translate_os_errors()
def list_files(root: Path, progress: Callable[[], None]) -> Tuple[Dict[str, Any], Split]:
    """Return the listing of all files below a folder, hidden files and files behind links included,
    and a Split with the folders and the broken links. Calls `progress` for each entry. Raises
    LayoutError if there is no file.

    A folder may have millions of files, so the memory holds only the names of one folder at a time.
    """
    tree, names_hash, file_count, total_bytes = Split(), hashlib.sha256(), 0, 0
    begin = len(str(root)) + 1
    folders = [str(root)]
    while folders:
        folder = folders.pop()
        try:
            tree.folders[folder] = Path(folder).stat().st_mtime_ns
            with os.scandir(folder) as scan:
                # In reverse order, because pop() below takes the last entry.
                entries = sorted(scan, key=lambda entry: os.fsencode(entry.name), reverse=True)
        except (PermissionError, FileNotFoundError):
            # The script may not need this folder, such as the lost+found of a disk.
            if folder == str(root):
                raise
            tree.skip("folders that cannot be read")
            continue
        while entries:
            # pop() frees the entry. The file status in all entries would take most of the memory.
            entry = entries.pop()
            progress()
            if entry.is_symlink() and not _can_be_followed(entry):
                tree.broken_links.append(entry.path)
            elif entry.is_dir():
                folders.append(entry.path)
            elif entry.is_file():
                try:
                    bytes_of_file = entry.stat().st_size
                except FileNotFoundError:  # a lock or a cache that was removed meanwhile
                    continue
                file_count, total_bytes = file_count + 1, total_bytes + bytes_of_file
                names_hash.update(os.fsencode(f"{entry.path[begin:]}\0{bytes_of_file}\n"))
            else:
                tree.skip("that are no files")  # sockets and named pipes
    if not file_count:
        raise LayoutError(f"{root} has no files{tree.skipped_clause()}.")
    # In a listing of the kind `files`, the files count as images.
    listing = {"classes": 0, "images": file_count, "bytes": total_bytes}
    return {**listing, "sha256": names_hash.hexdigest(), "note": tree.note("the folder")}, tree


def _can_be_followed(link: "os.DirEntry[str]") -> bool:
    """Return whether a link leads to a file, or to a folder that does not contain the link.

    The kernel follows 40 links in a path. A folder with two links to itself would seem to contain
    2**40 folders.
    """
    try:
        is_file = not stat.S_ISDIR(link.stat().st_mode)
    except OSError as error:
        if error.errno in FAILING:
            raise
        return False  # the link is broken, or part of a circle of links
    above = Path(link.path).parent
    return is_file or os.path.realpath(link.path) not in {
        os.path.realpath(str(folder)) for folder in (above, *above.parents)
    }


def describe_link(path: str) -> str:
    """Return a clause about a link that cannot be followed. Raises OSError."""
    target = os.readlink(path)  # noqa: PTH115 - pathlib has it since Python 3.9
    return f"{path} is a link that cannot be followed (to {target})"


# ---- names that look the same ----


def _appearance(name: str) -> str:
    """Return a text that is equal for names that look the same."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def _explain_difference(name: str, twin: str) -> str:
    """Return a clause on how two names differ that look the same."""
    if unicodedata.normalize("NFC", name) == unicodedata.normalize("NFC", twin):
        return "one stores accents as separate characters, as macOS does"
    if name.split() == twin.split():
        return "they differ in blanks"
    if name.casefold() == twin.casefold():
        return "they differ in capitals"
    return "some of their characters only look equal"


def _quote_for_bash(name: str) -> str:
    """Quote a name for bash. Bytes that are not ASCII get escapes, as in $'caf\\xc3\\xa9', so that
    people can copy the name from any terminal."""
    if all(" " <= letter <= "~" for letter in name):
        return shlex.quote(name)
    octets = [
        chr(b) if 32 <= b < 127 and b not in b"\\'" else f"\\x{b:02x}" for b in os.fsencode(name)
    ]
    return "$'{}'".format("".join(octets))


# ---- data sets that are copied and compared ----


def read_data_sets(entries: List[Any]) -> List[Dict[str, str]]:
    """Return name and kind of each entry of the setting data_sets. An entry is a name, for image
    classes, or {name: coco, kind: files}. Raises LayoutError."""
    rows = []
    for entry in entries:
        row = entry if isinstance(entry, dict) else {"name": entry, "kind": IMAGES}
        name, kind = row.get("name"), row.get("kind")
        if set(row) != {"name", "kind"} or kind not in KINDS or not isinstance(name, str):
            raise LayoutError(
                f"data_sets: {entry} is neither a name nor an entry such as "
                f"{{name: coco, kind: {FILES}}}."
            )
        if not name or "/" in name or name in (".", "..") or not name.isprintable():
            raise LayoutError(f"data_sets: {name!a} cannot be the name of a folder in data/.")
        rows.append({"name": name, "kind": str(kind)})
    return rows


def find_data_sets(folder: Path) -> List[str]:
    """Return the names of the data sets of image classes in a folder. Raises OSError."""
    return sorted(path.name for path in folder.iterdir() if (path / "train").is_dir())


def print_listings(folder: Path, node_dir: Path) -> None:
    """Print a line of JSON with the listings of each data set, or the reason why it has none."""
    names = find_data_sets(folder)
    print(json.dumps({name: _listings_or_fault(folder / name, node_dir) for name in names}))


def print_listing(root: Path, node_dir: Path, kind: str) -> None:
    """Print a line of JSON with the listings of a data set, or the reason why it has none."""
    print(json.dumps(_listings_or_fault(root, node_dir, kind)))


def _listings_or_fault(root: Path, node_dir: Path, kind: str = IMAGES) -> Any:
    """Return the listings of a data set, or a text with the reason why it has none."""
    try:
        return read_listings(root, node_dir, kind=kind)
    except LayoutError as error:
        return str(error)


@translate_os_errors()
def read_listings(
    root: Path, node_dir: Path, progress: Callable[[], None] = lambda: None, kind: str = IMAGES
) -> Dict[str, Dict[str, Any]]:
    """Return {split: listing}. For a data set of the kind `files`, return {FILES: the listing of
    all its files}.

    A listing has `classes` and `images`, which are numbers, `sha256` of the names and sizes, and a
    `note` on skipped files for people. With the kind `files` it also has `bytes`. The listings are
    stored in `node_dir`, and used again until one of the folders changes. Calls `progress` after
    each class or file. Raises LayoutError.
    """
    real = root.resolve()
    cache = node_dir / "manifests" / hashlib.sha256(os.fsencode(str(real))).hexdigest()[:16]
    # The key contains the rules, because a version with other rules makes another listing.
    key = [kind, str(real), *SUFFIXES, *SYSTEM_FOLDERS]
    try:
        cached = json.loads(cache.read_text())
        times = cached["folders"]
        is_current = all(Path(path).stat().st_mtime_ns == time for path, time in times.items())
        if cached["key"] == key and is_current:
            return dict(cached["splits"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # there is no cache, or it is damaged
    if kind == FILES:
        listing, tree = list_files(real, progress)
        answer, folders = {FILES: listing}, tree.folders
    else:
        splits = {name: read_split(real, name, progress) for name in SPLITS}
        answer = {name: _list_images(real, name, splits[name], progress) for name in SPLITS}
        folders = {path: time for split in splits.values() for path, time in split.folders.items()}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"key": key, "folders": folders, "splits": answer}))
        temporary.replace(cache)
    except OSError:
        pass  # without a cache the next call only takes longer; other code reports a full disk
    return answer


def _list_images(
    root: Path, name: str, split: Split, progress: Callable[[], None]
) -> Dict[str, Any]:
    """Return the listing of the split `name`. Calls `progress` after each class of train."""
    names_hash, image_count = hashlib.sha256(), 0
    for paths in split.images.values():
        image_count += len(paths)
        for path in paths:
            try:
                size = str(os.stat(f"{root}/{path}").st_size)  # noqa: PTH116 - a million of them
            except OSError:
                size = "None"  # the trainer counts a file that it cannot read as a bad image
            names_hash.update(os.fsencode(f"{path}\0{size}\n"))
        progress()
    return {
        "classes": sum(bool(paths) for paths in split.images.values()),
        "images": image_count,
        "sha256": names_hash.hexdigest(),
        "note": split.note(name),
    }
