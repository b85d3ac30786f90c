"""Draw the study's second task: letters and digits of the fonts in Debian's packages.

    python bench/accuracy/fonts.py DIR

This downloads the packages (apt-get, no root), unpacks them in DIR, and draws each of 62 characters
of each font as 32 x 32 pixels into DIR/fonts.npz. A seed holds out a quarter of the fonts for
validation, by whole makers (the first word of a package's name), so no family is both trained on
and validated. O and 0, or l and I, look the same in many fonts, so the task stays unsolved.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from string import ascii_letters, digits
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

# Debian 12's packages fonts-NAME with Latin text fonts. Left out: packages with another package's
# fonts, and aenigma, which has hundreds of ornaments.
PACKAGES = """
3270 campania cardo clear-sans comic-neue hermit essays1743 adf-accanthis adf-baskervald adf-berenis
adf-gillius adf-ikarius adf-irianis adf-libris adf-mekanus adf-oldania adf-romande adf-solothurn
adf-switzera adf-tribun adf-universalis adf-verana agave allerta anonymous-pro apropal arapey
averia-gwf averia-sans-gwf averia-serif-gwf b612 bajaderka bebas-neue beteckna blankenburg breip
cabin cabinsketch cantarell century-catalogue cherrybomb cmu comfortaa compagnon courier-prime
crosextra-caladea crosextra-carlito dancingscript dejavu-core dejavu-extra dkg-handwriting dosis
dustin ebgaramond ecolier-court elstob engadget eurofurence evertype-conakry f500 fantasque-sans
fanwood femkeklaver ferrite-core firacode freefont-ttf georgewilliams gfs-artemisia
gfs-bodoni-classic gfs-didot gfs-neohellenic glasstty gnutypewriter go goudybookletter hack-ttf
havana humor-sans inconsolata inter isabella jetbrains-mono johnsmith-induni joscelyn junction
junicode jura karla karmilla kaushanscript klaudia-berenika kristi lato le-murmure league-mono
league-spartan leckerli-one lemonada levien-museum levien-typoscript liberation lindenhill linex
linuxlibertine lmodern lobster lobstertwo manrope millimetre monofur monoid mononoki mph-2b-damase
national-park noto-mono ocr-a ocr-b okolaks oldstandard open-sans opendin opendyslexic osifont
oxygen pagul paratype play prociono quattrocento quicksand radisnoir roadgeek roboto-slab
roboto-unhinted routed-gothic rufscript sil-andika sil-charis sil-doulos sil-galatia sil-gentium
sil-gentium-basic sjfonts solide-mirage sora staypuft stix summersby texgyre thai-tlwg-ttf tiresias
tomsontalks tuffy ubuntu-title uniol uralic urw-base35 vollkorn yanone-kaffeesatz yrsa-rasa
"""
CHARACTERS = digits + ascii_letters
SIZE, EDGE = 32, 2  # pixels of a side; EDGE stays free around the tallest and widest character
MAX_FONTS = 8  # of a package, so that no maker has most of the task
HELD_OUT = 0.25  # of the fonts, by whole makers
# Pixels by which an image is moved, and gray values of 255: range of the ink, paper, noise.
SHIFT, INK, PAPER, NOISE = 4, (80, 180), 210, 50
DRAWN = "fonts.npz"


class Fonts(NamedTuple):
    """`pixels`: uint8 (fonts, characters, SIZE, SIZE), black on white; `makers`: a name for each
    font; `digest`: of the pixels, since another release of a package may draw others."""

    pixels: np.ndarray
    makers: np.ndarray
    digest: str

    @classmethod
    def read(cls, folder: Path) -> Fonts:
        with np.load(folder / DRAWN) as arrays:
            pixels, makers = arrays["pixels"], arrays["makers"]
        return cls(pixels, makers, hashlib.sha256(pixels.tobytes()).hexdigest()[:16])

    def split(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of (the fonts to train on, the fonts to validate on)."""
        shuffled = np.random.RandomState(seed).permutation(np.unique(self.makers))
        by_maker = [np.flatnonzero(self.makers == maker) for maker in shuffled]
        # Makers are held out until their fonts are at least HELD_OUT of all.
        font_counts = np.cumsum([len(fonts) for fonts in by_maker])
        held_out = int(np.searchsorted(font_counts, HELD_OUT * len(self.makers))) + 1
        train, validation = by_maker[held_out:], by_maker[:held_out]
        return np.sort(np.concatenate(train)), np.sort(np.concatenate(validation))

    def drawn(self, fonts: np.ndarray, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all characters of these fonts: uint8 (n, 3, SIZE, SIZE), and their classes (n).
        Images are moved, paler and noisy, since 1,000 steps reach 93 % on the plain ones."""
        random = np.random.RandomState(seed)
        plain = self.pixels[fonts].reshape(-1, SIZE, SIZE)
        wide = np.pad(plain, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)), constant_values=255)
        rows, columns = random.randint(0, 2 * SHIFT + 1, (2, len(plain), 1, 1))
        pixel = np.arange(SIZE)
        number = np.arange(len(plain))[:, None, None]
        moved = wide[number, pixel[:, None] + rows, pixel + columns]
        ink = random.randint(*INK, (len(plain), 1, 1))
        noise = random.randint(-NOISE, NOISE + 1, moved.shape, dtype=np.int16)
        grey = np.clip(PAPER - (255 - moved.astype(np.int16)) * ink // 255 + noise, 0, 255)
        images = torch.from_numpy(grey.astype(np.uint8))[:, None].expand(-1, 3, -1, -1)
        return images, torch.arange(len(CHARACTERS)).repeat(len(fonts))


class Block(nn.Module):
    """A residual block with normalisation before each convolution."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(before), nn.BatchNorm2d(channels)])
        self.first = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        ready = torch.relu(self.norms[0](images))
        inner = torch.relu(self.norms[1](self.first(ready)))
        return self.shortcut(ready) + self.second(inner)


def residual_net() -> nn.Module:
    """Return a net of 0.3 million parameters: images of 32 pixels to features (n, 128, 4, 4)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        *(Block(16, 32, 1), Block(32, 64, 2), Block(64, 128, 2)),
        *(nn.BatchNorm2d(128), nn.ReLU()),
    )


def fetch(folder: Path) -> None:
    """Download the packages, and unpack each in folder/fonts-NAME."""
    downloads = folder / "packages"
    downloads.mkdir(parents=True, exist_ok=True)
    names = [f"fonts-{name}" for name in PACKAGES.split()]
    subprocess.run(["apt-get", "download", "-q", *names], cwd=downloads, check=True)
    for name in names:
        package = next(downloads.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, folder / name], check=True)


def draw(folder: Path) -> Fonts:
    """Draw each font with all characters once, in the order of packages and names."""
    pixels, makers, drawn = [], [], set()
    for name in PACKAGES.split():
        families = defaultdict(list)
        for file in sorted((folder / f"fonts-{name}").rglob("*.[ot]tf")):
            families[file.stem.split("-")[0]].append(file)
        count = 0
        # One font of each family, then the second of each.
        for file in (file for turn in zip_longest(*families.values()) for file in turn if file):
            image = draw_characters(file) if count < MAX_FONTS else None
            # Two files may draw the same.
            if image is not None and image.tobytes() not in drawn:
                drawn.add(image.tobytes())
                pixels.append(image)
                makers.append(name.split("-")[0])
                count += 1
    np.savez_compressed(folder / DRAWN, pixels=np.stack(pixels), makers=np.array(makers))
    return Fonts.read(folder)


def draw_characters(file: Path) -> np.ndarray | None:
    """Return uint8 (characters, SIZE, SIZE), all at one scale. None if the font lacks some."""
    try:
        # A box is (left, top, right, bottom). The first ones show at which size all fit.
        font = ImageFont.truetype(file, 100)
        boxes = [font.getbbox(character) for character in CHARACTERS]
        height = max(box[3] for box in boxes) - min(box[1] for box in boxes)
        width = max(box[2] - box[0] for box in boxes)
        font = ImageFont.truetype(file, 100 * (SIZE - 2 * EDGE) / max(height, width))
        boxes = [font.getbbox(character) for character in CHARACTERS]
    except (OSError, ValueError, ZeroDivisionError):
        return None
    top = min(box[1] for box in boxes)
    images = []
    for character, box in zip(CHARACTERS, boxes):
        image = Image.new("L", (SIZE, SIZE), 255)
        place = (SIZE - (box[2] - box[0])) / 2 - box[0], EDGE - top
        ImageDraw.Draw(image).text(place, character, fill=0, font=font)
        images.append(np.asarray(image))
    # For characters that it lacks, a font draws nothing, or the same box again and again.
    same = max(sum(image.tobytes() == other.tobytes() for other in images) for image in images)
    return None if same > 3 or not min(255 - i.min() for i in images) else np.stack(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    fetch(folder)
    fonts = draw(folder)
    count, makers = len(fonts.pixels), len(np.unique(fonts.makers))
    print(f"{folder / DRAWN}: {count} fonts of {makers} makers, digest {fonts.digest}")


if __name__ == "__main__":
    main()
