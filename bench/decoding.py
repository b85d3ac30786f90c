"""Measure how many JPEGs one core turns into crops of 224 pixels in a second, with torchvision's
transforms and with ours.

    python -m bench.decoding
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from random import Random
from statistics import median

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from trainer.data import augment, decode

COUNT, ROUNDS = 24, 11
# (width, height, quality): files as large as ImageNet's for validation, and as `make shrink`'s.
KINDS = ((500, 375, 70), (341, 256, 65))


def photograph(width: int, height: int, quality: int, seed: int) -> bytes:
    """Return a JPEG with a photograph's spectrum: amplitudes fall with the frequency."""
    chance = np.random.default_rng(seed)
    squares = np.fft.fftfreq(height)[:, None] ** 2 + np.fft.fftfreq(width)[None] ** 2
    squares[0, 0] = 1.0
    grey, planes = chance.standard_normal((height, width)), []
    for _ in range(3):
        # Colors are mostly alike, as in a photograph.
        noise = 0.8 * grey + 0.4 * chance.standard_normal((height, width))
        waves = np.real(np.fft.ifft2(np.fft.fft2(noise) / np.sqrt(squares)))
        planes.append(120 + 50 * (waves - waves.mean()) / waves.std())
    file = io.BytesIO()
    pixels = np.stack(planes, -1).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


def our_loader(fast: bool, resizes_bytes: bool) -> Callable[[bytes, Random], np.ndarray]:
    """Return our way. `fast`: simplejpeg decodes; `resizes_bytes`: torch scales."""
    simplejpeg = decode.simplejpeg
    transform = augment.Train("crop", augment.Sizes(224, 224, 256), 0.0)

    def load(content: bytes, rng: Random) -> np.ndarray:
        # These say what is installed; all ways share the modules.
        decode.simplejpeg = simplejpeg if fast else None
        augment.RESIZES_BYTES = resizes_bytes
        return transform(decode.picture_of(content), rng)

    return load


TORCHVISION = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()])
WAYS: dict[str, Callable[[bytes, Random], object]] = {
    "torchvision's, by Pillow": lambda content, _: TORCHVISION(
        Image.open(io.BytesIO(content)).convert("RGB")
    ),
    "Pillow alone": our_loader(fast=False, resizes_bytes=False),
    "Pillow decodes, torch scales": our_loader(fast=False, resizes_bytes=True),
    "simplejpeg decodes, torch scales": our_loader(fast=True, resizes_bytes=True),
}


def main() -> None:
    torch.set_num_threads(1)
    for width, height, quality in KINDS:
        contents = [photograph(width, height, quality, seed) for seed in range(COUNT)]
        kilobytes = sum(map(len, contents)) / COUNT / 1e3
        print(f"{width} x {height}, {kilobytes:.0f} kB an image")
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way, load in WAYS.items():
                rng, begin = Random(1), time.process_time()
                for content in contents:
                    load(content, rng)
                seconds[way].append(time.process_time() - begin)
        for way, spent in seconds.items():
            print(f"    {COUNT / median(spent):5.0f}, at best {COUNT / min(spent):5.0f}: {way}")


if __name__ == "__main__":
    main()
