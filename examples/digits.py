"""Write the handwritten digits of digits.csv.gz as a folder of images.

    python examples/digits.py data/digits

gives DIR/{train,val}/<digit>/<index>.png: 1,797 scans of 8 x 8 pixels (17 levels of grey),
enlarged to 32 x 32, because a network with a stride of 32 would have nothing left of 8 x 8. Of
each digit's scans, in the file's order, every fifth goes to val: 1,442 train, 355 val.

The bytes depend on nothing but the scans, so every machine that runs this gets the same files.
Running it again changes nothing. Data: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten
Digits", UCI Machine Learning Repository, CC BY 4.0: a line a scan, 64 values and the digit, as
scikit-learn has them.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
from collections import Counter
from pathlib import Path

SCANS = Path(__file__).with_name("digits.csv.gz")
SIZE = 32
LEVELS = 16  # the darkest pixel's value in the scans


def digits() -> dict[Path, bytes]:
    """Return the contents of all files by their path relative to the folder."""
    from PIL import Image

    scans = gzip.decompress(SCANS.read_bytes()).decode().splitlines()
    counts: Counter[int] = Counter()
    files = {}
    for index, scan in enumerate(scans):
        *values, digit = map(int, scan.split(","))
        split = "val" if counts[digit] % 5 == 4 else "train"
        counts[digit] += 1
        pixels = bytes(round(value * (255 / LEVELS)) for value in values)
        image = Image.frombytes("L", (8, 8), pixels)
        image = image.resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        # Stored rather than compressed, since versions of zlib compress differently.
        image.save(buffer, "PNG", compress_level=0)
        files[Path(split, str(digit), f"{index:04d}.png")] = buffer.getvalue()
    return files


def write(folder: Path, files: dict[Path, bytes]) -> int:
    """Write the files that are missing or differ in `folder`; return how many were written."""
    written = 0
    for path, contents in files.items():
        target = folder / path
        if target.is_file() and target.read_bytes() == contents:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_bytes(contents)
        partial.replace(target)
        written += 1
    return written


def foreign(folder: Path, files: dict[Path, bytes]) -> list[Path]:
    """Return the files in `folder` that are not part of the data set."""
    paths = (path.relative_to(folder) for path in folder.glob("*/*/*") if path.is_file())
    return sorted(path for path in paths if path not in files and path.suffix != ".partial")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    try:
        files = digits()
    except ImportError as error:
        print(f"digits: {error.name} is missing: pip install pillow", file=sys.stderr)
        return 2
    if others := foreign(folder, files):
        print(
            f"digits: {folder / others[0]} is not part of the digits ({len(others)} such files); "
            "remove it or name another folder",
            file=sys.stderr,
        )
        return 2
    try:
        written = write(folder, files)
    except OSError as error:
        print(f"digits: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    train = sum(path.parts[0] == "train" for path in files)
    print(f"{folder}: {train} train, {len(files) - train} val images, {written} written now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
