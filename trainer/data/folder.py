"""A data set as folders: ROOT/{train,val}/<class>/<image>."""

import os
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import List, NamedTuple

from PIL import Image

from ..errors import UserError
from ..options import Options
from .decode import SUFFIXES
from .quarantine import Quarantine

LAYOUT = "the layout is DATA/train/<class>/<image> and DATA/val/<class>/<image>"
SMALL = 64  # pixels; images up to this size are taken whole and moved about, not cropped
USUAL = 224


class Sizes(NamedTuple):
    """Pixels: the training crop, the evaluation crop, the short side before the latter."""

    train: int
    evaluate: int
    resize: int


class ImageFolder:
    """The images of one split. Class numbers follow the sorted names of the classes in train.

    `paths[i]` is relative to `root`, `targets[i]` its class. Raises UserError for a folder that
    does not have the layout.
    """

    def __init__(self, root: str, split: str, options: Options) -> None:
        self.root = Path(root)
        self.paths: List[str] = []
        self.targets: List[int] = []
        self.quarantine = Quarantine(options.bad_images)
        self.options = options
        try:
            self.classes = _class_names(self.root, "train")
            self._scan(split)
        except OSError as error:
            raise UserError(
                f"--data {root}: cannot read {error.filename}: {error.strerror}. "
                "Every user that trains must be able to read and enter all its folders."
            ) from error

    def _scan(self, split: str) -> None:
        numbers = {name: number for number, name in enumerate(self.classes)}
        for name in self.classes if split == "train" else _class_names(self.root, split):
            if name not in numbers:
                raise UserError(
                    f"{self.root / split / name} is a class that {self.root / 'train'} lacks."
                )
            found = _images(self.root, f"{split}/{name}")
            self.paths += found
            self.targets += [numbers[name]] * len(found)

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def sizes(self) -> Sizes:
        return image_sizes(self.options, self.options.image_size or self.natural_size())

    def natural_size(self) -> int:
        """The usual short side in pixels of the training images, whichever split this is, from
        the headers of about 64 of them, spread over the classes."""
        sides = []
        for name in self.classes[:: len(self.classes) // 64 + 1]:
            for path in _images(self.root, f"train/{name}")[: 64 // len(self.classes) + 1]:
                try:
                    with Image.open(self.root / path) as image:
                        sides.append(min(image.size))
                except Exception:  # noqa: S112 decode.py names bad images when they are used
                    continue
        return median_low(sides or [USUAL])


def image_sizes(options: Options, natural: int) -> Sizes:
    """What the options say, else 224 or the images' own size when that is smaller."""
    train = options.image_size or min(USUAL, natural)
    evaluate = options.eval_size or train
    usual = evaluate if evaluate <= SMALL else round(evaluate / 0.875)
    return Sizes(train, evaluate, max(evaluate, options.eval_resize or usual))


def _class_names(root: Path, split: str) -> List[str]:
    folder = root / split
    if not folder.is_dir():
        if not root.is_dir():
            raise UserError(f"--data {root}: there is no such folder; {LAYOUT}.")
        found = ", ".join(sorted(entry.name for entry in root.iterdir())[:5]) or "nothing"
        raise UserError(f"--data {root}: has no folder {split} but {found}; {LAYOUT}.")
    entries = sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith("."))
    names = [name for name in entries if (folder / name).is_dir()]
    if not names:
        raise UserError(
            f"--data {root}: {folder} has no class folders but {len(entries)} files; {LAYOUT}."
        )
    return names


def _images(root: Path, folder: str) -> List[str]:
    """Sorted paths relative to `root` of the images in and below `folder`. Raises OSError."""
    found = []
    for where, _, names in os.walk(root / folder, followlinks=True, onerror=_fail):
        below = Path(where).relative_to(root).as_posix()
        found += [
            f"{below}/{name}"
            for name in names
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")  # noqa: PTH122
        ]
    if not found:
        raise UserError(
            f"{root / folder} has no images ({', '.join(SUFFIXES)}); remove it or fill it."
        )
    return sorted(found)


def _fail(error: OSError) -> None:
    raise error
