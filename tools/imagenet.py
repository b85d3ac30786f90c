"""Turn the archives of ILSVRC2012 into class folders: `make imagenet SRC=folder-with-the-tars`.

    ILSVRC2012_img_train.tar       a tar of 1,000 tars, one per class  -> TO/train/<wnid>/*.JPEG
    ILSVRC2012_img_val.tar         50,000 images without classes       -> TO/val/<wnid>/*.JPEG
    ILSVRC2012_devkit_t12.tar.gz   meta.mat and the validation images' classes

Each image is copied once, directly from the archive to its class folder. With SIZE= the image
becomes smaller on the way (tools/shrink.py). Class folders and val get their names when they are
complete, so the same command continues after a kill at any time. trainer/data reads the folders.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import re
import shutil
import struct
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from contract.command_line import verb_words
from contract.errors import UserError
from tools.shrink import WORKER_KILLED, Shape, shrink, start_worker
from trainer.data.decode import BadImage

PAGE = "https://image-net.org/challenges/LSVRC/2012/2012-downloads.php"
TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
# Source: torchvision.datasets.imagenet.ARCHIVE_META.
MD5 = {
    TRAIN: "1d675b47d978889d74fa0da5fadfb00e",
    VAL: "29b22e2961454d5413ddabcf34fc5622",
    DEVKIT: "fa75699e90414af021442c21a62c3abf",
}
# The images' bytes times this number is what a file system needs for them.
DISK_FACTOR = 1.02
CHECKSUM_FILE = ".archives.json"  # in the target folder, with what `check_archives` found
PIECE_BYTES = 1 << 20
MAX_UNPACKED_BYTES = 64 << 20  # of the devkit, and of meta.mat in it
BATCH_IMAGES = 256  # in memory before the pool shrinks them: 30 MB
RATIO_AT_256 = 0.25  # the share of ImageNet's bytes that images with a short side of 256 need
COMPRESSED = 15  # the type of a compressed element of a MATLAB file


class TrainClass(NamedTuple):
    """A class of train, as the archive has it."""

    wnid: str  # the WordNet id of the class, such as n01440764
    size: int  # the bytes of its tar


class ValImage(NamedTuple):
    """An image of val."""

    name: str
    wnid: str  # of its class
    size: int  # bytes


@dataclass(frozen=True)
class Plan:
    """The part of the archives that `target` lacks."""

    source: Path
    target: Path
    classes: tuple[TrainClass, ...]  # those to copy to train
    val: tuple[ValImage, ...]  # all images, or () if val exists
    wnids: tuple[str, ...]  # of all classes
    shape: Shape | None = None  # None: images stay unchanged

    def train_size(self) -> int:
        """Return the bytes that are still to be copied to train."""
        return sum(train_class.size for train_class in self.classes)

    def val_size(self) -> int:
        """Return the bytes that are still to be copied to val."""
        # val.part may have images already, after a kill.
        folder = self.target / "val.part"
        rows = ((folder / image.wnid / image.name, image.size) for image in self.val)
        return sum(size for path, size in rows if not self.has_copied(path, size))

    def has_copied(self, path: Path, size: int) -> bool:
        """Return whether an image, which has `size` bytes in the archive, is copied."""
        written = path.stat().st_size if path.is_file() else 0
        # A smaller image gets its name when it is complete. An unchanged image has a name before,
        # so the number of its bytes decides.
        return written == size if self.shape is None else written > 0


def read_devkit(path: Path) -> tuple[dict[int, str], list[int]]:
    """Return {class number: wnid}, and the class number of each validation image.

    Raises UserError if the archive is not the devkit.
    """
    from scipy.io import loadmat  # which only this command needs

    contents = {"meta.mat": b"", "ILSVRC2012_validation_ground_truth.txt": b""}
    with _explain_damage(path):
        # A small file may unpack to any number of bytes. With one byte too many, it is refused.
        with gzip.open(path) as file:
            unpacked = file.read(MAX_UNPACKED_BYTES + 1)
        _refuse_large(len(unpacked), path)
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for member in archive:
                name = Path(member.name).name
                if name in contents and member.isfile():
                    contents[name] = _open_member(archive, member).read()
    missing = [name for name, content in contents.items() if not content]
    if missing:
        raise UserError(f"{path} has no {' and no '.join(missing)}: is it the devkit? {PAGE}")
    meta, truth = contents.values()  # truth: a class number per line
    try:
        _refuse_large(sum(_element_sizes(meta)), path)  # loadmat has no limit
        # A row is a synset of WordNet: number, wnid, words, gloss, number of children, ... Classes
        # are the synsets without children.
        rows = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        leaves = {int(row[0]): str(row[1]) for row in rows if int(row[4]) == 0}
        numbers = [int(line) for line in truth.split()]
        # Wnids become names of folders, so a name such as "../x" must not pass.
        invalid = [wnid for wnid in leaves.values() if not re.fullmatch("n[0-9]{8}", wnid)]
        invalid += [str(number) for number in numbers if number not in leaves]
    except UserError:
        raise
    except Exception as error:  # loadmat raises many kinds for a damaged file
        raise UserError(
            f"{path}: meta.mat or the classes cannot be read ({error}): {PAGE}"
        ) from None
    if invalid:
        raise UserError(f"{path} has {invalid[0]!r}, which is no class: is it the devkit? {PAGE}")
    return leaves, numbers


def _refuse_large(size: int, path: Path) -> None:
    if size > MAX_UNPACKED_BYTES:
        raise UserError(
            f"{path} unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB, so it is not the devkit: "
            f"download it again from {PAGE}"
        )


def _element_sizes(meta: bytes) -> Iterator[int]:
    """Yield the unpacked bytes of each element of a MATLAB file. Each may be compressed."""
    # A header of 128 bytes ends with "MI" in the file's byte order: b"IM" is little-endian.
    order, position = ("<" if meta[126:128] == b"IM" else ">"), 128
    while position + 8 <= len(meta):
        # An element has a type and a number of bytes, and then so many bytes.
        kind, size = struct.unpack_from(f"{order}II", meta, position)
        element = meta[position + 8 : position + 8 + size]
        if kind == COMPRESSED:
            element = zlib.decompressobj().decompress(element, MAX_UNPACKED_BYTES + 1)
        yield len(element)
        position += 8 + size


def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """Open a plain file of an archive. Raises UserError for any other kind of member."""
    # A sparse file may have any number of bytes that are not in the archive.
    file = archive.extractfile(member) if not member.issparse() else None
    if file is None:  # it is sparse, a folder or a device
        raise UserError(f"an archive has {member.name!r}, which is not a whole file. {PAGE}")
    return file


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Raise UserError for an error within the block that a damaged archive causes."""
    try:
        yield
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} cannot be read to its end ({error}): download it again from {PAGE}"
        ) from None


