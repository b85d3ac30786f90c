"""From a file to pixels, or to the reason why not."""

import io
from pathlib import Path

from PIL import Image

EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")


class BadImage(Exception):
    """The file is no image that training could use; the text says why."""


def read_image(path: Path) -> Image.Image:
    """Decode to 8-bit RGB. Raises BadImage with the reason.

    16-bit grey and CMYK are refused although Pillow would convert them: the first it clips to
    white, the second needs a colour profile. Both would train, on wrong pixels.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadImage(f"cannot be read: {error.strerror}") from error
    if not content:
        raise BadImage("empty file")
    try:
        image = Image.open(io.BytesIO(content))
        _check(image, path)
        image.load()
        return image if image.mode == "RGB" else _to_rgb(image)
    except (BadImage, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImage("not an image") from error
    # Pillow's decoders raise what they meet: OSError, SyntaxError, ValueError, struct.error, ...
    except Exception as error:
        raise BadImage(f"damaged: {error}") from error


def _check(image: Image.Image, path: Path) -> None:
    # MPO: JPEGs with several pictures, as cameras and telephones make them.
    found = "JPEG" if image.format == "MPO" else image.format
    if found != Image.registered_extensions().get(path.suffix.lower()):
        raise BadImage(f"named {path.suffix} but is {image.format}: rename it")
    if image.mode not in EIGHT_BIT:
        raise BadImage(f"pixels are {image.mode}, not 8-bit grey or RGB: convert it")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
