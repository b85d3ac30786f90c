"""From a file to pixels, or to the reason why not.

Nothing else opens images: another decoder, or a faster way for some files, changes this file alone.
"""

import contextlib
import io
from pathlib import Path
from typing import BinaryIO, Iterator, Tuple, Union

from PIL import Image

# What a file is stands in its content, not in its name. No other of Pillow's formats is opened:
# some are run by programs of their own (EPS by Ghostscript). MPO: JPEGs with several pictures, as
# cameras and telephones make them.
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
ORIENTATION = 0x0112  # of EXIF: how the camera was held
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(Exception):
    """The file is no image that training could use; the text says why."""


def read_image(path: Path) -> Image.Image:
    """The one way from a file to 8-bit RGB pixels, turned as the camera was held. Raises BadImage.

    16-bit grey is refused although Pillow would convert it: it would be clipped to white, and
    train on wrong pixels. CMYK becomes what Pillow makes of it without a colour profile.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror}") from error
    if not content:
        raise BadImage("empty file")
    with _explained():
        image = _open(io.BytesIO(content))
        if image.mode not in EIGHT_BIT:
            raise BadImage(f"pixels are {image.mode}, not 8-bit grey or RGB: convert it")
        image.load()
        return _upright(image if image.mode == "RGB" else _to_rgb(image), image)


def size_of(path: Path) -> Tuple[int, int]:
    """Width and height by the file's header, as they are stored. Raises BadImage."""
    with _explained(), _open(path) as image:
        return image.size


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Whatever a decoder raises, as BadImage."""
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImage("not an image") from error
    # Pillow's decoders raise what they meet: OSError, SyntaxError, ValueError, struct.error, ...
    except Exception as error:
        raise BadImage(f"damaged: {error}") from error


def _open(file: Union[BinaryIO, Path]) -> Image.Image:
    """The header of an image of one of FORMATS. Raises what Pillow raises."""
    Image.init()  # once: else formats whose plug-in is not loaded yet are a KeyError
    return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])


def _upright(pixels: Image.Image, image: Image.Image) -> Image.Image:
    """`pixels` as a viewer shows `image`, by the camera's note in its EXIF data."""
    try:
        turn = TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # a damaged note spoils no image
        return pixels
    return pixels if turn is None else pixels.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
