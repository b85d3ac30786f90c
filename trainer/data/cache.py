"""A cache of small images: each is decoded once, its pixels stay in memory, and each epoch only
augments them.

The result is bit-identical to that of `Samples` in loader.py, in any order and on any rank.
"""

import os
from typing import List, Optional

import numpy as np

# Most bytes that a machine's ranks together keep of a split; never more than 1/8 of its memory.
MOST = 2**31
NOT_DECODED, GOOD, BAD = 0, 1, 2


class ImageCache:
    """Bases of a split's images, uint8 (side, side, 3) each, and which of them are decoded.

    Only those that this rank has decoded take up memory.
    """

    def __init__(self, count: int, side: int) -> None:
        self.pixels = np.empty((count, side, side, 3), dtype=np.uint8)
        self.state = np.full(count, NOT_DECODED, dtype=np.uint8)

    def missing(self, indices: List[int]) -> List[int]:
        """Those that have not been decoded yet."""
        return [index for index in indices if self.state[index] == NOT_DECODED]

    def put(self, index: int, base: Optional[np.ndarray]) -> None:
        """A `base` of None means that the image is bad."""
        self.state[index] = BAD if base is None else GOOD
        if base is not None:
            self.pixels[index] = base

    def get(self, index: int) -> Optional[np.ndarray]:
        """The base; None if the image is bad."""
        return self.pixels[index] if self.state[index] == GOOD else None


def fits(count: int, side: int, ranks: int) -> bool:
    """Whether each of a machine's ranks may keep `count` bases."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return count * side * side * 3 * ranks <= min(MOST, memory // 8)
