"""From a file to pixels, or to the reason why it cannot be decoded.

No other module opens images: another decoder, or a faster path for some files, changes only this
file.
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

from contract.layout import FAILING, pointer_kind

if TYPE_CHECKING:
    import numpy as np

try:
    import simplejpeg
except ImportError:  # Pillow makes the same pixels, in more time
    simplejpeg: Any = None  # type: ignore[no-redef]

# Seconds between the trials to read a file whose disk or file server fails.
PAUSES = (0.5, 1.0, 2.0, 4.0)
# The kernel's errors for a file that was listed and is not there any more.
MISSING = (errno.ENOENT, errno.ENOTDIR)
# Bytes of an image: of its file, of all stages of its pixels, as Pillow holds them (RGB in four),
# and what the decoder of a JPEG holds until the last scan. Some MiB of buffers come on top.
LARGEST = 280 << 20
# A file's format is recognised by its content, not by its name. No other format of Pillow's is
# opened: some start external programs (EPS starts Ghostscript). MPO files are JPEGs with several
# pictures, as cameras and phones make them.
FORMATS = ("JPEG", "MPO", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
UNREAD_FORMATS = {b"ftypavif": "AVIF", b"ftypheic": "HEIC"}  # by what begins at their fifth byte
# Bytes of a text or colour profile of a PNG, unpacked: photo editors write 2 MiB of history, and
# Pillow takes 1.
PngImagePlugin.MAX_TEXT_CHUNK = 16 << 20
EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK")
TILEWIDTH, TILELENGTH = 322, 323  # tags of TIFF
SIZES = (
    *(IMAGEWIDTH, IMAGELENGTH, BITSPERSAMPLE, SAMPLESPERPIXEL, PLANAR_CONFIGURATION),
    *(ROWSPERSTRIP, TILEWIDTH, TILELENGTH),
)
SHORT, LONG = 3, 4  # types of tags
# By a TIFF's first bytes, the number of its tags, and a tag with its type and content.
DIRECTORIES = {
    **{b"II*\0": ("<H", "<HH8x"), b"MM\0*": (">H", ">HH8x")},
    b"II+\0": ("<Q", "<HH16x"),
}
ORIENTATION = 0x0112  # the EXIF tag for how the camera was held
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
    """Its disk or file server failed in each trial; whether the image is good is not known."""


class Missing(Unreadable):
    """The file is not there any more; perhaps its whole mount is gone."""


class Picture:
    """An opened image. A JPEG is decoded when a caller asks for pixels and says how many; until
    then only its header is read. Any other format is decoded at once."""

    def __init__(self, image: Image.Image, content: bytes = b"") -> None:
        """Decode the image unless it is a JPEG. `content`: the bytes of its file. Raises
        BadImage."""
        self._later = image if isinstance(image, JpegImageFile) else None
        self._content, self._file_bytes = content, len(content)
        if self._later is None:
            with _explain_errors():
                self._file_bytes += _decoder_bytes(image)
            self._pixels = _decode(image, self._file_bytes)
            self.size = self._pixels.size  # upright
        else:
            self._file_bytes += _coefficient_bytes(self._later)
            width, height = image.size
            self._turned = _read_turn(image)
            self.size = (height, width) if self._turned in SIDEWAYS else (width, height)

    @property
    def factors(self) -> Tuple[int, ...]:
        """Return the factors that `pixels` accepts without moving any pixel, largest first."""
        factors = (8, 4, 2, 1) if self._later is not None else (1,)
        if self._later is None or self._turned is None:
            return factors
        # A row or column that rounding adds is the last one, which a rotation may make the first.
        return tuple(factor for factor in factors if not any(side % factor for side in self.size))

    def pixels(self, factor: int = 1) -> Image.Image:
        """Return 8-bit RGB, upright. A JPEG has `factor` (2, 4 or 8) times fewer pixels a side,
        rounded up: its decoder then skips the highest frequencies, and most of the work with them.
        The first call's factor holds for all later calls. Raises BadImage."""
        if self._later is not None:
            if factor > 1:
                reduced_size = (self._later.width // factor, self._later.height // factor)
                self._later.draft(None, reduced_size)
            self._pixels, self._later = _decode(self._later, self._file_bytes), None
        return self._pixels

    def region(self, box: Tuple[int, int, int, int]) -> Optional["np.ndarray"]:
        """Return a box (left, top, right, bottom) of `pixels()` as uint8 (height, width, 3), or
        None if it would take too much memory. Raises BadImage."""
        import numpy as np  # which `make shrink` does without

        left, top, right, bottom = box
        image_pixels, region_pixels = self.size[0] * self.size[1], (right - left) * (bottom - top)
        # NumPy copies what Pillow has cut out three times.
        if self._file_bytes + 4 * image_pixels + 10 * region_pixels > LARGEST:
            return None
        # simplejpeg decodes to the same pixels in less time. Pillow decides what becomes of other
        # colours, and whether a file with errors is bad.
        later = self._later
        if later is not None and self._turned is None and simplejpeg is not None:
            with _explain_errors():
                _refuse_large(later, self._file_bytes)
            if later.mode in ("RGB", "L"):
                with contextlib.suppress(ValueError):
                    decoded = simplejpeg.decode_jpeg(self._content, "RGB")
                    if decoded.shape == (later.height, later.width, 3):
                        return np.ascontiguousarray(decoded[top:bottom, left:right])
        return np.array(self.pixels().crop(box))


def _decode(image: Image.Image, file_bytes: int) -> Image.Image:
    """Decode to 8-bit RGB, rotated upright by its EXIF orientation. `file_bytes`: bytes of the
    file, and of what its decoder holds besides the pixels. Raises BadImage."""
    with _explain_errors():
        # 16-bit grey is refused although Pillow would convert it: it would be clipped to white, and
        # training would use wrong pixels. CMYK is converted by Pillow without a colour profile.
        if image.mode not in EIGHT_BIT:
            raise BadImage(f"pixels are {image.mode}, not 8-bit grey or RGB: convert it")
        _refuse_large(image, file_bytes)
        image.load()
        turn, rgb = _read_turn(image), image
        # Pillow knows the transparent colour of a palette only on the way to RGBA.
        if _has_transparent_color(image):
            rgb = image.convert("RGBA")
        if rgb.mode != "RGB":
            rgb = rgb.convert("RGB")
        if turn is None:
            return rgb
        _refuse_large(image, file_bytes, turned=True)  # a PNG says it behind its pixels
        return rgb.transpose(turn)


def _refuse_large(image: Image.Image, file_bytes: int, turned: bool = False) -> None:
    """Raise BadImage for an image whose pixels take more than LARGEST bytes."""
    # A small file may hold any number of equal pixels. Each stage of the conversion holds its own.
    modes = [image.mode]
    modes += ["RGBA"] * _has_transparent_color(image)
    modes += ["RGB"] * ((image.mode != "RGB") + turned)
    channels = [1 if mode in ("1", "L", "P") else 4 for mode in modes]
    total = file_bytes + image.width * image.height * sum(channels)
    if total > LARGEST:
        limit = f"the limit is {LARGEST >> 20} MiB"
        raise BadImage(f"its pixels need {total >> 20:,} MiB, {limit}: make it smaller")


def _coefficient_bytes(image: JpegImageFile) -> int:
    """Return the bytes that the decoder holds until the last scan, at any reduction. Call it before
    anything else reads the file."""
    # It holds two bytes for each value of each component, unless one scan has all components.
    layers = len(image.layer)
    header = b"\xff\xda" + struct.pack(">HB", 6 + 2 * layers, layers)
    file = cast(BinaryIO, image.fp)  # behind the head of the first scan
    file.seek(-len(header) - 2 * layers - 3, io.SEEK_CUR)
    if file.read(len(header)) == header and "progressive" not in image.info:
        return 0
    # A component with fewer samples down or across than the largest has fewer values than pixels.
    max_down = max(down for _, down, *_ in image.layer)
    max_across = max(across for *_, across, _ in image.layer)
    values = sum(down * across for _, down, across, _ in image.layer) / (max_down * max_across)
    return int(2 * values * image.width * image.height)


def _decoder_bytes(image: Image.Image) -> int:
    """Return the bytes that the decoder of another format than JPEG holds besides the pixels."""
    tile = getattr(image, "tile", None)  # which not every kind of Pillow's images has
    decoder = tile[0][0] if tile else ""
    if image.format == "WEBP":  # three pictures of four channels, of a still one too
        return 12 * image.width * image.height
    if decoder in ("ppm", "ppm_plain"):  # in Python, which holds the pixels twice
        return 2 * len(image.getbands()) * image.width * image.height
    if not isinstance(image, TiffImageFile) or decoder != "libtiff":
        return 0
    # A tile or strip, however small the image is, and as much again in some decoders (LZMA, JPEG).
    tags = _read_size_tags(image)
    width, rows = tags.get(TILEWIDTH), tags.get(TILELENGTH)
    if width is None and rows is None:
        width, rows = image.width, min(tags.get(ROWSPERSTRIP, image.height), image.height)
    samples = tags.get(SAMPLESPERPIXEL, 1) if tags.get(PLANAR_CONFIGURATION) != 2 else 1
    numbers = [count for count in (width, rows, samples) if isinstance(count, int)]
    if len(numbers) < 3:
        raise BadImage("damaged: its tiles have no size")
    return 2 * math.prod(numbers) * max(tags.get(BITSPERSAMPLE, (1,))) // 8


def _read_size_tags(image: TiffImageFile) -> Mapping[int, Any]:
    """Return the tags on which the memory of libtiff depends, as Pillow has read them. Raises
    BadImage if libtiff could read others."""
    # libtiff reads the file again. Pillow passes over some types and places, and over second tags.
    tags, file = image.tag_v2, cast(BinaryIO, image.fp)
    file.seek(0)
    head = file.read(4)
    if head not in DIRECTORIES:
        raise BadImage("damaged: its header belongs to another format")
    count, entry = map(struct.Struct, DIRECTORIES[head])
    file.seek(tags.offset)
    (entries,) = count.unpack(file.read(count.size))
    tags_in_file = [number for number, _ in entry.iter_unpack(file.read(entries * entry.size))]
    for tag in SIZES:
        is_number = tags.tagtype.get(tag, SHORT) in (SHORT, LONG)
        if tags_in_file.count(tag) != (tag in tags) or not is_number:
            raise BadImage("damaged: its header has a size twice, or a size of the wrong type")
    return tags


def read_file(path: Path, pauses: Tuple[float, ...] = PAUSES) -> bytes:
    """Read a file. Raises BadImage; Missing if there is no such file; Unreadable if disk or file
    server still fail after all `pauses`, in seconds."""
    for pause in (*pauses, 0.0):
        try:
            _refuse_pipe(path)
            # A file that grows while it is read must not take more memory than its size said.
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size <= LARGEST:
                    return file.read(size + 1)
            raise BadImage(f"its file has more than {LARGEST >> 20} MiB: make it smaller")
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            if error.errno in MISSING:
                raise Missing(reason) from error
            if error.errno not in FAILING:
                raise BadImage(reason) from error
        sleep(pause)
    raise Unreadable(reason)


def is_readable(path: Path) -> bool:
    """Return whether the disk or file server still gives a file's bytes."""
    # A file in the page cache is readable without a disk, so the cache is emptied first.
    try:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read(1)
    except OSError as error:
        return error.errno not in (*FAILING, *MISSING)
    return True


def open_picture(path: Path, again: bool = True) -> Picture:
    """Open a picture; with `again`, try several times. Raises BadImage with the reason, Unreadable
    if disk or file server fail, and Missing if there is no such file."""
    return picture_of(read_file(path, PAUSES if again else ()))


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
        return Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN])
    except Image.UnidentifiedImageError as error:
        # The first bytes often say what the file is instead.
        with file.open("rb") if isinstance(file, Path) else file as opened:
            opened.seek(0)
            begin = opened.read(1024)
        if kind := pointer_kind(begin):
            raise BadImage(f"a pointer of {kind}") from error
        name = UNREAD_FORMATS.get(begin[4:12])
        reason = f"{name}, a format that Tandem cannot read: convert it" if name else "not an image"
        raise BadImage(reason) from error


def _read_turn(image: Image.Image) -> Optional[Image.Transpose]:
    """Read how a viewer turns the image: the orientation in its EXIF data."""
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF data does not make the image unusable
        return None


def _has_transparent_color(image: Image.Image) -> bool:
    return image.mode == "P" and "transparency" in image.info
