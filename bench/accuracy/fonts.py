"""The second task: letters and digits of the fonts in Debian's packages, which nobody here drew.

    python bench/accuracy/fonts.py DIR

downloads the packages (apt-get, no root), unpacks them in DIR, and draws each of 62 characters of
each font as 32 x 32 pixels into DIR/fonts.npz. A seed holds out a quarter of the fonts for
validation, by whole makers (the first word of a package's name), so a family that is validated was
never trained on. That O and 0, or l and I, are one shape in many fonts keeps the task from being
solved.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from string import ascii_letters, digits
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

# Latin text fonts of bookworm; not those that are another package's under another name, nor
# aenigma's hundreds of ornaments.
PACKAGES = re.findall(
    r"\S+",
    """
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
""",
)
CHARACTERS = digits + ascii_letters
SIZE, EDGE = 32, 2  # pixels a side, and left free around the tallest and the widest character
FONTS_EACH = 8  # of a package, at most, so that no hand is most of the task
HELD_OUT = 0.25  # of the fonts, by whole makers
SHIFT, INK, PAPER, NOISE = 4, (80, 180), 210, 50  # pixels; the others of 255
DRAWN = "fonts.npz"


class Fonts(NamedTuple):
    """`pixels` (fonts, characters, SIZE, SIZE), uint8; `makers` (fonts): the name of each one's."""

    pixels: np.ndarray
    makers: np.ndarray
    digest: str  # of the pixels: another release of a package may draw others

    @classmethod
    def read(cls, folder: Path) -> Fonts:
        with np.load(folder / DRAWN) as kept:
            pixels, makers = kept["pixels"], kept["makers"]
        return cls(pixels, makers, hashlib.sha256(pixels.tobytes()).hexdigest()[:16])

    def split(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The fonts to train on, and those of the makers that this seed holds out."""
        shuffled = np.random.RandomState(seed).permutation(np.unique(self.makers))
        order = [np.flatnonzero(self.makers == maker) for maker in shuffled]
        filled = np.cumsum([len(fonts) for fonts in order])
        out = int(np.searchsorted(filled, HELD_OUT * len(self.makers))) + 1
        return np.sort(np.concatenate(order[out:])), np.sort(np.concatenate(order[:out]))

    def drawn(self, fonts: np.ndarray, seed: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 (n, 3, SIZE, SIZE), and classes (n). Each image is moved, paler and in noise, which
        leaves a task that is not solved: 93 % of the plain ones are right after 1,000 steps."""
        random = np.random.RandomState(seed)
        plain = self.pixels[fonts].reshape(-1, SIZE, SIZE)
        wide = np.pad(plain, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)), constant_values=255)
        rows, columns = random.randint(0, 2 * SHIFT + 1, (2, len(plain), 1, 1))
        whole = np.arange(SIZE)
        number = np.arange(len(plain))[:, None, None]
        moved = wide[number, whole[:, None] + rows, whole + columns]
        ink = random.randint(*INK, (len(plain), 1, 1))
        noise = random.randint(-NOISE, NOISE + 1, moved.shape, dtype=np.int16)
        grey = np.clip(PAPER - (255 - moved.astype(np.int16)) * ink // 255 + noise, 0, 255)
        images = torch.from_numpy(grey.astype(np.uint8))[:, None].expand(-1, 3, -1, -1)
        return images, torch.arange(len(CHARACTERS)).repeat(len(fonts))


class Block(nn.Module):
    """Two convolutions on normalised inputs, beside a way that passes them by."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(before), nn.BatchNorm2d(channels)])
        self.first = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.by = nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        ready = torch.relu(self.norms[0](images))
        inner = torch.relu(self.norms[1](self.first(ready)))
        return self.by(ready) + self.second(inner)


def residual_net() -> nn.Module:
    """Features (n, 128, 4, 4) of images of 32 pixels; 0.3 million parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        *(Block(16, 32, 1), Block(32, 64, 2), Block(64, 128, 2)),
        *(nn.BatchNorm2d(128), nn.ReLU()),
    )


def fetch(folder: Path) -> None:
    """Each package's fonts, in DIR/<package>."""
    downloads = folder / "packages"
    downloads.mkdir(parents=True, exist_ok=True)
    names = [f"fonts-{name}" for name in PACKAGES]
    subprocess.run(["apt-get", "download", "-q", *names], cwd=downloads, check=True)
    for name in names:
        package = next(downloads.glob(f"{name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, folder / name], check=True)


def draw(folder: Path) -> Fonts:
    """All fonts that have all characters, each once, in the order of packages and names."""
    pixels, makers, seen = [], [], set()
    for name in PACKAGES:
        families = defaultdict(list)
        for file in sorted((folder / f"fonts-{name}").rglob("*.[ot]tf")):
            families[file.stem.split("-")[0]].append(file)
        taken = 0
        # One font of each family, then the second of each.
        turns = max(map(len, families.values()), default=0)
        for file in (one[turn] for turn in range(turns) for one in families.values() if one[turn:]):
            image = _characters(file) if taken < FONTS_EACH else None
            if image is not None and image.tobytes() not in seen:
                seen.add(image.tobytes())
                pixels.append(image)
                makers.append(name.split("-")[0])
                taken += 1
    np.savez_compressed(folder / DRAWN, pixels=np.stack(pixels), makers=np.array(makers))
    return Fonts.read(folder)


def _characters(file: Path) -> np.ndarray | None:
    """(characters, SIZE, SIZE), all at one scale; None where the font lacks some."""
    try:
        boxes = _boxes(ImageFont.truetype(file, 100))
        room, tall = SIZE - 2 * EDGE, max(b[3] for b in boxes) - min(b[1] for b in boxes)
        wide = max(b[2] - b[0] for b in boxes)
        font = ImageFont.truetype(file, 100 * room / max(tall, wide))
        boxes = _boxes(font)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    top = min(b[1] for b in boxes)
    found = []
    for character, box in zip(CHARACTERS, boxes):
        image = Image.new("L", (SIZE, SIZE), 255)
        at = (SIZE - (box[2] - box[0])) / 2 - box[0], EDGE - top
        ImageDraw.Draw(image).text(at, character, fill=0, font=font)
        found.append(np.asarray(image))
    # A font without a character draws its box for what is missing, or nothing, again and again.
    same = max(sum(one.tobytes() == other.tobytes() for other in found) for one in found)
    return None if same > 3 or not min(255 - one.min() for one in found) else np.stack(found)


def _boxes(font: ImageFont.FreeTypeFont) -> list[tuple[float, float, float, float]]:
    return [font.getbbox(character) for character in CHARACTERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    fetch(folder)
    made = draw(folder)
    makers = len(np.unique(made.makers))
    print(f"{folder / DRAWN}: {len(made.pixels)} fonts of {makers} makers, digest {made.digest}")


if __name__ == "__main__":
    main()
