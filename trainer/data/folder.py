"""List a data set's images and classes, collect the images that cannot be used, and keep small
images decoded. contract/layout.py defines the layout of the folders; loader.py makes batches.
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

SMALL_PX = 64  # pixels; images up to this size are used whole and shifted, not cropped
USUAL_PX = 224  # pixels; the default training crop, unless the images are smaller
MIN_OPENED = 20  # a split is refused before the first step if so many of its images are all bad
HEADER_COUNT = 64  # images whose size is read to find the usual size
PROBE_COUNT = 4  # images that are read on a mount where an image could not be read
# The most bytes of a split that the ranks of a machine together keep decoded. These bytes are also
# at most 1/8 of the machine's memory.
CACHE_BYTES_MAX = 2**31
NOT_DECODED, GOOD, BAD = 0, 1, 2  # states of an image in `ImageCache`


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
            listing = read_split(self.root, split)
        # Read when the images are listed, so that errors can name a mount that has gone since.
        self.mounts = read_mounts()
        if note := listing.note(split):
            log.info("%s: %s", root, note)
        paths_by_class = listing.images
        self.classes = list(paths_by_class)
        self.paths = [path for paths in paths_by_class.values() for path in paths]
        self.targets = [
            number for number, paths in enumerate(paths_by_class.values()) for _ in paths
        ]
        self.cache: Optional[ImageCache] = None

    def __getstate__(self) -> Dict[str, Any]:
        """Leave the cache out for loader processes: they decode only images that are not in it."""
        return {**vars(self), "cache": None}

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def sizes(self) -> Sizes:
        # The natural size is needed only if no option gives the size: it costs reads of a share.
        return image_sizes(self.options, self.options.image_size or self.natural_size())

    def natural_size(self) -> int:
        """Return the median short side in pixels of the training images, also for the split val."""
        # About HEADER_COUNT images, spread over the classes, show the usual size: of 1,000 classes
        # an image of every 16th, and of 10 classes seven images each.
        sides = []
        for name in self.classes[:: len(self.classes) // HEADER_COUNT + 1]:
            with _explain_errors(self.root):
                paths = read_class(self.root, "train", name).images[name]
            for path in paths[: HEADER_COUNT // len(self.classes) + 1]:
                with contextlib.suppress(BadImage):  # reported when training uses the image
                    sides.append(min(size_of(self.root / path)))
        if not sides:
            log.warning("Tandem could read no image to find the image size, and uses %d", USUAL_PX)
        return median_low(sides or [USUAL_PX])

    def refuse_if_unusable(self, rank: int) -> None:
        """Raise UserError if none of some random images can be used. They are MIN_OPENED images, or
        as many as --bad_images allows to be bad. Each rank opens different images."""
        rng, count = Random(rank), max(MIN_OPENED, self.quarantine.limit)
        images = [self.images_of(number) for number in range(len(self.classes))]
        drawn_by_class = [rng.sample(indices, min(len(indices), count)) for indices in images]
        rng.shuffle(drawn_by_class)
        # First an image of each class, then a second image of each class, and so on.
        in_turn = chain(*zip_longest(*drawn_by_class))
        drawn = [index for index in in_turn if index is not None][:count]
        reasons: List[str] = []
        for index in drawn:
            try:
                picture = open_picture(self.root / self.paths[index], retry=False)
                picture.pixels(picture.factors[0])  # decodes the fewest pixels
                return  # one good image is enough
            except Unreadable:
                return  # `Samples` waits for a disk or file server that fails, when it needs one
            except BadImage as error:
                reasons.append(str(error))
        frequent_reasons = Counter(reasons).most_common(3)
        raise UserError(
            f"--data {self.root}: {self.split} has {pluralize(len(self), 'image')}. Tandem "
            f"opened {len(drawn)} of them, and can use none: "
            f"{', '.join(f'{count} x {reason}' for reason, count in frequent_reasons)}."
        )

    def images_of(self, number: int) -> range:
        """Return the indices of the images of class `number`."""
        # The images are listed class by class, so the targets are sorted.
        return range(bisect_left(self.targets, number), bisect_right(self.targets, number))

    def can_read_neighbours(self, path: str) -> bool:
        """Return whether any of PROBE_COUNT other images on this image's mount can be read, or
        whether the mount has no other images."""
        neighbours = [p for p in self.by_mount[self.mount_of(path)] if p != path]
        # Every step-th neighbour is read, from an offset that differs from bad image to bad image:
        # each failure then tests other neighbours. With step 3 the offset is 0, 1 or 2.
        step = len(neighbours) // PROBE_COUNT + 1
        offset = self.paths.index(path) % step
        probed = neighbours[offset::step]
        return not neighbours or any(is_readable(self.root / probe) for probe in probed)

    @cached_property
    def by_mount(self) -> Dict[str, List[str]]:
        """Return the paths of the images of each mount, by the mount's name."""
        # A folder is on one mount. To resolve a path is slow, so resolve one path of each folder.
        by_folder: Dict[str, List[str]] = {}
        for path in self.paths:
            by_folder.setdefault(path.rpartition("/")[0], []).append(path)
        by_mount: Dict[str, List[str]] = {}
        for paths in by_folder.values():
            by_mount.setdefault(self.mount_of(paths[0]), []).extend(paths)
        return by_mount

    def mount_of(self, path: str) -> str:
        """Name the mount of an image, like `/srv/data (node1:/data, nfs4)`. Looks up links in the
        path."""
        folder = os.path.realpath((self.root / path).parent) + "/"
        # The innermost of the mounts that contain the folder.
        enclosing = (m for m in self.mounts if folder.startswith(m.folder.rstrip("/") + "/"))
        mount = max(enclosing, key=lambda mount: len(mount.folder), default=Mount("", "/", ""))
        return f"{mount.folder} ({mount.source}, {mount.kind})"


