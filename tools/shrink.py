"""Write a copy of a data set whose images have a short side of SIZE pixels: `make shrink`.

An image of ImageNet has 110 kB, and 27 kB with a short side of 256. So a share sends four times as
many of the smaller images in a second, and a rank decodes each in less time. Small images are
copied unchanged. Files that are not images are copied too, with a warning, so that the copy has the
same number of files as its source.

The copy is written to the folder NAME.part, in which only complete images have their names. After a
kill at any time, the same command continues. tools/imagenet.py uses `shrink` too.
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
SETTINGS = "settings.json"  # in NAME.part: its settings, and its lock
CHUNK_IMAGES = 16  # that a process gets at once
WORKER_KILLED = (
    "a process that shrinks images was killed, perhaps for want of memory: the same command "
    "continues"
)


class Shape(NamedTuple):
    """The size of a copy: the pixels of its short side, and the quality of its JPEG."""

    size: int
    quality: int


def shrink(content: bytes, shape: Shape) -> bytes:
    """Return a smaller JPEG of an image file, upright and in RGB.

    Returns `content` itself if the short side is not longer than `shape.size`. Raises BadImage.
    """
    picture = picture_of(content)
    short = min(picture.size)
    if short <= shape.size:
        return content
    # A decoder halves the sides of a JPEG at almost no cost. Each side keeps at least twice its
    # final pixels, so that the filter below determines the quality. The largest factor comes first.
    factors = [factor for factor in picture.factors if short >= 2 * factor * shape.size]
    pixels = picture.pixels(factors[0] if factors else 1)
    scale = shape.size / min(pixels.size)
    wide, high = (round(side * scale) for side in pixels.size)
    output = io.BytesIO()
    resized = pixels.resize((wide, high), Image.Resampling.LANCZOS)
    resized.save(output, "JPEG", quality=shape.quality)
    return output.getvalue()


def shrunk_name(path: str) -> str:
    """Return the path of an image's copy, which is a JPEG: photo.png -> photo.png.jpg."""
    return path if path.lower().endswith(JPEGS) else f"{path}.jpg"


def copy_image(path: str, source: Path, folder: Path, shape: Shape) -> str:
    """Write a smaller copy of an image into a folder, or an unchanged copy of any other file.

    Returns why the file is not an image, or "". Raises OSError, and Unreadable if the disk fails.
    """
    name, reason = path, ""
    content = None  # if it stays None, the file is not an image
    try:
        original = read_file(source / path)
        content = shrink(original, shape)
        if content is not original:
            name = shrunk_name(path)
    except Unreadable:
        raise
    except BadImage as error:
        reason = str(error)
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.part")
    try:
        if content is None:
            shutil.copyfile(source / path, temporary)
        else:
            temporary.write_bytes(content)
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)  # the disk may be full
        raise
    return reason


def start_worker() -> None:
    """Prepare a process of the pool: it ignores Ctrl-C, and ends if its parent is killed."""
    # A terminal sends Ctrl-C to all processes. The parent alone decides then, and ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # A killed parent cannot end the pool, which would go on writing into the folder.
    def exit_after_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()


def images_of(root: Path) -> dict[str, list[str]]:
    """Return {split: paths of its images}, and print notes on skipped files. Raises UserError."""
    images = {}
    for name in SPLITS:
        try:
            split = read_split(root, name)
        except LayoutError as error:
            raise UserError(f"{root}: {error}") from None
        images[name] = [path for paths in split.images.values() for path in paths]
        if split.note(name):
            print(f"tandem: {root}: {split.note(name)}", file=sys.stderr)
    return images


def copy_images(images: list[str], source: Path, folder: Path, shape: Shape) -> None:
    """Copy the images that the folder does not have yet. Raises UserError and OSError."""
    # A power cut may leave files with a name but without a byte.
    paths = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    copied = {str(path.relative_to(folder)) for path in paths}
    pending = [path for path in images if path not in copied and shrunk_name(path) not in copied]
    bad_count = 0
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=start_worker)
    copy = partial(copy_image, source=source, folder=folder, shape=shape)
    done_count = len(images) - len(pending)
    with tqdm(total=len(images), initial=done_count, unit=" images", disable=None) as bar:
        try:
            for path, reason in zip(pending, pool.map(copy, pending, chunksize=CHUNK_IMAGES)):
                bar.update()
                if reason:
                    bad_count += 1
                    bar.write(printable(f"tandem: {path}: {reason}"), sys.stderr)
        except BrokenProcessPool:
            raise UserError(WORKER_KILLED) from None
        except OSError as error:
            location = error.filename or folder  # the error of a full disk has no file
            raise UserError(
                f"{location}: {error.strerror}. Once that is repaired the same command continues"
            ) from None
        except Unreadable as error:
            raise UserError(f"{source}: an image {error}: check its disk or file server") from None
        finally:
            pool.shutdown(cancel_futures=True)
    if bad_count:
        print(
            f"tandem: {bad_count:,} files are no images and were copied as they are",
            file=sys.stderr,
        )


def lock_folder(folder: Path, source: Path, shape: Shape) -> IO[str]:
    """Lock the folder of an incomplete copy. Returns the file that holds the lock.

    Raises UserError if another process writes the copy, or if the copy has other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / SETTINGS).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"another `make shrink` writes {folder}") from None
    file.seek(0)
    text, settings = file.read(), json.dumps([str(source.resolve()), *shape])
    # With other settings, the copy would have images of two sizes.
    if text not in ("", settings):
        raise UserError(
            f"{folder} was begun with other settings ({text}): remove it, or choose another TO="
        )
    if not text:
        file.write(settings)
        file.flush()
    return file


def run(source: Path, target: Path, shape: Shape) -> None:
    """Write a complete copy of a data set, and print its size. Raises UserError and OSError."""
    if target.exists():
        raise UserError(f"{target} is there already: remove it, or choose another TO=")
    images = images_of(source)
    folder = target.with_name(f"{target.name}.part")
    with lock_folder(folder, source, shape):
        copy_images([*images["train"], *images["val"]], source, folder, shape)
        copies = images_of(folder)
        # x.png and x.png.jpg of one class would both become x.png.jpg.
        for split in SPLITS:
            if len(copies[split]) != len(images[split]):
                raise UserError(
                    f"{folder} has {len(copies[split]):,} images in {split} and {source} has "
                    f"{len(images[split]):,}: two names of a class may differ only in .jpg"
                )
        (folder / SETTINGS).unlink()
        # A folder with the final name is complete, even after a power cut.
        os.sync()
        folder.rename(target)
    for split, paths in copies.items():
        old_bytes = sum((source / path).stat().st_size for path in images[split])
        new_bytes = sum((target / path).stat().st_size for path in paths)
        sizes = f"{size(new_bytes)} instead of {size(old_bytes)}"
        print(f"{target / split}: {len(paths):,} images, {sizes}")


def main(argv: list[str]) -> int:
    try:
        words = verb_words("shrink", argv, "make shrink")
        if "data" not in words:
            raise UserError("say which data set: `make shrink DATA=imagenet`")
        source = Path(words["data"])
        if len(source.parts) == 1:  # a name, not a path
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