@contextmanager
def _open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive. Raises UserError if it is damaged."""
    with _explain_damage(path), tarfile.open(path, "r:") as archive:
        yield archive


def make_plan(source: Path, target: Path, shape: Shape | None = None) -> Plan:
    """Read the archives' tables of contents. Raises UserError if they are not complete."""
    absent = [name for name in MD5 if not (source / name).is_file()]
    if absent:
        raise UserError(
            f"{source} lacks {', '.join(absent)}. Download them, with an account, from {PAGE}"
        )
    wnid_of, truth = read_devkit(source / DEVKIT)
    with _open_tar(source / TRAIN) as archive:
        train = [TrainClass(member.name.removesuffix(".tar"), member.size) for member in archive]
    unmatched = sorted({train_class.wnid for train_class in train} ^ set(wnid_of.values()))
    if unmatched:
        raise UserError(
            f"{source / TRAIN} and the devkit do not have the same classes: "
            f"{_name_three(unmatched)}"
        )
    with _open_tar(source / VAL) as archive:
        val = sorted((member.name, member.size) for member in archive if member.isfile())
    expected = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, len(truth) + 1)]
    unmatched = sorted({name for name, _ in val} ^ set(expected))
    if unmatched:
        raise UserError(
            f"{source / VAL} and the devkit do not have the same images: {_name_three(unmatched)}"
        )
    # The devkit lists the classes in the order of the images' names, which `val` is sorted by.
    images = (ValImage(name, wnid_of[number], size) for (name, size), number in zip(val, truth))
    return Plan(
        source=source,
        target=target,
        classes=tuple(row for row in train if not (target / "train" / row.wnid).is_dir()),
        val=tuple(images) if not (target / "val").is_dir() else (),
        wnids=tuple(sorted(wnid_of.values())),
        shape=shape,
    )


