"""Lists a data set's images and classes, collects the images that cannot be used, and keeps small
images decoded. layout.py defines the layout.
"""

import contextlib
import logging
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from random import Random
from statistics import median_low
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional

import numpy as np

from contract.errors import RankError, UserError
from contract.layout import LayoutError, NoAnswer, printable, read_class, read_split
from contract.options import Options
from contract.text import pluralize

from ..errors import DataLost
from .decode import BadImage, Unreadable, is_readable, open_picture, size_of

log = logging.getLogger(__name__)

SMALL = 64  # pixels; images up to this size are used whole and shifted, not cropped
USUAL = 224
OPENED = 20  # images of a split before the first step
PROBE_COUNT = 4  # other images that are read where one cannot be
# Most bytes that a machine's ranks together keep of a split; never more than 1/8 of its memory.
CACHE_BYTES_MAX = 2**31
NOT_DECODED, GOOD, BAD = 0, 1, 2


class Sizes(NamedTuple):
    """In pixels: the training crop, the evaluation crop, and the short side to which an image is
    scaled before the evaluation crop."""

    train: int
    evaluate: int
    resize: int


class ImageFolder:
    """The images of one split. Class numbers follow the sorted names of the classes in train.

    `paths[i]` is relative to `root`, and `targets[i]` is its class. Raises UserError for a folder
    that does not have the layout.
    """

    def __init__(self, root: str, split: str, options: Options) -> None:
        self.root, self.split = Path(root), split
        self.quarantine = Quarantine(options.bad_images)
        self.options = options
        with _explain_errors(root):
            read = read_split(self.root, split)
        # Read when the images are listed: a mount that is gone later keeps its name.
        self.mounts = read_mounts()
        if note := read.note(split):
            log.info("%s: %s", root, note)
        self.classes = list(read.images)
        self.paths = [path for paths in read.images.values() for path in paths]
        self.targets = [number for number, paths in enumerate(read.images.values()) for _ in paths]
        self.cache: Optional[ImageCache] = None

    def __getstate__(self) -> Dict[str, Any]:
        """Leave the cache out for loader processes: they only decode images that are not in it."""
        return {**vars(self), "cache": None}

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def sizes(self) -> Sizes:
        return image_sizes(self.options, self.options.image_size or self.natural_size())

    def natural_size(self) -> int:
        """Return the median short side in pixels of the training images, for any split."""
        # About 64 headers, spread over the classes, tell enough.
        sides = []
        for name in self.classes[:: len(self.classes) // 64 + 1]:
            with _explain_errors(self.root):
                paths = read_class(self.root, "train", name).images[name]
            for path in paths[: 64 // len(self.classes) + 1]:
                with contextlib.suppress(BadImage):  # it is reported when it is used
                    sides.append(min(size_of(self.root / path)))
        if not sides:
            log.warning("Tandem could read no image to find the image size, and uses %d", USUAL)
        return median_low(sides or [USUAL])

    def refuse_if_unusable(self, rank: int) -> None:
        """Raise UserError if none of OPENED images can be used, or of as many as --bad_images
        allows to be bad. Each rank draws other images, over all classes."""
        rng, count = Random(rank), max(OPENED, self.quarantine.limit)
        images = [self.images_of(number) for number in range(len(self.classes))]
        classes = [rng.sample(places, min(len(places), count)) for places in images]
        rng.shuffle(classes)
        # An image of each class, then a second one of each, and so on.
        drawn = [image for image in chain(*zip_longest(*classes)) if image is not None][:count]
        reasons: List[str] = []
        for path in map(self.paths.__getitem__, drawn):
            try:
                picture = open_picture(self.root / path, again=False)
                picture.pixels(picture.factors[0])
                return  # one good image is enough
            except Unreadable:
                return  # a disk or file server that fails is waited for when an image is used
            except BadImage as error:
                reasons.append(str(error))
        kinds = Counter(reasons).most_common(3)
        raise UserError(
            f"--data {self.root}: {self.split} has {pluralize(len(self), 'image')}. Tandem "
            f"opened {len(drawn)} of them, and can use none: "
            f"{', '.join(f'{count} x {reason}' for reason, count in kinds)}."
        )

    def images_of(self, number: int) -> range:
        """Return the places of a class's images, which stand together."""
        # The images are listed class by class, so the targets are sorted.
        return range(bisect_left(self.targets, number), bisect_right(self.targets, number))

    def can_read_neighbours(self, path: str) -> bool:
        """Return whether any of PROBE_COUNT other images on this one's disk or share can be
        read."""
        neighbours = [p for p in self.by_mount[self.mount_of(path)] if p != path]
        # Where the bad image is decides which others are read, so that it is not always the same.
        step, place = len(neighbours) // PROBE_COUNT + 1, self.paths.index(path)
        probed = neighbours[place % step :: step]
        return not neighbours or any(is_readable(self.root / probe) for probe in probed)

    @cached_property
    def by_mount(self) -> Dict[str, List[str]]:
        """List the images of each disk or share."""
        # A folder is on one mount, and resolving a path is slow: do it once a folder.
        folders: Dict[str, List[str]] = {}
        for path in self.paths:
            folders.setdefault(path.rpartition("/")[0], []).append(path)
        paths: Dict[str, List[str]] = {}
        for inside in folders.values():
            paths.setdefault(self.mount_of(inside[0]), []).extend(inside)
        return paths

    def mount_of(self, path: str) -> str:
        """Name the mount of an image, like `/srv/data (node1:/data, nfs4)`. Asks no file server."""
        real = os.path.realpath((self.root / path).parent) + "/"
        above = (mount for mount in self.mounts if real.startswith(mount.folder.rstrip("/") + "/"))
        mount = max(above, key=lambda mount: len(mount.folder), default=Mount("", "/", ""))
        return f"{mount.folder} ({mount.source}, {mount.kind})"


class Mount(NamedTuple):
    """A line of /proc/self/mounts: a disk or share, the folder it is mounted on, and its type."""

    source: str
    folder: str
    kind: str


def read_mounts() -> List[Mount]:
    """Read all mounts, the last one first: of two on one folder it hides the other."""
    lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    # The kernel writes blanks in paths as three octal digits.
    octal = re.compile(r"\\([0-7]{3})")
    rows = [
        [octal.sub(lambda match: chr(int(match.group(1), 8)), word) for word in line.split()]
        for line in lines
    ]
    return [Mount(*row[:3]) for row in reversed(rows)]


@contextlib.contextmanager
def _explain_errors(root: object) -> Iterator[None]:
    try:
        yield
    except NoAnswer as error:
        raise DataLost(f"--data {root}: {error}") from error
    except LayoutError as error:
        raise UserError(f"--data {root}: {error}") from error


def image_sizes(options: Options, natural_size: int) -> Sizes:
    """Compute the sizes that the options give. `natural_size`: the images' short side in pixels; it
    is the training crop by default, up to 224."""
    train = options.image_size or min(USUAL, natural_size)
    evaluate = options.eval_size or train
    default_resize = evaluate if evaluate <= SMALL else round(evaluate / 0.875)
    # The middle of a photo has its object: the usual crop is 7/8 of the short side.
    return Sizes(train, evaluate, max(evaluate, options.eval_resize or default_resize))


class Bad(NamedTuple):
    """An image that cannot be used. `mount`: the disk or share that failed to give it, if the image
    itself is not at fault. `is_alone`: other images there can be read."""

    path: str
    reason: str
    mount: str = ""
    is_alone: bool = True


class Quarantine:
    """The bad images that this rank has met so far. The user's files are left where they are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.images: Dict[str, Bad] = {}

    def __len__(self) -> int:
        return len(self.images)

    def add(self, bad_images: Iterable[Bad]) -> None:
        """Log each new file. Raises DataLost if a mount gives no image any more, and RankError if
        there are more than `limit` bad ones."""
        for bad in bad_images:
            if bad.path in self.images:
                continue
            self.images[bad.path] = bad
            if not bad.is_alone:
                raise self._mount_error(bad, "and other images there cannot be read either")
            log.warning("bad image %s: %s", printable(bad.path), bad.reason)
            if len(self.images) <= self.limit:
                continue
            # Most of the images failed with their mount: name it, not the last image.
            if sum(bool(image.mount) for image in self.images.values()) > self.limit // 2:
                detail = f"like {len(self.images)} images before it"
                raise self._mount_error(bad, detail)
            raise RankError(
                f"{pluralize(len(self.images), 'image')} cannot be used, the last is "
                f"{printable(bad.path)}: {bad.reason}. "
                f"Repair or remove them, or raise --bad_images (now {self.limit})."
            )

    def _mount_error(self, bad: Bad, detail: str) -> DataLost:
        path = printable(bad.path)
        mount = bad.mount or next(image.mount for image in self.images.values() if image.mount)
        return DataLost(
            f"{mount} stopped delivering images: {path} {bad.reason}, {detail}. Check that "
            "disk or file server. Earlier checkpoints are kept."
        )


class ImageCache:
    """Bases of a split's small images, uint8 (side, side, 3) each, and which of them are decoded:
    each image is decoded once, its pixels stay in memory, and each epoch only augments them.

    Only those that this rank has decoded take up memory. The result is bit-identical to that of
    `Samples` in loader.py, in any order and on any rank.
    """

    def __init__(self, count: int, side: int) -> None:
        # The kernel gives memory only to the pages that are written.
        self.pixels = np.empty((count, side, side, 3), dtype=np.uint8)
        self.state = np.full(count, NOT_DECODED, dtype=np.uint8)

    def missing(self, indices: List[int]) -> List[int]:
        """List the indices that have not been decoded yet."""
        return [index for index in indices if self.state[index] == NOT_DECODED]

    def put(self, index: int, base: Optional[np.ndarray]) -> None:
        """Store the base of an image; None means that the image is bad."""
        self.state[index] = BAD if base is None else GOOD
        if base is not None:
            self.pixels[index] = base

    def get(self, index: int) -> Optional[np.ndarray]:
        """Return the base of an image, or None if the image is bad."""
        return self.pixels[index] if self.state[index] == GOOD else None


def fits_into_memory(count: int, side: int, ranks: int) -> bool:
    """Return whether each of a machine's `ranks` may keep `count` bases of `side` pixels a side."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return count * side * side * 3 * ranks <= min(CACHE_BYTES_MAX, memory // 8)
