"""Folders of images, good and bad."""

import io
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from contract.errors import UserError
from contract.options import Options
from trainer.data import decode
from trainer.data.decode import BadImage, read_image, size_of
from trainer.data.folder import Bad, ImageFolder, Quarantine, Sizes, image_sizes


def make(path: Path, size=(40, 30), mode="RGB", **save) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, 77).save(path, **save)
    return path


@pytest.fixture
def root(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "ant"):
            for number in range(3):
                make(tmp_path / split / name / f"{number}.png")
    return tmp_path


def test_classes_paths_and_targets_are_sorted(root):
    make(root / "train" / "ant" / "deeper" / "x.JPEG")
    (root / "train" / "ant" / "notes.txt").write_text("no image")
    folder = ImageFolder(root, "train", Options())
    assert folder.classes == ["ant", "cat"]
    assert folder.paths[3:5] == ["train/ant/deeper/x.JPEG", "train/cat/0.png"]
    assert folder.targets == [0, 0, 0, 0, 1, 1, 1]
    assert folder.paths == sorted(folder.paths)


@pytest.mark.parametrize("closed", ["train", "val/cat"])
def test_a_folder_without_permission_is_named(root, closed, monkeypatch):
    # Not by chmod: tests also run as root, to whom every folder is open.
    scandir = os.scandir

    def guarded(folder):
        # `rmtree`, by which pytest removes old folders, gives a descriptor.
        if not isinstance(folder, int) and Path(folder) == root / closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(UserError, match=f"cannot read .*{closed}: Permission denied"):
        ImageFolder(root, "val", Options())


def test_val_takes_its_numbers_from_train(root):
    make(root / "train" / "bee" / "0.png")
    assert ImageFolder(root, "val", Options()).targets == [0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: "nowhere", "no such folder"),
        (lambda root: (root / "train").rename(root / "training"), "no folder train, but training"),
        (
            lambda root: make(root / "flat/train/0.png").parents[1],
            "has one file and no class folders",
        ),
        (
            lambda root: shutil.rmtree(root / "train/ant"),
            "has one class, cat: to tell",
        ),
        (lambda root: (root / "train/empty").mkdir(), "train/empty has no images"),
    ],
)
def test_a_wrong_layout_is_explained(root, spoil, words):
    result = spoil(root)
    root = root / (result.name if isinstance(result, Path) and result.name == "flat" else "")
    with pytest.raises(UserError, match=words):
        ImageFolder("nowhere" if result == "nowhere" else root, "train", Options())


def test_a_class_that_train_lacks_is_named(root):
    make(root / "val" / "dog" / "0.png")
    with pytest.raises(UserError, match=r"val/dog is a class that .*train lacks"):
        ImageFolder(root, "val", Options())


def test_natural_size_is_the_usual_short_side_and_ignores_bad_files(root):
    (root / "train/ant/0.png").write_bytes(b"")
    make(root / "train/cat/0.png", size=(500, 400))
    for number in range(3):
        make(root / f"val/ant/{number}.png", size=(50, 50))
        make(root / f"val/cat/{number}.png", size=(50, 50))
    for split in ("train", "val"):
        assert ImageFolder(root, split, Options()).natural_size() == 30


@pytest.mark.parametrize(
    ("options", "natural", "sizes"),
    [
        ({}, 500, Sizes(224, 224, 256)),
        ({}, 32, Sizes(32, 32, 32)),
        ({"image_size": 64}, 32, Sizes(64, 64, 64)),
        ({"image_size": 176, "eval_size": 224, "eval_resize": 232}, 500, Sizes(176, 224, 232)),
    ],
)
def test_sizes(options, natural, sizes):
    assert image_sizes(Options(**options), natural) == sizes


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA"])
def test_eight_bit_images_become_rgb(tmp_path, mode):
    image = read_image(make(tmp_path / "a.png", mode=mode))
    assert (image.mode, image.size) == ("RGB", (40, 30))


def test_cmyk_becomes_what_pillow_makes_of_it(tmp_path):
    path = make(tmp_path / "a.jpg", mode="CMYK")
    with Image.open(path) as image:
        assert read_image(path).tobytes() == image.convert("RGB").tobytes()