class Mount(NamedTuple):
    """A line of /proc/self/mounts: a disk or share, the folder it is mounted on, and its type."""

    source: str
    folder: str
    kind: str


def read_mounts() -> List[Mount]:
    """Read all mounts, the newest first: of two mounts on one folder, the newer hides the older."""
    # A line has source, folder and kind first: `node1:/data /srv/my\040data nfs4 rw,relatime 0 0`.
    lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    # The kernel writes blanks in paths as a backslash with three octal digits.
    octal = re.compile(r"\\([0-7]{3})")
    rows = [
        [octal.sub(lambda match: chr(int(match.group(1), 8)), word) for word in line.split()]
        for line in lines
    ]
    return [Mount(*row[:3]) for row in reversed(rows)]


@contextlib.contextmanager
def _explain_errors(root: object) -> Iterator[None]:
    """Raise errors of contract/layout.py within the block as DataLost or UserError."""
    try:
        yield
    except NoAnswer as error:
        raise DataLost(f"--data {root}: {error}") from error
    except LayoutError as error:
        raise UserError(f"--data {root}: {error}") from error


def image_sizes(options: Options, natural_size: int) -> Sizes:
    """Compute the sizes from the options. `natural_size`: the images' short side in pixels, which
    is the default of the training crop, up to 224."""
    train = options.image_size or min(USUAL_PX, natural_size)
    evaluate = options.eval_size or train
    # The middle of a photo shows its object: the usual crop is 7/8 of the short side. Small images
    # are evaluated whole.
    default_resize = evaluate if evaluate <= SMALL_PX else round(evaluate / 0.875)
    resize = options.eval_resize or default_resize
    # An image that is scaled to fewer pixels would be smaller than the crop.
    return Sizes(train=train, evaluate=evaluate, resize=max(evaluate, resize))


class Bad(NamedTuple):
    """An image that cannot be used. `mount`: the disk or share that did not deliver the image; ""
    if the image itself is at fault. `mount_works`: other images on this mount can be read."""

    path: str
    reason: str
    mount: str = ""
    mount_works: bool = True


class Quarantine:
    """The bad images that this rank has met so far. Their files stay where they are."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.images: Dict[str, Bad] = {}

    def __len__(self) -> int:
        return len(self.images)

    def add(self, bad_images: Iterable[Bad]) -> None:
        """Log each new file. Raises DataLost if a mount delivers no images any more, and RankError
        if there are more than `limit` bad images."""
        for bad in bad_images:
            if bad.path in self.images:
                continue
            self.images[bad.path] = bad
            if not bad.mount_works:
                raise self._mount_error(bad, "and other images there cannot be read either")
            log.warning("bad image %s: %s", printable(bad.path), bad.reason)
            if len(self.images) <= self.limit:
                continue
            # If most of the images failed with a mount, the error names the mount.
            if sum(bool(image.mount) for image in self.images.values()) > self.limit // 2:
                detail = f"like {len(self.images) - 1} images before it"
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
    """Keeps the bases of a split's small images, uint8 (side, side, 3) each. A base has the pixels
    that are the same in each epoch, before augmentation (augment.py). Each image is decoded once,
    its pixels stay in memory, and each epoch only augments them.

    Only bases that this rank has decoded take up memory. The pixels are bit for bit identical to
    those of `Samples` in loader.py, in any order and on any rank.
    """

    def __init__(self, count: int, side: int) -> None:
        # The kernel allocates memory only for pages that are written.
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
