"""Decode an image file to pixels, or find the reason why the file cannot be decoded.

No other module opens images, so another decoder changes only this file. augment.py asks a `Picture`
for pixels, and folder.py and loader.py open pictures. tools/shrink.py imports this file, too, and
runs without NumPy and torch.
"""

import contextlib
import errno
import io
import math
import os
import struct
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, BinaryIO, Iterator, Mapping, Optional, Tuple, Union, cast

from PIL import Image, PngImagePlugin
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    IMAGELENGTH,
    IMAGEWIDTH,
    PLANAR_CONFIGURATION,
    ROWSPERSTRIP,
    SAMPLESPERPIXEL,
    TiffImageFile,
)

from contract.layout import FAILING, describe_pointer

if TYPE_CHECKING:
    import numpy as np

try:
    import simplejpeg
except ImportError:  # Pillow makes the same pixels, in more time
    simplejpeg: Any = None  # type: ignore[no-redef]

# Seconds between the trials to read a file whose disk or file server fails.
PAUSES = (0.5, 1.0, 2.0, 4.0)
# The kernel's errors for a file that was listed and does not exist any more.
MISSING = (errno.ENOENT, errno.ENOTDIR)
# The bytes of memory that an image may take: its file, all stages of its pixels as Pillow holds
# them (an RGB pixel in four bytes), and the data that a decoder holds besides. Some MiB of buffers
# come on top.
MEMORY_LIMIT = 280 << 20
# A file's format is recognised by its content, not by its name. No other format of Pillow's is
# opened: some start external programs (EPS starts Ghostscript). MPO files are JPEGs with several
# pictures, as cameras and phones make them.
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
UNREAD_FORMATS = {b"ftypavif": "AVIF", b"ftypheic": "HEIC"}  # by a file's fifth to twelfth byte
# Bytes of a text or colour profile of a PNG, unpacked: photo editors write 2 MiB of history, and
# Pillow's own limit is 1 MiB.
PngImagePlugin.MAX_TEXT_CHUNK = 16 << 20
EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")  # Pillow's names of pixel modes
TILEWIDTH, TILELENGTH = 322, 323  # tags of TIFF
# The tags that say how much memory libtiff takes.
SIZE_TAGS = (
    *(IMAGEWIDTH, IMAGELENGTH, BITSPERSAMPLE, SAMPLESPERPIXEL, PLANAR_CONFIGURATION),
    *(ROWSPERSTRIP, TILEWIDTH, TILELENGTH),
)
SHORT, LONG = 3, 4  # types of tags
# A TIFF's first four bytes -> how struct reads the count of its tags, and one tag's (number, type).
# The formats are little-endian, big-endian, and BigTIFF.
DIRECTORIES = {
    b"II*\0": ("<H", "<HH8x"),
    b"MM\0*": (">H", ">HH8x"),
    b"II+\0": ("<Q", "<HH16x"),
}
ORIENTATION = 0x0112  # the EXIF tag for how the camera was held
# The tag's value -> the operation that makes the image upright. With value 1 it is upright already.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = [TURNS[number] for number in (5, 6, 7, 8)]  # these change width and height


class BadImage(Exception):
    """The file is not an image that training can use; the text says why."""


class Unreadable(BadImage):
    """The disk or file server failed in each trial. The image itself may be good."""


class Missing(Unreadable):
    """The file does not exist any more; perhaps its whole mount is gone."""


