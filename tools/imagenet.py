"""Turn the archives of ILSVRC2012 into class folders: `make imagenet SRC=folder-with-the-tars`.

    ILSVRC2012_img_train.tar       a tar of 1,000 tars, one per class  -> TO/train/<wnid>/*.JPEG
    ILSVRC2012_img_val.tar         50,000 images without classes       -> TO/val/<wnid>/*.JPEG
    ILSVRC2012_devkit_t12.tar.gz   meta.mat and the validation images' classes

Each image is copied once, straight from the archive to its place, or with SIZE= made smaller on its
way (tools/shrink.py). A class folder appears once it is complete; so does val. After a kill at any
time, the same command continues where it stopped.
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
from typing import IO, Any

from tqdm import tqdm

from contract.command_line import verb_words
from contract.errors import UserError
from tools.shrink import Shape, shrink, start_worker
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
# File systems need more than the bytes of the images.
SPARE = 1.02
CHECKED = ".archives.json"
PIECE = 1 << 20
UNPACKED = 64 << 20  # bytes of the devkit, and of meta.mat in it
AT_ONCE = 256  # images in memory that are made smaller: 30 MB
SMALLER = 0.25  # of ImageNet's bytes, with a short side of 256
COMPRESSED = 15  # a kind of part of a file of MATLAB's


@dataclass(frozen=True)
class Plan:
    """What the archives contain, and which part of it has not been copied to `target` yet."""

    source: Path
    target: Path
    classes: tuple[tuple[str, int], ...]  # (wnid, bytes of its tar) of those not there yet
    val: tuple[tuple[str, str, int], ...]  # (image, wnid, bytes) of all; empty if val is there
    wnids: tuple[str, ...]
    shape: Shape | None = None  # what images become; None: what they are

    def train_size(self) -> int:
        return sum(size for _, size in self.classes)

    def val_size(self) -> int:
        part = self.target / "val.part"
        return sum(size for name, wnid, size in self.val if not self.has(part / wnid / name, size))

    def has(self, path: Path, size: int) -> bool:
        """Whether an image of the archive of so many bytes is there already."""
        written = path.stat().st_size if path.is_file() else 0
        return written == size if self.shape is None else written > 0  # which appear whole


def read_devkit(path: Path) -> tuple[dict[int, str], list[int]]:
    """({class number: wnid}, the class number of each validation image).

    Raises UserError for an archive of another shape. meta.mat has one row per synset: number,
    WordNet id, words, gloss and number of children; classes are those without children.
    """
    from scipy.io import loadmat

    wanted = {"meta.mat": b"", "ILSVRC2012_validation_ground_truth.txt": b""}
    with _explain_damage(path):
        with gzip.open(path) as file:
            unpacked = file.read(UNPACKED + 1)
        _refuse_large(len(unpacked), path)
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for member in archive:
                name = Path(member.name).name
                if name in wanted and member.isfile():
                    wanted[name] = _content(archive, member).read()
    missing = [name for name, content in wanted.items() if not content]
    if missing:
        raise UserError(f"{path} has no {' and no '.join(missing)}: is it the devkit? {PAGE}")
    meta, truth = wanted.values()
    try:
        _refuse_large(sum(_sizes(meta)), path)
        rows = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        leaves = {int(row[0]): str(row[1]) for row in rows if int(row[4]) == 0}
        numbers = [int(line) for line in truth.split()]
        odd = [wnid for wnid in leaves.values() if not re.fullmatch("n[0-9]{8}", wnid)]
        odd += [str(number) for number in numbers if number not in leaves]
    except UserError:
        raise
    except Exception as error:  # of a damaged file loadmat raises many kinds
        raise UserError(
            f"{path}: meta.mat or the classes cannot be read ({error}): {PAGE}"
        ) from None
    if odd:
        raise UserError(f"{path} has {odd[0]!r}, which is no class: is it the devkit? {PAGE}")
    return leaves, numbers


def _refuse_large(size: int, path: Path) -> None:
    if size > UNPACKED:
        raise UserError(
            f"{path} unpacks to more than {UNPACKED >> 20} MiB, so it is not the devkit: download "
            f"it again from {PAGE}"
        )


def _sizes(meta: bytes) -> Iterator[int]:
    """Bytes of the parts of a file of MATLAB's, each of which may be compressed by itself."""
    order, place = ("<" if meta[126:128] == b"IM" else ">"), 128
    while place + 8 <= len(meta):
        kind, size = struct.unpack_from(f"{order}II", meta, place)
        part = meta[place + 8 : place + 8 + size]
        packed = kind == COMPRESSED
        yield len(zlib.decompressobj().decompress(part, UNPACKED + 1)) if packed else len(part)
        place += 8 + size


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    # What is sparse has any number of bytes that are not in the archive.
    file = archive.extractfile(member) if not member.issparse() else None
    if file is None:  # or a folder or a device, in an archive of another shape
        raise UserError(f"an archive has {member.name!r}, which is not a whole file. {PAGE}")
    return file


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} cannot be read to its end ({error}): download it again from {PAGE}"
        ) from None


