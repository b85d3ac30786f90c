"""Crop, scale and augment a decoded image, with the same pixels on every rank and loader process.

All random numbers come from the `random.Random` that loader.py passes, by its method `random()`:
other methods may draw differently in another version of Python.
"""

import math
from random import Random
from typing import Optional, Sequence, Tuple

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.nn import functional

from tandem.compat import TORCH_VERSION

from .batch import MEAN
from .decode import Picture
from .folder import SMALL_PX, Sizes

GREY = tuple(round(255 * mean) for mean in MEAN)
MAX_ASPECT = 8  # a longer image is cropped to its middle before it is scaled
BILINEAR = Image.Resampling.BILINEAR
# A reduced JPEG has at least so many pixels a side for each output pixel of a crop. The crop then
# differs from that of full decoding by about one level of 255 on average (bench/performance.md).
MIN_REDUCTION = 1.5
# torch 2.1 and newer scale bytes, in half of Pillow's time. The machines of a run have the same
# torch, so all of them make the same pixels.
RESIZES_BYTES = TORCH_VERSION >= (2, 1)


class Train:
    """The training transform: `kind` is one of auto, none, shift, crop, trivial (see --augment).

    Small images are decoded only once. The method `base` makes pixels that are the same in each
    epoch, and `augment` makes the epoch's pixels from the base. A random crop comes before any base
    that could be cached: `keeps` is then False. `erase`: the probability of random erasing.
    `scaled`: a JPEG may be decoded to fewer pixels.
    """

    def __init__(self, kind: str, sizes: Sizes, erase: float, scaled: bool = False) -> None:
        if kind == "auto":
            kind = "shift" if sizes.train <= SMALL_PX else "crop"
        self.kind, self.size, self.erase, self.scaled = kind, sizes.train, erase, scaled
        self.keeps = kind in ("none", "shift")
        self.max_shift = self.size // 8 if kind == "shift" else 0

    def __call__(self, picture: Picture, rng: Random) -> np.ndarray:
        """Make an epoch's pixels of a picture: uint8 (size, size, 3). Raises BadImage."""
        if self.keeps:
            return self.augment(self.base(picture), rng)
        pixels = random_crop(picture, self.size, rng, self.scaled)
        if rng.random() < 0.5:
            pixels = torch.from_numpy(pixels).flip(1).numpy()  # NumPy's flip takes ten times longer
        if self.kind == "trivial":
            pixels = np.array(trivial(Image.fromarray(pixels), rng))
        return self._erase(pixels, rng)

    def base(self, picture: Picture) -> np.ndarray:
        """Cut out the middle, and repeat its border pixels as far as a shift may reach: uint8
        (side, side, 3). Raises BadImage."""
        middle = np.asarray(center_crop(picture.pixels(), self.size, self.size))
        if not self.max_shift:
            return middle
        # With size 4 and shifts up to 2: 0 0 0 1 2 3 3 3.
        indices = np.arange(-self.max_shift, self.size + self.max_shift).clip(0, self.size - 1)
        return middle[indices[:, None], indices]

    @property
    def side(self) -> int:
        """Return the side of `base` in pixels."""
        return self.size + 2 * self.max_shift

    def augment(self, base: np.ndarray, rng: Random) -> np.ndarray:
        """Shift `base` by up to an eighth of the size: uint8 (size, size, 3), perhaps a view."""
        # A small image is not mirrored, since a mirrored letter is no letter or another letter.
        row = column = 0
        if self.max_shift:
            row, column = (int(rng.random() * (2 * self.max_shift + 1)) for _ in range(2))
        return self._erase(base[row : row + self.size, column : column + self.size], rng)

    def _erase(self, pixels: np.ndarray, rng: Random) -> np.ndarray:
        if rng.random() < self.erase:
            pixels = pixels.copy()
            erase(pixels, rng)
        return pixels


class Evaluate:
    """The evaluation transform: scale the short side to `resize`, then crop the middle. It has the
    methods of Train, but they ignore `rng`."""

    keeps = True

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.size, self.side = sizes, sizes.evaluate, sizes.evaluate

    def __call__(self, picture: Picture, rng: Random) -> np.ndarray:
        """Make the pixels of a picture: uint8 (size, size, 3). Raises BadImage."""
        return self.base(picture)

    def base(self, picture: Picture) -> np.ndarray:
        return np.asarray(center_crop(picture.pixels(), self.sizes.resize, self.sizes.evaluate))

    def augment(self, base: np.ndarray, rng: Random) -> np.ndarray:
        return base