def test_the_content_says_what_a_file_is(tmp_path):
    assert read_image(make(tmp_path / "a.jpg", format="PNG")).size == (40, 30)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_as_the_camera_was_held(tmp_path, orientation, suffix):
    """One corner is white; where a viewer shows it is where training finds it."""
    image, exif = Image.new("RGB", (16, 8)), Image.Exif()
    image.paste((255, 255, 255), (0, 0, 4, 4))
    exif[0x0112] = orientation
    image.save(tmp_path / f"a.{suffix}", exif=exif)
    shown = read_image(tmp_path / f"a.{suffix}")
    right, below = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    assert shown.size == ((16, 8) if orientation < 5 else (8, 16))
    corner = ((shown.width - 1) * right, (shown.height - 1) * below)
    assert min(shown.getpixel(corner)) > 200
    assert max(shown.getpixel((shown.width - 1 - corner[0], corner[1]))) < 50


def test_the_header_says_the_size_and_a_bad_one_is_a_bad_image(tmp_path):
    assert size_of(make(tmp_path / "a.jpg", size=(50, 20))) == (50, 20)
    with pytest.raises(BadImage, match="not an image"):
        size_of(text(tmp_path))
    with pytest.raises(BadImage, match="No such file"):
        size_of(tmp_path / "gone.png")


def test_a_damaged_note_of_the_camera_spoils_no_image(tmp_path):
    Image.new("RGB", (16, 8)).save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert read_image(tmp_path / "a.jpg").size == (16, 8)


def truncated(folder):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    path = folder / "a.jpg"
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-900])
    return path


def sixteen_bit(folder):
    Image.fromarray(np.full((8, 8), 4000, dtype=np.uint16)).save(folder / "a.png")
    return folder / "a.png"


def text(folder, content=b"hello"):
    (folder / "a.png").write_bytes(content)
    return folder / "a.png"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncated, "damaged: .*truncated"),
        (lambda folder: text(folder, b""), "empty file"),
        (text, "not an image"),
        (sixteen_bit, "pixels are I;16, not 8-bit"),
        (
            lambda folder: text(folder, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
            "not an",
        ),
        (lambda folder: folder / "gone.png", "cannot be read: No such file"),
    ],
)
def test_each_kind_of_bad_image_has_its_reason(tmp_path, spoil, reason):
    with pytest.raises(BadImage, match=reason):
        read_image(spoil(tmp_path))


def test_quarantine_names_each_file_once_and_has_a_limit(caplog):
    quarantine = Quarantine(limit=2)
    with caplog.at_level(logging.WARNING):
        quarantine.add([Bad("a.png", "empty file"), Bad("a.png", "empty file")])
        quarantine.add([Bad("a.png", "empty file"), Bad("b.png", "not an image")])
    assert [record.getMessage() for record in caplog.records] == [
        "bad image a.png: empty file",
        "bad image b.png: not an image",
    ]
    with pytest.raises(
        UserError, match=r"3 images cannot be used, the last is c.png.*--bad_images"
    ):
        quarantine.add([Bad("c.png", "empty file")])


def test_links_in_a_circle_are_not_followed(root):
    for name in ("one", "two"):
        (root / "train/cat" / f"{name}.d").symlink_to(".")
    assert ImageFolder(root, "train", Options()).paths.count("train/cat/0.png") == 1


def test_a_named_pipe_is_a_bad_image(tmp_path):
    os.mkfifo(tmp_path / "0.png")
    for read in (read_image, size_of):
        with pytest.raises(BadImage, match="named pipe"):
            read(tmp_path / "0.png")