@contextmanager
def _tar(path: Path) -> Iterator[tarfile.TarFile]:
    """Opens an archive; damage raises UserError with a sentence for the user."""
    with _explain_damage(path), tarfile.open(path, "r:") as archive:
        yield archive


def make_plan(source: Path, target: Path, shape: Shape | None = None) -> Plan:
    """Reads the archives' tables of contents. Raises UserError, naming all missing archives."""
    absent = [name for name in MD5 if not (source / name).is_file()]
    if absent:
        raise UserError(
            f"{source} lacks {', '.join(absent)}. Download them, with an account, from {PAGE}"
        )
    wnid_of, truth = read_devkit(source / DEVKIT)
    with _tar(source / TRAIN) as archive:
        train = [(member.name.removesuffix(".tar"), member.size) for member in archive]
    unlike = sorted({name for name, _ in train} ^ set(wnid_of.values()))
    if unlike:
        raise UserError(
            f"{source / TRAIN} and the devkit do not have the same classes: {_some(unlike)}"
        )
    with _tar(source / VAL) as archive:
        val = sorted((member.name, member.size) for member in archive if member.isfile())
    expected = [f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, len(truth) + 1)]
    unlike = sorted({name for name, _ in val} ^ set(expected))
    if unlike:
        raise UserError(
            f"{source / VAL} and the devkit do not have the same images: {_some(unlike)}"
        )
    places = ((name, wnid_of[number], size) for (name, size), number in zip(val, truth))
    return Plan(
        source=source,
        target=target,
        classes=tuple(row for row in train if not (target / "train" / row[0]).is_dir()),
        val=tuple(places) if not (target / "val").is_dir() else (),
        wnids=tuple(sorted(wnid_of.values())),
        shape=shape,
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_space(plan: Plan) -> None:
    """Raises UserError if the target's disk has too little space."""
    ratio = plan.shape.size / 256 if plan.shape else math.inf
    part = min(1.0, SMALLER * max(ratio, ratio**2))
    needed = (plan.train_size() + plan.val_size()) * SPARE * part
    free = shutil.disk_usage(plan.target).free
    if needed > free:
        raise UserError(
            f"{plan.target} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed: "
            "choose a folder on another disk with TO="
        )


def check_archives(plan: Plan, bar: Callable[..., Any]) -> list[str]:
    """Sentences about archives that are not the official ones. Keeps sums for later calls, and what
    images become; raises UserError where that was something else."""
    record, shape = plan.target / CHECKED, list(plan.shape) if plan.shape else None
    sums: dict[str, Any] = {"shape": shape}
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
        if sums.get(name, [])[:2] != [size, changed]:
            with path.open("rb") as file, bar(f"checking {name}", size) as advance:
                sums[name] = [size, changed, _md5(file, advance)]
            record.write_text(json.dumps(sums))
    return [
        f"{plan.source / name} is not the official archive: its MD5 is {sums[name][2]}, not {md5}"
        for name, md5 in MD5.items()
        if sums[name][2] != md5
    ]


def _md5(file: IO[bytes], advance: Callable[[int], None]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    while piece := file.read(PIECE):
        digest.update(piece)
        advance(len(piece))
    return digest.hexdigest()


class Writer:
    """Writes images in their order, or with a `shape` smaller ones, in all processors. To be used
    as a context."""

    def __init__(self, shape: Shape | None) -> None:
        self.shape = shape
        self.waiting: list[tuple[bytes, Path]] = []
        self.bad = 0
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
        if self.pool is None:
            _copy(file, path, size)
            return
        content = file.read()
        if len(content) != size:
            raise UserError(f"{path} has {len(content)} bytes in its archive instead of {size}")
        self.waiting.append((content, path))
        if len(self.waiting) == AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """All that was written so far is there. Raises UserError and OSError."""
        if self.pool is None or self.shape is None:
            return
        try:
            for bad in self.pool.map(partial(_shrink_into, self.shape), self.waiting, chunksize=8):
                self.bad += bad
        except BrokenProcessPool:
            raise UserError(
                "a process that shrinks images was killed, perhaps for want of memory: the same "
                "command continues"
            ) from None
        self.waiting = []


def _shrink_into(shape: Shape, image: tuple[bytes, Path]) -> bool:
    """Write an image smaller, which appears whole. Returns whether it is none and stayed as it is.
    Raises OSError."""
    content, path = image
    bad = False
    try:
        content = shrink(content, shape)
    except BadImage:
        bad = True
    growing = path.with_name(f".{path.name}.part")
    try:
        growing.write_bytes(content)
        growing.replace(path)
    except OSError as error:
        growing.unlink(missing_ok=True)  # of a full disk, whose error names no file
        raise OSError(error.errno, error.strerror, str(path.parent)) from None
    return bad


def extract_train(plan: Plan, advance: Callable[[int], None], writer: Writer) -> None:
    sizes = dict(plan.classes)
    with _tar(plan.source / TRAIN) as archive:
        for member in archive:
            wnid = member.name.removesuffix(".tar")
            if wnid in sizes:
                _extract_class(_content(archive, member), plan.target / "train" / wnid, writer)
                advance(member.size)


def _extract_class(file: IO[bytes], folder: Path, writer: Writer) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    with tarfile.open(fileobj=file, mode="r:") as images:
        for image in images:
            # Plain names alone, so that an archive cannot write outside its folder.
            if not image.isfile() or not re.fullmatch(r"[\w-]+\.JPEG", image.name):
                raise UserError(f"{folder.name}.tar has {image.name!r}, which is not an image")
            writer.write(_content(images, image), part / image.name, image.size)
    writer.finish()
    if not any(part.iterdir()):
        raise UserError(f"{folder.name}.tar has no images: download {TRAIN} again")
    # The name says that the folder is complete, so its contents must reach the disk first.
    os.sync()
    part.rename(folder)


def extract_val(plan: Plan, advance: Callable[[int], None], writer: Writer) -> None:
    part = plan.target / "val.part"
    for wnid in plan.wnids:
        (part / wnid).mkdir(parents=True, exist_ok=True)
    places = {name: (part / wnid / name, size) for name, wnid, size in plan.val}
    with _tar(plan.source / VAL) as archive:
        for member in archive:
            path, size = places.get(member.name, (None, 0))
            if path and not plan.has(path, size):
                writer.write(_content(archive, member), path, size)
                advance(size)
    writer.finish()
    os.sync()
    part.rename(plan.target / "val")


def _copy(file: IO[bytes], path: Path, size: int) -> None:
    with path.open("wb") as output:
        shutil.copyfileobj(file, output, PIECE)
    if path.stat().st_size != size:
        raise UserError(f"{path} has {path.stat().st_size} bytes instead of {size}")


def count(folder: Path) -> tuple[int, int]:
    """(classes, images) in a folder of class folders."""
    classes = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return len(classes), sum(1 for path in classes for _ in path.iterdir())


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, else one line at the start."""
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None) as bar:
        if bar.disable:
            print(f"{what}: {total / 1e9:.1f} GB", flush=True)
        yield bar.update


def run(source: Path, target: Path, shape: Shape | None = None) -> None:
    plan = make_plan(source, target, shape)
    target.mkdir(parents=True, exist_ok=True)
    check_space(plan)
    for warning in check_archives(plan, progress):
        print(f"tandem: warning: {warning}", file=sys.stderr)
    with Writer(shape) as writer:
        if plan.classes:
            with progress("train", plan.train_size()) as advance:
                extract_train(plan, advance, writer)
        if plan.val:
            with progress("val", plan.val_size()) as advance:
                extract_val(plan, advance, writer)
    if writer.bad:
        print(f"tandem: {writer.bad:,} files are no images and stay as they are", file=sys.stderr)
    for part in ("train", "val"):
        classes, images = count(target / part)
        print(f"{target / part}: {classes:,} classes, {images:,} images")


def main(argv: list[str]) -> int:
    try:
        words = verb_words("imagenet", argv, "make imagenet")
        if "src" not in words:
            raise UserError("say where the archives are: `make imagenet SRC=/folder/with/the/tars`")
        shape = None
        if "size" in words or "quality" in words:
            shape = Shape(words.get("size", 256), words.get("quality", 90))
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