class Picture:
    """An opened image. A JPEG is decoded when a caller asks for pixels, because the caller may need
    only a few; until then only its header is read. Any other format is decoded at once."""

    def __init__(self, image: Image.Image, content: bytes = b"") -> None:
        """Decode the image unless it is a JPEG. `content`: its file's bytes. Raises BadImage."""
        # A JPEG until it is decoded; then None, and `_pixels` has the image.
        self._undecoded = image if isinstance(image, JpegImageFile) else None
        self._content = content
        self._held_bytes = len(content)  # that the file and its decoder hold besides the pixels
        if self._undecoded is None:
            with _explain_errors():
                self._held_bytes += _decoder_bytes(image)
            self._pixels = _decode(image, self._held_bytes)
            self.size = self._pixels.size  # (width, height), upright
        else:
            self._held_bytes += _coefficient_bytes(self._undecoded)
            width, height = image.size
            self._turn = _read_turn(image)  # only a JPEG has it: other pixels are upright already
            self.size = (height, width) if self._turn in SIDEWAYS else (width, height)

    @property
    def factors(self) -> Tuple[int, ...]:
        """Return the factors that `pixels` accepts without moving any pixel, largest first."""
        if self._undecoded is None:
            return (1,)
        factors = (8, 4, 2, 1)
        if self._turn is None:
            return factors
        # Rounding up adds a last row or column. A rotation may make it the first, which moves all
        # pixels. So a picture that will be turned needs sides that the factor divides.
        return tuple(factor for factor in factors if not any(side % factor for side in self.size))

    def pixels(self, factor: int = 1) -> Image.Image:
        """Return 8-bit RGB, upright. A JPEG has `factor` (2, 4 or 8) times fewer pixels a side,
        rounded up: its decoder then skips the highest frequencies, and most of its work. Later
        calls return the pixels of the first call. Raises BadImage."""
        if self._undecoded is not None:
            if factor > 1:
                # `draft` takes a wanted size, and reduces to the next larger size that it can.
                reduced_size = (self._undecoded.width // factor, self._undecoded.height // factor)
                self._undecoded.draft(None, reduced_size)
            self._pixels, self._undecoded = _decode(self._undecoded, self._held_bytes), None
        return self._pixels

    def region(self, box: Tuple[int, int, int, int]) -> Optional["np.ndarray"]:
        """Return a box (left, top, right, bottom) of `pixels()` as uint8 (height, width, 3), or
        None if it would take too much memory. Raises BadImage."""
        import numpy as np  # which `make shrink` does without

        left, top, right, bottom = box
        image_pixels, region_pixels = self.size[0] * self.size[1], (right - left) * (bottom - top)
        # Pillow cuts the region out, and NumPy then copies the region three times.
        if self._held_bytes + 4 * image_pixels + 10 * region_pixels > MEMORY_LIMIT:
            return None
        # simplejpeg decodes to the same pixels in less time, but does not turn an image. Pillow
        # decodes other colours than RGB and grey, and files with errors: then it decides whether
        # the image is bad.
        jpeg = self._undecoded
        if jpeg is not None and self._turn is None and simplejpeg is not None:
            with _explain_errors():
                _refuse_large(jpeg, self._held_bytes)
            if jpeg.mode in ("RGB", "L"):
                with contextlib.suppress(ValueError):
                    decoded = simplejpeg.decode_jpeg(self._content, "RGB")
                    if decoded.shape == (jpeg.height, jpeg.width, 3):
                        return np.ascontiguousarray(decoded[top:bottom, left:right])
        return np.array(self.pixels().crop(box))


def _decode(image: Image.Image, held_bytes: int) -> Image.Image:
    """Decode to 8-bit RGB, rotated upright by the image's EXIF orientation. `held_bytes`: those
    that the file and its decoder hold besides the pixels. Raises BadImage."""
    with _explain_errors():
        # Pillow would convert 16-bit grey, but clip its values to white, so training would use
        # wrong pixels. CMYK is accepted, although Pillow ignores its colour profile.
        if image.mode not in EIGHT_BIT:
            raise BadImage(f"pixels are {image.mode}, not 8-bit grey or RGB: convert it")
        _refuse_large(image, held_bytes)
        image.load()
        turn, rgb = _read_turn(image), image
        # Pillow knows the transparent colour of a palette only on the way to RGBA.
        if _has_transparent_color(image):
            rgb = image.convert("RGBA")
        if rgb.mode != "RGB":
            rgb = rgb.convert("RGB")
        if turn is None:
            return rgb
        # Checked only now: in a PNG the orientation is behind the pixels.
        _refuse_large(image, held_bytes, turned=True)
        return rgb.transpose(turn)


def _refuse_large(image: Image.Image, held_bytes: int, turned: bool = False) -> None:
    """Raise BadImage for an image whose pixels take more than MEMORY_LIMIT bytes. `turned`: the
    image will be rotated, which makes one more copy."""
    # A small file may hold any number of equal pixels. Each stage of `_decode` has a copy.
    stages = [image.mode]
    if _has_transparent_color(image):
        stages.append("RGBA")
    if image.mode != "RGB":
        stages.append("RGB")
    if turned:
        stages.append("RGB")
    bytes_per_pixel = sum(1 if mode in ("1", "L", "P") else 4 for mode in stages)
    total = held_bytes + image.width * image.height * bytes_per_pixel
    if total > MEMORY_LIMIT:
        limit = f"the limit is {MEMORY_LIMIT >> 20} MiB"
        raise BadImage(f"its pixels need {total >> 20:,} MiB, {limit}: make it smaller")


def _coefficient_bytes(image: JpegImageFile) -> int:
    """Return the bytes that the decoder holds until the last scan, at any reduction. Call this
    before anything else reads the file."""
    # The decoder holds two bytes for each value of each component, unless one scan has all
    # components. Pillow has read up to the end of the first scan's header. For three components
    # the header is FF DA, its length 00 0C, the count 03, two bytes for each, and three bytes.
    layers = len(image.layer)
    header_begin = b"\xff\xda" + struct.pack(">HB", 6 + 2 * layers, layers)
    file = cast(BinaryIO, image.fp)
    file.seek(-len(header_begin) - 2 * layers - 3, io.SEEK_CUR)
    if file.read(len(header_begin)) == header_begin and "progressive" not in image.info:
        return 0
    # `layer` has (id, samples across, samples down, table) of each component. A component with
    # fewer samples than the largest has fewer values than the image has pixels.
    max_across = max(across for _, across, *_ in image.layer)
    max_down = max(down for *_, down, _ in image.layer)
    layer_values = sum(across * down for _, across, down, _ in image.layer)
    values_per_pixel = layer_values / (max_across * max_down)
    return int(2 * values_per_pixel * image.width * image.height)


def _decoder_bytes(image: Image.Image) -> int:
    """Return the bytes that a decoder except JPEG's holds besides the pixels. Raises BadImage."""
    # Pillow's list of decoders, such as [("libtiff", box, offset, arguments)]. Not every class of
    # Pillow's images has it.
    tile = getattr(image, "tile", None)
    decoder = tile[0][0] if tile else ""
    if image.format == "WEBP":  # three pictures of four channels, even without an animation
        return 12 * image.width * image.height
    if decoder in ("ppm", "ppm_plain"):  # in Python, which holds the pixels twice
        return 2 * len(image.getbands()) * image.width * image.height
    if not isinstance(image, TiffImageFile) or decoder != "libtiff":
        return 0
    # libtiff holds a tile or strip, even if the image is smaller, and some decoders (LZMA, JPEG)
    # hold the same amount again.
    tags = _read_size_tags(image)
    width, rows = tags.get(TILEWIDTH), tags.get(TILELENGTH)
    if width is None and rows is None:
        width, rows = image.width, min(tags.get(ROWSPERSTRIP, image.height), image.height)
    # With configuration 2, each sample (such as red) has its own tiles or strips.
    samples = tags.get(SAMPLESPERPIXEL, 1) if tags.get(PLANAR_CONFIGURATION) != 2 else 1
    numbers = [count for count in (width, rows, samples) if isinstance(count, int)]
    if len(numbers) < 3:  # a tag is missing, or has several values
        raise BadImage("damaged: its tiles have no size")
    return 2 * math.prod(numbers) * max(tags.get(BITSPERSAMPLE, (1,))) // 8


def _read_size_tags(image: TiffImageFile) -> Mapping[int, Any]:
    """Return the tags on which the memory of libtiff depends, as Pillow has read them. Raises
    BadImage if libtiff could read other values."""
    # libtiff reads the tags again, and may use a tag that Pillow ignores: a tag's second copy, or a
    # tag of another type or in another place.
    tags, file = image.tag_v2, cast(BinaryIO, image.fp)
    file.seek(0)
    head = file.read(4)
    if head not in DIRECTORIES:
        raise BadImage("damaged: its header belongs to another format")
    count_format, entry_format = map(struct.Struct, DIRECTORIES[head])
    file.seek(tags.offset)
    (count,) = count_format.unpack(file.read(count_format.size))
    entries = entry_format.iter_unpack(file.read(count * entry_format.size))
    tags_in_file = [number for number, _ in entries]
    for tag in SIZE_TAGS:
        is_number = tags.tagtype.get(tag, SHORT) in (SHORT, LONG)
        if tags_in_file.count(tag) != (tag in tags) or not is_number:
            raise BadImage("damaged: its header has a size twice, or a size of the wrong type")
    return tags


def read_file(path: Path, pauses: Tuple[float, ...] = PAUSES) -> bytes:
    """Read a file. Raises BadImage; Missing if there is no such file; Unreadable if the disk or
    file server still fails after all `pauses`, in seconds."""
    for pause in (*pauses, 0.0):  # there is one trial more than pauses
        try:
            _refuse_pipe(path)
            # Read at most one byte more than the size: a file that grows must not fill the memory.
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= MEMORY_LIMIT:
                    return file.read(size + 1)
            raise BadImage(f"its file has more than {MEMORY_LIMIT >> 20} MiB: make it smaller")
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            if error.errno in MISSING:
                raise Missing(reason) from error
            # Otherwise the file is at fault, and another trial would fail, too.
            if error.errno not in FAILING:
                raise BadImage(reason) from error
        sleep(pause)
    raise Unreadable(reason)


def is_readable(path: Path) -> bool:
    """Return whether the disk or file server still delivers a file's bytes."""
    # A file in the page cache is readable without a disk, so the cache is emptied first.
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read(1)
    except OSError as error:
        return error.errno not in (*FAILING, *MISSING)
    return True


def open_picture(path: Path, retry: bool = True) -> Picture:
    """Open a picture. With `retry`, wait for a disk or file server that fails. Raises the errors
    of `read_file`, and BadImage with the reason if the file is no usable image."""
    return picture_of(read_file(path, PAUSES if retry else ()))


def picture_of(content: bytes) -> Picture:
    """Open the picture in a file's bytes. Raises BadImage."""
    if not content:
        raise BadImage("empty file")
    with _explain_errors():
        return Picture(_open(io.BytesIO(content)), content)


def size_of(path: Path) -> Tuple[int, int]:
    """Read width and height from the file's header, before any rotation. Raises BadImage."""
    with _explain_errors():
        _refuse_pipe(path)
        with _open(path) as image:
            return image.size


def _refuse_pipe(path: Path) -> None:
    if path.is_fifo():
        raise BadImage("a named pipe, not a file: reading it would wait forever")


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    """Turn what Pillow raises within the block into a BadImage."""
    try:
        yield
    except (BadImage, MemoryError):
        raise
    # Pillow's decoders raise many kinds: OSError, SyntaxError, ValueError, struct.error, ...
    except Exception as error:
        raise BadImage(f"damaged: {error}") from error


def _open(file: Union[BinaryIO, Path]) -> Image.Image:
    """Read the header of an image of one of FORMATS. Raises BadImage, and what Pillow raises."""
    Image.init()  # without it, formats whose plug-in is not loaded yet would raise a KeyError
    try:
        # Pillow may have been built without one of the formats.
        return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except Image.UnidentifiedImageError as error:
        # The first bytes often say what the file is instead.
        with file.open("rb") if isinstance(file, Path) else file as opened:
            opened.seek(0)
            begin = opened.read(1024)
        if kind := describe_pointer(begin):
            raise BadImage(f"a pointer of {kind}") from error
        name = UNREAD_FORMATS.get(begin[4:12])
        reason = f"{name}, a format that Tandem cannot read: convert it" if name else "not an image"
        raise BadImage(reason) from error


def _read_turn(image: Image.Image) -> Optional[Image.Transpose]:
    """Read how a viewer turns the image: the orientation in its EXIF data. Return None for none."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF data does not make the image unusable
        return None


def _has_transparent_color(image: Image.Image) -> bool:
    return image.mode == "P" and "transparency" in image.info
