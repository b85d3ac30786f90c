"""What a data set is: ROOT/{train,val}/<class>/<image>, by the names of files and folders alone.

The layout is defined only here. The trainer lists its images with this module, and
launcher/remote.py sends its source to machines that have neither the code nor any package
yet. So it imports only the standard library, nothing from the trainer, and runs on Python >= 3.6.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

SPLITS = ("train", "val")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
LAYOUT = "the layout is DATA/train/<class>/<image> and DATA/val/<class>/<image>"


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


@readable()
def images_by_class(root: Path, split: str) -> Dict[str, List[str]]:
    """The images of one split for each class of train, in the order of the class numbers.

    Paths are relative to `root`, with slashes, and sorted. A class that is missing from val has an
    empty list there. Raises LayoutError.
    """
    known = dict.fromkeys(class_names(root, "train"))
    here = known if split == "train" else dict.fromkeys(class_names(root, split))
    for name in here:
        if name not in known:
            raise LayoutError(f"{root / split / name} is a class that {root / 'train'} lacks.")
    return {name: images(root, split, name) if name in here else [] for name in known}


@readable()
def class_names(root: Path, split: str) -> List[str]:
    """The class folders of a split, sorted. Raises LayoutError."""
    folder = root / split
    if not folder.is_dir():
        if not root.is_dir():
            raise LayoutError(f"there is no such folder; {LAYOUT}.")
        there = ", ".join(sorted(entry.name for entry in root.iterdir())[:5])
        what = f"it has no folder {split}, but {there}" if there else "it is an empty folder"
        raise LayoutError(f"{what}; {LAYOUT}.")
    found = os.scandir(str(folder))
    entries = sorted(entry.name for entry in found if not entry.name.startswith("."))
    names = [name for name in entries if (folder / name).is_dir()]
    if not names:
        files = {0: "is empty", 1: "has one file and no class folders"}
        what = files.get(len(entries), f"has {len(entries)} files and no class folders")
        raise LayoutError(f"{folder} {what}; {LAYOUT}.")
    if split == "train" and len(names) == 1:
        raise LayoutError(
            f"{folder} has one class, {names[0]}: to tell images apart takes two or more."
        )
    return names


@readable()
def images(root: Path, split: str, name: str) -> List[str]:
    """The images of a class, at any depth, sorted; symlinks are followed. Raises LayoutError."""
    found = []  # type: List[str]
    for where, files in walk(str(root / split / name)):
        below = Path(where).relative_to(root).as_posix()
        found += [f"{below}/{file}" for file in files if is_image(file)]
    if not found:
        raise LayoutError(
            f"{root / split / name} has no images ({', '.join(SUFFIXES)}); remove it or fill it."
        )
    return sorted(found)


def walk(top: str) -> Iterator[Tuple[str, List[str]]]:
    """Each folder below with its files; symlinks are followed, but not to a folder that they are
    in: two such links would have 2**40 folders. Raises OSError."""
    for where, folders, files in os.walk(top, followlinks=True, onerror=_fail):
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        if links:
            path = Path(where)
            above = {os.path.realpath(str(one)) for one in (path, *path.parents)}
            circles = {n for n in links if os.path.realpath(str(path / n)) in above}
            folders[:] = [name for name in folders if name not in circles]
        yield where, files


def is_image(name: str) -> bool:
    """Whether a file of this name belongs to the data set."""
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _fail(error: OSError) -> None:
    raise error
