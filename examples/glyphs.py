"""Draw a data set that a small network does not solve: glyphs among distractors and noise.

    python examples/glyphs.py data/glyphs --seed 1

gives DIR/{train,val}/<class>/<index>.ppm, 32 x 32 pixels. Each of the 64 classes is a glyph of four
strokes, the same for every seed. An image shows one glyph rotated, scaled and moved, the ends of
its strokes jittered, beside a random stroke, in a random colour on a darker background with a
gradient, and with noise. Another `--seed` draws other images of the same classes, both training and
validation images.

Any network solves the digits. This set is for comparisons: what one way of training gains or loses
against another (docs/slow-networks.md).

On any machine the bytes depend on the given numbers alone: numpy guarantees the streams of
RandomState, and the arithmetic uses only what IEEE 754 rounds in one way: no sine, no long sums.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SIZE, CLASSES = 32, 64
STROKES, DISTRACTORS = 4, 1
TRAIN, VAL = 400, 160  # images of each class
CHUNK = 80  # images drawn at a time
# In the glyphs' coordinates, in which an image extends from -1 to 1.
TURN, SHAKE, SHIFT, SMALLEST, LARGEST = 0.25, 0.09, 0.15, 0.75, 1.05
WIDTH, EDGE = 0.055, 0.07
NOISE, CONTRAST = 80, 70  # on a scale to 255


def glyphs() -> np.ndarray:
    """The ends of all classes' strokes: (CLASSES, STROKES, 2 ends, 2 coordinates)."""
    import numpy as np

    random = np.random.RandomState(20)
    return random.random_sample((CLASSES, STROKES, 2, 2)) * 1.5 - 0.75


def images(ends: np.ndarray, count: int, seed: list[int]) -> np.ndarray:
    """`count` images of one glyph: uint8 (count, SIZE, SIZE, 3)."""
    import numpy as np

    random = np.random.RandomState(seed)
    parts = [_some(ends, min(CHUNK, count - at), random) for at in range(0, count, CHUNK)]
    return np.concatenate(parts)


def _some(ends: np.ndarray, count: int, random: Any) -> np.ndarray:
    import numpy as np

    strokes = _placed(ends, count, random)
    others = random.random_sample((count, DISTRACTORS, 2, 2)) * 2.4 - 1.2
    ink = _ink(np.concatenate([strokes, others], 1))[..., None]
    paper, slope, colour = (random.random_sample((count, 1, 1, 3)) for _ in range(3))
    across = _places()[None, None, :, None]
    back = 40 + 80 * paper + 40 * (slope - 0.5) * across
    step = CONTRAST + 50 * colour
    noise = random.randint(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)
    pixels = back + step * ink + (noise / 255 - 0.5) * NOISE
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _placed(ends: np.ndarray, count: int, random: Any) -> np.ndarray:
    """The glyph's strokes in each image: (count, STROKES, 2, 2)."""
    import numpy as np

    half = (random.random_sample((count, 1, 1)) * 2 - 1) * TURN  # tangent of half the angle
    cos, sin = (1 - half * half) / (1 + half * half), 2 * half / (1 + half * half)
    scale = SMALLEST + (LARGEST - SMALLEST) * random.random_sample((count, 1, 1))
    moved = (random.random_sample((count, 1, 1, 2)) * 2 - 1) * SHIFT
    shaken = ends + (random.random_sample((count, *ends.shape)) * 2 - 1) * SHAKE
    x, y = shaken[..., 0] * scale, shaken[..., 1] * scale
    return np.stack([cos * x - sin * y, sin * x + cos * y], -1) + moved


def _ink(strokes: np.ndarray) -> np.ndarray:
    """How much of each pixel is covered, 0 to 1: (images, SIZE, SIZE)."""
    import numpy as np

    x, y = _places()[None, None, :], _places()[None, :, None]
    ink = np.zeros((len(strokes), SIZE, SIZE))
    for stroke in strokes.transpose(1, 2, 3, 0):
        (ax, ay), (bx, by) = (end[..., None, None] for end in stroke)
        dx, dy = bx - ax, by - ay
        length = np.maximum(dx * dx + dy * dy, 1e-6)
        # The nearest point of the stroke, as a fraction of the way from one end to the other.
        way = np.clip(((x - ax) * dx + (y - ay) * dy) / length, 0, 1)
        across, down = x - ax - way * dx, y - ay - way * dy
        distance = np.sqrt(across * across + down * down)
        ink = np.maximum(ink, np.clip((WIDTH + EDGE - distance) / EDGE, 0, 1))
    return ink


def _places() -> np.ndarray:
    """The centres of the pixels of a row, from -1 to 1."""
    import numpy as np

    return (2 * np.arange(SIZE) - (SIZE - 1)) / (SIZE - 1)


def write(folder: Path, seed: int, train: int = TRAIN, val: int = VAL) -> int:
    """Write `train` and `val` images of each class; return how many images that makes."""
    header = f"P6\n{SIZE} {SIZE}\n255\n".encode()
    for number, ends in enumerate(glyphs()):
        for split, count, at in (("train", train, 0), ("val", val, 1)):
            target = folder / split / f"{number:02d}"
            target.mkdir(parents=True, exist_ok=True)
            for index, image in enumerate(images(ends, count, [seed, at, number])):
                (target / f"{index:04d}.ppm").write_bytes(header + image.tobytes())
    return CLASSES * (train + val)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="other images of the same classes (0)")
    parser.add_argument("--train", type=int, default=TRAIN, help=f"images per class ({TRAIN})")
    parser.add_argument("--val", type=int, default=VAL, help=f"images per class ({VAL})")
    options = parser.parse_args()
    if min(options.train, options.val) < 1 or not 0 <= options.seed < 2**32:
        print("glyphs: --train and --val start at 1, --seed at 0", file=sys.stderr)
        return 2
    if options.folder.exists() and any(options.folder.iterdir()):
        print(f"glyphs: {options.folder} is not empty: name another folder", file=sys.stderr)
        return 2
    try:
        count = write(options.folder, options.seed, options.train, options.val)
    except ImportError as error:
        print(f"glyphs: {error.name} is missing: pip install numpy", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"glyphs: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{options.folder}: {count} images of {CLASSES} classes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
