"""Write a copy of a data set whose images have a short side of SIZE pixels: `make shrink`.

An image of ImageNet's takes 110 kB, and 27 kB with a short side of 256: four times as many go
through the cable of a share, and each is decoded in less time. Images that are small already are
copied as they are; so are files that are no images, which are named: the copy has as many as its
source.

The copy grows beside its place, in a folder NAME.part, where each image appears whole. After a kill
at any time, the same command continues where it stopped.
"""

from __future__ import annotations

import fcntl
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from PIL import Image
from tqdm import tqdm

from contract.command_line import verb_words
from contract.errors import UserError
from contract.layout import SPLITS, LayoutError, printable, read_split
from contract.text import size
from trainer.data.decode import BadImage, Unreadable, picture_of, read_file

JPEGS = (".jpg", ".jpeg", ".jpe", ".jfif")
SETTINGS = "settings.json"  # of the copy that grows, and its lock
AT_ONCE = 16  # images that a process is handed


class Shape(NamedTuple):
    """What an image becomes: pixels of its short side, and the quality of a JPEG."""

    size: int
    quality: int


def shrink(content: bytes, shape: Shape) -> bytes:
    """A smaller JPEG of an image file, upright and in RGB; the file itself where its short side is
    no longer than `shape.size`. Raises BadImage."""
    picture = picture_of(content)
    short = min(picture.size)
    if short <= shape.size:
        return content
    # A decoder halves a JPEG for next to nothing. What it leaves has twice the pixels a side that
    # are wanted, so that the filter below decides what the image looks like.
    factors = [factor for factor in picture.factors if short >= 2 * factor * shape.size]
    pixels = picture.pixels(factors[0] if factors else 1)
    scale = shape.size / min(pixels.size)
    wide, high = (round(side * scale) for side in pixels.size)
    smaller = io.BytesIO()
    filtered = pixels.resize((wide, high), Image.Resampling.LANCZOS)
    filtered.save(smaller, "JPEG", quality=shape.quality)
    return smaller.getvalue()


def shrunk_name(path: str) -> str:
    """Of an image's copy, which is a JPEG: photo.png -> photo.png.jpg."""
    return path if path.lower().endswith(JPEGS) else f"{path}.jpg"


def copy_image(path: str, source: Path, part: Path, shape: Shape) -> str:
    """Returns why it is no image, or nothing. Raises OSError, and Unreadable where the disk
    fails."""
    name, reason = path, ""
    content = None
    try:
        whole = read_file(source / path)
        content = shrink(whole, shape)
        if content is not whole:
            name = shrunk_name(path)
    except Unreadable:
        raise
    except BadImage as error:
        reason = str(error)
    target = part / name
    target.parent.mkdir(parents=True, exist_ok=True)
    growing = target.with_name(f".{target.name}.part")
    try:
        if content is None:
            shutil.copyfile(source / path, growing)
        else:
            growing.write_bytes(content)
        growing.replace(target)
    except OSError:
        growing.unlink(missing_ok=True)  # of a full disk
        raise
    return reason


def start_worker() -> None:
    """Ctrl-C reaches all processes: the first one ends the others. Where it is killed, they end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def images_of(root: Path) -> dict[str, list[str]]:
    """The paths of the images of each split. Raises UserError."""
    images = {}
    for split in SPLITS:
        try:
            read = read_split(root, split)
        except LayoutError as error:
            raise UserError(f"{root}: {error}") from None
        images[split] = [path for paths in read.images.values() for path in paths]
        if read.note(split):
            print(f"tandem: {root}: {read.note(split)}", file=sys.stderr)
    return images


def copy_images(images: list[str], source: Path, part: Path, shape: Shape) -> None:
    """Copy those that are not there yet. Raises UserError and OSError."""
    # Not those without a byte, which a cut of the power leaves.
    paths = (path for path in part.rglob("*") if path.is_file() and path.stat().st_size)
    there = {str(path.relative_to(part)) for path in paths}
    left = [path for path in images if path not in there and shrunk_name(path) not in there]
    bad = 0
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=start_worker)
    copy = partial(copy_image, source=source, part=part, shape=shape)
    done = len(images) - len(left)
    with tqdm(total=len(images), initial=done, unit=" images", disable=None) as bar:
        try:
            for path, reason in zip(left, pool.map(copy, left, chunksize=AT_ONCE)):
                bar.update()
                if reason:
                    bad += 1
                    bar.write(printable(f"tandem: {path}: {reason}"), sys.stderr)
        except BrokenProcessPool:
            raise UserError(
                "a process that shrinks images was killed, perhaps for want of memory: the same "
                "command continues"
            ) from None
        except OSError as error:  # a full disk's names no file
            where = error.filename or part
            raise UserError(
                f"{where}: {error.strerror}. Once that is repaired the same command continues"
            ) from None
        except Unreadable as error:
            raise UserError(f"{source}: an image {error}: check its disk or file server") from None
        finally:
            pool.shutdown(cancel_futures=True)
    if bad:
        print(f"tandem: {bad:,} files are no images and were copied as they are", file=sys.stderr)


def lock_part(part: Path, source: Path, shape: Shape) -> IO[str]:
    """The file that holds the lock of a copy that grows. Raises UserError."""
    part.mkdir(parents=True, exist_ok=True)
    file = (part / SETTINGS).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another `make shrink` writes {part}") from None
    file.seek(0)
    text, settings = file.read(), json.dumps([str(source.resolve()), *shape])
    if text not in ("", settings):
        raise UserError(
            f"{part} was begun with other settings ({text}): remove it, or choose another TO="
        )
    if not text:
        file.write(settings)
        file.flush()
    return file


def run(source: Path, target: Path, shape: Shape) -> None:
    """Raises UserError and OSError."""
    if target.exists():
        raise UserError(f"{target} is there already: remove it, or choose another TO=")
    images = images_of(source)
    part = target.with_name(f"{target.name}.part")
    with lock_part(part, source, shape):
        copy_images([*images["train"], *images["val"]], source, part, shape)
        copies = images_of(part)
        for split in SPLITS:
            if len(copies[split]) != len(images[split]):
                raise UserError(
                    f"{part} has {len(copies[split]):,} images in {split} and {source} has "
                    f"{len(images[split]):,}: two of a class may differ in .jpg alone"
                )
        (part / SETTINGS).unlink()
        os.sync()  # the name says that it is complete
        part.rename(target)
    for split, paths in copies.items():
        before, after = size_of(source, images[split]), size_of(target, paths)
        print(f"{target / split}: {len(paths):,} images, {size(after)} instead of {size(before)}")


def size_of(root: Path, paths: list[str]) -> int:
    """Bytes."""
    return sum((root / path).stat().st_size for path in paths)


def main(argv: list[str]) -> int:
    try:
        words = verb_words("shrink", argv, "make shrink")
        if "data" not in words:
            raise UserError("say which data set: `make shrink DATA=imagenet`")
        source = Path(words["data"])
        if len(source.parts) == 1:
            source = Path("data") / source
        shape = Shape(words.get("size", 256), words.get("quality", 90))
        target = words.get("to", f"{source}-{shape.size}")
        run(source, Path(target), shape)
    except (UserError, OSError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntandem: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