def _name_three(names: list[str]) -> str:
    """List the first three names in a clause, and the number of the remaining names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_archives(plan: Plan) -> list[str]:
    """Return warnings about archives that are not the official ones.

    Raises UserError if the target was begun with another shape.
    """
    # The target stores {"shape": [256, 90], archive: [bytes, nanoseconds of its change, MD5]}. The
    # sums take minutes, so a command that continues must not compute them again.
    record = plan.target / CHECKSUM_FILE
    shape = list(plan.shape) if plan.shape else None
    sums: dict[str, Any] = {"shape": shape}  # the content of the record
    if record.is_file():
        sums = json.loads(record.read_text())
    if sums.setdefault("shape", None) != shape:
        raise UserError(
            f"{plan.target} was begun with other settings (SIZE and QUALITY: {sums['shape']}): "
            "choose another TO="
        )
    for name in MD5:
        path = plan.source / name
        size, changed = path.stat().st_size, path.stat().st_mtime_ns
        if sums.get(name, [])[:2] != [size, changed]:  # the sum is missing, or the file has changed
            with path.open("rb") as file, progress(f"checking {name}", size) as advance:
                digest = hashlib.md5(usedforsecurity=False)
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
                    advance(len(piece))
                sums[name] = [size, changed, digest.hexdigest()]
            record.write_text(json.dumps(sums))
    return [
        f"{plan.source / name} is not the official archive: its MD5 is {sums[name][2]}, not {md5}"
        for name, md5 in MD5.items()
        if sums[name][2] != md5
    ]


class Writer:
    """Write images. With a `shape`, processes shrink them first. Use a Writer as a context."""

    def __init__(self, shape: Shape | None) -> None:
        self.shape = shape
        self.waiting: list[tuple[bytes, Path]] = []  # the next batch for the pool
        self.bad_count = 0  # of files that are not images, and stay unchanged
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Writer:
        if self.shape is not None:
            count = len(os.sched_getaffinity(0))
            self.pool = ProcessPoolExecutor(count, initializer=start_worker)
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def write(self, file: IO[bytes], path: Path, size: int) -> None:
        """Write an image of `size` bytes, or keep it for a batch. Raises UserError and OSError."""
        if self.pool is None:
            _copy(file, path, size)
            return
        content = file.read()
        if len(content) != size:
            raise UserError(f"{path} has {len(content)} bytes in its archive instead of {size}")
        self.waiting.append((content, path))
        if len(self.waiting) == BATCH_IMAGES:
            self.finish()

    def finish(self) -> None:
        """Shrink and write the images that wait, if any. Raises UserError and OSError."""
        if self.pool is None or self.shape is None:
            return
        try:
            write = partial(_write_smaller, self.shape)
            for is_bad in self.pool.map(write, self.waiting, chunksize=8):
                self.bad_count += is_bad
        except BrokenProcessPool:
            raise UserError(WORKER_KILLED) from None
        self.waiting = []


def _write_smaller(shape: Shape, image: tuple[bytes, Path]) -> bool:
    """Write a smaller image. Returns true if the file is not an image, and is written unchanged.

    Raises OSError.
    """
    content, path = image
    is_bad = False
    try:
        content = shrink(content, shape)
    except BadImage:
        is_bad = True
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        # The error of a full disk names no file, and users need the folder.
        raise OSError(error.errno, error.strerror, str(path.parent)) from None
    return is_bad


def extract_train(plan: Plan, advance: Callable[[int], None], writer: Writer) -> None:
    """Make the class folders of train that are missing. Raises UserError and OSError."""
    wnids = {train_class.wnid for train_class in plan.classes}
    # One pass copies all classes, since the archive has more than a hundred gigabytes.
    with _open_tar(plan.source / TRAIN) as archive:
        for member in archive:
            wnid = member.name.removesuffix(".tar")
            if wnid in wnids:
                _extract_class(_open_member(archive, member), plan.target / "train" / wnid, writer)
                advance(member.size)


def _extract_class(file: IO[bytes], folder: Path, writer: Writer) -> None:
    """Make a class folder of the tar `file`. Raises UserError and OSError."""
    unfinished = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with tarfile.open(fileobj=file, mode="r:") as images:
        for image in images:
            # A name without a / cannot leave the class folder.
            if not image.isfile() or not re.fullmatch(r"[\w-]+\.JPEG", image.name):
                raise UserError(f"{folder.name}.tar has {image.name!r}, which is not an image")
            writer.write(_open_member(images, image), unfinished / image.name, image.size)
    writer.finish()
    if not any(unfinished.iterdir()):
        raise UserError(f"{folder.name}.tar has no images: download {TRAIN} again")
    # A folder with the final name is complete, so its content must reach the disk first.
    os.sync()
    unfinished.rename(folder)


def extract_val(plan: Plan, advance: Callable[[int], None], writer: Writer) -> None:
    """Make val with all class folders. Raises UserError and OSError."""
    folder = plan.target / "val.part"
    for wnid in plan.wnids:
        (folder / wnid).mkdir(parents=True, exist_ok=True)
    images = {image.name: image for image in plan.val}
    with _open_tar(plan.source / VAL) as archive:
        for member in archive:
            if member.name not in images:  # a folder in the archive
                continue
            image = images[member.name]
            path = folder / image.wnid / image.name
            # After a kill, some images are copied already.
            if not plan.has_copied(path, image.size):
                writer.write(_open_member(archive, member), path, image.size)
                advance(image.size)
    writer.finish()
    # A folder with the name val is complete, so its content must reach the disk first.
    os.sync()
    folder.rename(plan.target / "val")


def _copy(file: IO[bytes], path: Path, size: int) -> None:
    """Write an image unchanged. Raises UserError if the archive ends before its `size` bytes."""
    with path.open("wb") as output:
        shutil.copyfileobj(file, output, PIECE_BYTES)
    if path.stat().st_size != size:
        raise UserError(f"{path} has {path.stat().st_size} bytes instead of {size}")


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, or print a line without a terminal. Yields a function to add bytes."""
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None) as bar:
        if bar.disable:
            print(f"{title}: {total / 1e9:.1f} GB", flush=True)
        yield bar.update