def center_crop(image: Image.Image, resize: int, size: int) -> Image.Image:
    """Scale the short side to `resize` pixels and cut `size` x `size` pixels from the middle."""
    width, height = image.size
    side = min(width, height)
    # A long image is cut to its middle first: 1 x 5000 pixels would be scaled to gigabytes.
    max_length = MAX_ASPECT * side
    x, y = (max(0, length - max_length) // 2 for length in (width, height))
    width, height = min(width, max_length), min(height, max_length)
    if side != resize:
        middle = (x, y, x + width, y + height)
        width = max(size, round(width * resize / side))
        height = max(size, round(height * resize / side))
        image = image.resize((width, height), BILINEAR, middle)
        x = y = 0
    x, y = x + round((width - size) / 2), y + round((height - size) / 2)
    return image.crop((x, y, x + size, y + size))


Box = Tuple[int, int, int, int]  # left, top, right, bottom


def random_box(
    image_size: Tuple[int, int], rng: Random, min_share: float, max_share: float, aspect: float
) -> Optional[Box]:
    """Draw a box within an image of `image_size` (width, height). Its area is `min_share` to
    `max_share` of the image's, and its longer side up to `aspect` times its shorter side. Returns
    None if none of ten random boxes fits."""
    width_limit, height_limit = image_size
    for _ in range(10):
        area = width_limit * height_limit * (min_share + (max_share - min_share) * rng.random())
        # Uniform in the logarithm: a box is as likely to be twice as wide as twice as high.
        ratio = math.exp((2 * rng.random() - 1) * math.log(aspect))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= width_limit and 0 < height <= height_limit:
            x = int(rng.random() * (width_limit - width + 1))
            y = int(rng.random() * (height_limit - height + 1))
            return x, y, x + width, y + height
    return None


def random_crop(picture: Picture, size: int, rng: Random, scaled: bool = False) -> np.ndarray:
    """Crop a region of 8-100 % of the area with an aspect ratio of 3:4 to 4:3, scaled to `size` x
    `size` pixels (Szegedy et al., "Going deeper with convolutions", 2014). Crop the middle of a
    very long image. `scaled`: a JPEG is decoded to fewer pixels if these are enough for the same
    region. Returns uint8 (size, size, 3). Raises BadImage."""
    side = min(picture.size)
    x, y = ((length - side) // 2 for length in picture.size)
    middle = (x, y, x + side, y + side)
    box = random_box(picture.size, rng, 0.08, 1.0, 4 / 3) or middle
    factor = reduction(picture.factors, box, size) if scaled else 1
    # A box of a reduced JPEG has fractions of a pixel, at which only Pillow can cut.
    region = picture.region(box) if factor == 1 and RESIZES_BYTES else None
    if region is None:
        reduced_box = (box[0] / factor, box[1] / factor, box[2] / factor, box[3] / factor)
        return np.array(picture.pixels(factor).resize((size, size), BILINEAR, reduced_box))
    # torch recognises channels last in the strides of this view, and keeps this format.
    planes = torch.from_numpy(region)[None].permute(0, 3, 1, 2)
    resized = functional.interpolate(planes, (size, size), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).contiguous().numpy()


def reduction(factors: Sequence[int], box: Box, size: int) -> int:
    """Return the largest of `factors` by which a picture may be reduced, so that each side of `box`
    still has at least MIN_REDUCTION * `size` pixels."""
    x_begin, y_begin, x_end, y_end = box
    short_side = min(x_end - x_begin, y_end - y_begin)
    return next((factor for factor in factors if short_side >= MIN_REDUCTION * size * factor), 1)


def erase(pixels: np.ndarray, rng: Random) -> None:
    """Paint a rectangle of 2-33 % of the area with the mean colour, in place (Zhong et al.,
    "Random Erasing Data Augmentation", 2017). `pixels`: (size, size, 3) uint8."""
    box = random_box(pixels.shape[:2], rng, 0.02, 0.33, 1 / 0.3)
    if box is not None:
        x_begin, y_begin, x_end, y_end = box
        pixels[y_begin:y_end, x_begin:x_end] = GREY


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Move pixels: the pixel at (x, y) comes from (a x + b y + c, d x + e y + f) of `image`, for a
    `matrix` a, b, c, d, e, f."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


# Each entry: (largest magnitude, whether it is signed, the operation on an image and a magnitude).
# The operations and magnitudes are those of the paper: see `trivial`.
TRIVIAL = (
    (0, False, lambda image, m: image),
    (0.99, True, lambda image, m: _affine(image, 1, m, 0, 0, 1, 0)),
    (0.99, True, lambda image, m: _affine(image, 1, 0, 0, m, 1, 0)),
    (32, True, lambda image, m: _affine(image, 1, 0, m, 0, 1, 0)),
    (32, True, lambda image, m: _affine(image, 1, 0, 0, 0, 1, m)),
    (135, True, lambda image, m: image.rotate(m)),
    (0.99, True, lambda image, m: ImageEnhance.Brightness(image).enhance(1 + m)),
    (0.99, True, lambda image, m: ImageEnhance.Color(image).enhance(1 + m)),
    (0.99, True, lambda image, m: ImageEnhance.Contrast(image).enhance(1 + m)),
    (0.99, True, lambda image, m: ImageEnhance.Sharpness(image).enhance(1 + m)),
    (6, False, lambda image, m: ImageOps.posterize(image, 8 - round(m))),
    (255, False, lambda image, m: ImageOps.solarize(image, 255 - round(m))),
    (0, False, lambda image, m: ImageOps.autocontrast(image)),
    (0, False, lambda image, m: ImageOps.equalize(image)),
)


def trivial(image: Image.Image, rng: Random) -> Image.Image:
    """Apply one operation of random strength (Müller and Hutter, "TrivialAugment", 2021,
    "wide")."""
    max_magnitude, signed, operation = TRIVIAL[int(rng.random() * len(TRIVIAL))]
    # The paper has 31 strengths: 0 to 30.
    magnitude = max_magnitude * int(rng.random() * 31) / 30
    return operation(image, -magnitude if signed and rng.random() < 0.5 else magnitude)
