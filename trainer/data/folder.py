"""A data set's images and classes, for training and evaluation; layout.py defines the layout."""

import contextlib
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any, Dict, Iterator, NamedTuple, Optional

from ..errors import UserError
from ..options import Options
from .cache import ImageCache
from .decode import BadImage, size_of
from .layout import LayoutError, images, images_by_class
from .quarantine import Quarantine

SMALL = 64  # pixels; images up to this size are used whole and shifted, not cropped
USUAL = 224


class Sizes(NamedTuple):
    """In pixels: the training crop, the evaluation crop, and the short side before the latter."""

    train: int
    evaluate: int
    resize: int


class ImageFolder:
    """The images of one split. Class numbers follow the sorted names of the classes in train.

    `paths[i]` is relative to `root`, and `targets[i]` is its class. Raises UserError for a folder
    that does not have the layout.
    """

    def __init__(self, root: str, split: str, options: Options) -> None:
        self.root = Path(root)
        self.quarantine = Quarantine(options.bad_images)
        self.options = options
        with _explained(root):
            by_class = images_by_class(self.root, split)
        self.classes = list(by_class)
        self.paths = [path for paths in by_class.values() for path in paths]
        self.targets = [number for number, paths in enumerate(by_class.values()) for _ in paths]
        self.cache: Optional[ImageCache] = None

    def __getstate__(self) -> Dict[str, Any]:
        """For loader processes: they only decode images that are not cached yet."""
        return {**vars(self), "cache": None}

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def sizes(self) -> Sizes:
        return image_sizes(self.options, self.options.image_size or self.natural_size())

    def natural_size(self) -> int:
        """The median short side in pixels of the training images, whichever split this is, from
        the headers of about 64 of them, spread over the classes."""
        sides = []
        for name in self.classes[:: len(self.classes) // 64 + 1]:
            with _explained(self.root):
                some = images(self.root, "train", name)[: 64 // len(self.classes) + 1]
            for path in some:
                with contextlib.suppress(BadImage):  # it is reported when it is used
                    sides.append(min(size_of(self.root / path)))
        return median_low(sides or [USUAL])


@contextlib.contextmanager
def _explained(root: object) -> Iterator[None]:
    try:
        yield
    except LayoutError as error:
        raise UserError(f"--data {root}: {error}") from error


def image_sizes(options: Options, natural: int) -> Sizes:
    """The sizes that the options give; by default 224, or the images' own size if smaller."""
    train = options.image_size or min(USUAL, natural)
    evaluate = options.eval_size or train
    usual = evaluate if evaluate <= SMALL else round(evaluate / 0.875)
    return Sizes(train, evaluate, max(evaluate, options.eval_resize or usual))