def run(source: Path, target: Path, shape: Shape | None = None) -> None:
    """Make the class folders in `target`. Raises UserError and OSError."""
    plan = make_plan(source, target, shape)
    target.mkdir(parents=True, exist_ok=True)
    # The bytes of some images grow with the side, of others with the number of pixels (ratio**2).
    # The larger estimate is safe.
    ratio = shape.size / 256 if shape else math.inf
    share = min(1.0, RATIO_AT_256 * max(ratio, ratio**2))
    needed_bytes = (plan.train_size() + plan.val_size()) * DISK_FACTOR * share
    free_bytes = shutil.disk_usage(target).free
    if needed_bytes > free_bytes:
        raise UserError(
            f"{target} has {free_bytes / 1e9:.1f} GB free, and {needed_bytes / 1e9:.1f} GB are "
            "needed: choose a folder on another disk with TO="
        )
    for warning in check_archives(plan):
        print(f"tandem: warning: {warning}", file=sys.stderr)
    with Writer(shape) as writer:
        if plan.classes:
            with progress("train", plan.train_size()) as advance:
                extract_train(plan, advance, writer)
        if plan.val:
            with progress("val", plan.val_size()) as advance:
                extract_val(plan, advance, writer)
    if writer.bad_count:
        text = f"tandem: {writer.bad_count:,} files are no images and stay as they are"
        print(text, file=sys.stderr)
    for split in ("train", "val"):
        # A folder of an unfinished class begins with a dot.
        folders = [path for path in (target / split).iterdir() if not path.name.startswith(".")]
        images = sum(1 for folder in folders for _ in folder.iterdir())
        print(f"{target / split}: {len(folders):,} classes, {images:,} images")


def main(argv: list[str]) -> int:
    try:
        words = verb_words("imagenet", argv, "make imagenet")
        if "src" not in words:
            raise UserError("say where the archives are: `make imagenet SRC=/folder/with/the/tars`")
        shape = None
        if "size" in words or "quality" in words:
            shape = Shape(words.get("size", 256), words.get("quality", 90))
        # Smaller images have a folder of their own, since both data sets may be in use.
        name = f"data/imagenet-{shape.size}" if shape else "data/imagenet"
        run(Path(words["src"]), Path(words.get("to", name)), shape)
    except (UserError, OSError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntandem: interrupted; the same command can be typed again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