def bomb(path, side, depth, colour, *chunks):
    """A PNG of a few KB: square, of one colour."""

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    packer, row = zlib.compressobj(9), bytes(1 + side * depth // 8)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


@pytest.mark.parametrize("side", [6400, 13000])
def test_a_small_file_of_many_pixels_takes_little_memory(tmp_path, side):
    """One bit a pixel, with a palette of which a part is transparent: nine bytes each, then."""
    palette = [struct.pack(">I", 6) + b"PLTE" + bytes(6), struct.pack(">I", 1) + b"tRNS\0"]
    palette = [one + struct.pack(">I", zlib.crc32(one[4:])) for one in palette]
    path = bomb(tmp_path / "0.png", side, 1, 3, *palette)
    assert path.stat().st_size < 100_000
    said, most = measured(path, 1)
    assert re.fullmatch("its pixels take [0-9,]+ MiB, 280 MiB are taken at most: .*", said), said
    assert most < 50


def measured(path, factor):
    """What is said of an image, "" for one that is taken, and the memory that it took in MiB."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, path, str(factor)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    said, kilobytes = done.stdout.splitlines()
    return said, int(kilobytes) >> 10


SIDEWAYS = b"Exif\0\0II*\0" + struct.pack("<IHHHIII", 8, 1, decode.ORIENTATION, 3, 1, 6, 0)
# Sides of JPEGs, the factor by which they are drafted, and whether they are taken.
PHOTOGRAPHS = {
    "plain": ("RGB", 8400, 1, {}, True),
    "plain, larger": ("RGB", 9400, 1, {}, False),
    "drafted": ("RGB", 9400, 8, {}, True),
    "progressive": ("RGB", 6200, 1, {"progressive": True}, True),
    "progressive, larger": ("RGB", 6800, 1, {"progressive": True}, False),
    "progressive, drafted": ("RGB", 9400, 8, {"progressive": True}, True),
    "of four colours": ("CMYK", 9400, 8, {"progressive": True}, False),
    "turned": ("RGB", 5800, 1, {"exif": SIDEWAYS}, True),
    "turned, larger": ("RGB", 6400, 1, {"exif": SIDEWAYS}, False),
}


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_a_jpeg_of_many_pixels_takes_300_mib_or_is_refused(tmp_path, name):
    mode, side, factor, more, taken = PHOTOGRAPHS[name]
    said, most = measured(make(tmp_path / "0.jpg", (side, side), mode, **more), factor)
    assert (said == "") == taken and most < 300, (said, most)


def test_the_scans_of_a_jpeg_are_told_apart(tmp_path):
    """One scan of all components holds no coefficients; a scan of each holds them all."""
    whole = make(tmp_path / "0.jpg", (32, 32), subsampling=2).read_bytes()
    at = whole.index(b"\xff\xda")
    one = whole[: at + 2] + struct.pack(">HBBBBBB", 8, 1, 1, 0, 0, 63, 0) + whole[at + 14 :]
    held = [decode._coefficients(Image.open(io.BytesIO(content))) for content in (whole, one)]
    assert held == [0, 32 * 32 * 2 * 6 / 4]


def test_a_file_of_more_bytes_than_an_image_has_is_not_read(tmp_path):
    with (tmp_path / "0.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadImage, match="its file has more than 280 MiB: make it smaller"):
        read_image(tmp_path / "0.png")


# What is said of an image, and by how much reading it raised the most memory that was taken.
MEASURED = """
import re, sys
from pathlib import Path
from trainer.data.decode import BadImage, open_picture
most = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = most()
try:
    open_picture(Path(sys.argv[1])).pixels(int(sys.argv[2]))
    print()
except BadImage as error:
    print(error)
print(most() - before)
"""


def test_a_photograph_of_many_pixels_is_an_image(tmp_path):
    assert read_image(make(tmp_path / "0.jpg", (6400, 6400))).size == (6400, 6400)


def test_a_name_of_several_lines_is_said_in_one(root):
    (root / "train" / "new\nline\x1b").mkdir()
    with pytest.raises(UserError, match=r"new\\nline\\x1b has no images"):
        ImageFolder(root, "train", Options())


NAMES = (
    "cat", "ant", ".hidden", "..x", "a b", "new\nline", "\udcff", "\x1b]0;x\x07", "é" * 120,
    "x" * 255, "-rf", "~", "0.png", "x.JPEG", "y.gif", ".z.png", "notes.txt", "lost+found",
)  # fmt: skip
KINDS = (
    "image", "empty", "no image", "cut", "folder", "empty folder", "circle", "nowhere", "fails",
    "no file", "to an image", "many pixels", "grey16", "grey", "palette", "turned", "cut EXIF",
    "no EXIF", "progressive", "large",
)  # fmt: skip


# Reading /proc/self/mem at its beginning is EIO.
LINKS = {"circle": ".", "nowhere": "nowhere.png", "fails": "/proc/self/mem"}
DRAWN = {
    "grey16": ("I;16", "PNG", {}),
    "palette": ("P", "PNG", {"transparency": 0}),
    "grey": ("L", "PNG", {}),
    "turned": ("RGB", "JPEG", {"exif": SIDEWAYS}),
    "cut EXIF": ("RGB", "JPEG", {"exif": SIDEWAYS[:15]}),
    "progressive": ("RGB", "JPEG", {"progressive": True}),
    "no EXIF": ("RGB", "PNG", {"exif": b"Exif\0\0it says that it is"}),
}


def put(path, kind, good):
    """One entry of a data set; `good`: an image's bytes."""
    if kind in ("folder", "empty folder"):
        path.mkdir()
        if kind == "folder":
            (path / "1.png").write_bytes(good)
    elif kind in LINKS:
        path.symlink_to(LINKS[kind])
    elif kind == "no file":
        os.mkfifo(path)
    elif kind == "to an image":
        path.with_name("..target").write_bytes(good)
        path.symlink_to("..target")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "many pixels":
        bomb(path, 9000, 1, 0)
    elif kind in DRAWN:
        mode, form, more = DRAWN[kind]
        Image.new(mode, (8, 8)).save(path, form, **more)
    else:
        path.write_bytes({"image": good, "cut": good[:50], "no image": b"GIF89a"}.get(kind, b""))


def put_split(folder, classes, good):
    folder.mkdir(parents=True)
    for name, entries in classes.items():
        (folder / name).mkdir()
        for file, kind in (entries or {"1.png": "image"}).items():
            put(folder / name / file, kind, good)


def decoded(root, path):
    try:
        read_image(root / path)
        return "decoded"
    except BadImage as error:
        with pytest.raises(UserError) as raised:
            Quarantine(0).add([Bad(path, str(error))])
        assert "\n" not in str(raised.value)
        return "bad"


@pytest.mark.hypothesis
def test_odd_files_are_images_or_bad_ones(tmp_path, monkeypatch):
    pytest.importorskip("hypothesis")  # where the newest torch is tested
    from hypothesis import given
    from hypothesis import strategies as st

    from tests.fuzz import damaged, many

    monkeypatch.setattr(decode, "PAUSES", (0.0,))
    raw = {}
    for kind in ("turned", "palette", "grey16"):
        put(tmp_path / kind, kind, b"")
        raw[kind] = (tmp_path / kind).read_bytes()
    (tmp_path / "place").mkdir()
    path, ends = tmp_path / "place/0.png", {"decoded": 0, "bad": 0}

    @many(200)
    @given(st.sampled_from([*KINDS, "gone"]) | damaged(raw["turned"]) | damaged(raw["palette"]))
    def each(kind):
        shutil.rmtree(path.parent)
        path.parent.mkdir()
        if isinstance(kind, bytes):
            path.write_bytes(kind)
        elif kind != "gone":
            put(path, kind, raw["turned"])
        ends[decoded(tmp_path, "place/0.png")] += 1

    each()
    assert min(ends.values()) > 20, ends


@pytest.mark.hypothesis
def test_odd_folders_end_in_a_sentence_or_go_on(tmp_path, monkeypatch):
    """The trainer's listing and decoder, and the one that `make check` runs on each machine."""
    pytest.importorskip("hypothesis")  # where the newest torch is tested
    from hypothesis import given
    from hypothesis import strategies as st

    from launcher.machines.probes import machine
    from tests.fuzz import many

    monkeypatch.setattr(decode, "PAUSES", ())
    good = make(tmp_path / "good.png", (8, 8)).read_bytes()
    ends = {"listed": 0, "refused": 0, "decoded": 0, "bad": 0}
    named = st.sampled_from(("0.png", "1.jpg")) | st.sampled_from(NAMES)
    files = st.dictionaries(named, st.sampled_from(KINDS), max_size=4)

    @many(100)
    @given(
        st.tuples(*[st.dictionaries(st.sampled_from(NAMES), files, max_size=4)] * 2),
        st.sampled_from([("b", "d")] * 6 + [("b",), (), None, "elsewhere"]),
    )
    def each(splits, always):
        root = tmp_path / "odd"
        shutil.rmtree(root, ignore_errors=True)
        if always == "elsewhere":
            (root / "training").mkdir(parents=True)
        for split, found in zip(("train", "val"), splits if isinstance(always, tuple) else ()):
            put_split(root / split, {**{name: {} for name in always}, **found}, good)
        told = machine.data(str(root), tmp_path / "node")
        assert "\n" not in (told["problem"] or "")
        assert machine.data(str(root), tmp_path / "node") == told  # from what it kept
        assert machine.data(str(root / "none"), tmp_path / "node")["exists"] is False
        try:
            folder = ImageFolder(root, "train", Options())
        except UserError as error:
            ends["refused"] += 1
            assert told["problem"] or not told["exists"]
            assert "\n" not in str(error)
            return
        ends["listed"] += 1
        assert folder.sizes
        for path in folder.paths:
            ends[decoded(root, path)] += 1

    each()
    assert min(ends.values()) > 0, ends
