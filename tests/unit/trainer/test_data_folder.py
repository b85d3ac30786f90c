"""Folders of images, good and bad."""

import io
import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from contract.errors import UserError
from contract.options import Options
from tests.trainer_ranks import most_memory, run_ranks
from trainer.data import augment, decode
from trainer.data.decode import BadImage, open_picture, size_of
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


@pytest.mark.hypothesis
def test_classes_paths_and_targets_are_sorted(root):
    make(root / "train" / "ant" / "deeper" / "x.JPEG")
    (root / "train" / "ant" / "notes.txt").write_text("no image")
    (root / "train/cat/circle.d").symlink_to(".")
    folder = ImageFolder(root, "train", Options())
    assert folder.classes == ["ant", "cat"]
    assert folder.paths[3:5] == ["train/ant/deeper/x.JPEG", "train/cat/0.png"]
    assert folder.targets == [0, 0, 0, 0, 1, 1, 1]
    assert folder.paths == sorted(folder.paths)
    make(root / "train/bee/0.png")
    assert ImageFolder(root, "val", Options()).targets == [0, 0, 0, 2, 2, 2]
    make(root / "val/dog/0.png")
    with pytest.raises(UserError, match=r"val/dog is a class, but .*train does not have it"):
        ImageFolder(root, "val", Options())


def test_a_folder_without_permission_is_named(root, monkeypatch):
    # Not by chmod: tests also run as root, to whom every folder is open.
    scandir, closed = os.scandir, root / "val/cat"

    def guarded(folder):
        # `rmtree`, by which pytest removes old folders, gives a descriptor.
        if not isinstance(folder, int) and Path(folder) == closed:
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", guarded)
    with pytest.raises(UserError, match=f"cannot read {closed}: Permission denied"):
        ImageFolder(root, "val", Options())


@pytest.mark.hypothesis
def test_a_folder_without_classes_or_with_one_is_explained(root):
    """What else is wrong: tests/unit/launcher/test_probe.py."""
    flat = make(root / "flat/train/0.png").parents[1]
    with pytest.raises(UserError, match="one file, but no class folders"):
        ImageFolder(flat, "train", Options())
    shutil.rmtree(root / "train/ant")
    with pytest.raises(UserError, match="has one class, cat: a classifier"):
        ImageFolder(root, "train", Options())


@pytest.mark.hypothesis
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
        ({"image_size": 176, "eval_size": 224, "eval_resize": 232}, 500, Sizes(176, 224, 232)),
    ],
)
def test_sizes(options, natural, sizes):
    assert image_sizes(Options(**options), natural) == sizes


@pytest.mark.parametrize("mode", ["1", "P", "RGBA", "CMYK"])
@pytest.mark.hypothesis
def test_eight_bit_images_become_rgb_as_pillow_makes_it(tmp_path, mode):
    """Whatever its name says that it is."""
    form = "JPEG" if mode == "CMYK" else "PNG"
    path = make(tmp_path / "a.jpg", mode=mode, format=form)
    image = open_picture(path).pixels()
    assert (image.mode, image.size, size_of(path)) == ("RGB", (40, 30), (40, 30))
    with Image.open(path) as theirs:
        assert image.tobytes() == theirs.convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("orientation", "suffix"),
    [*((n, "jpg") for n in range(1, 9)), *((6, end) for end in ("png", "tif", "webp"))],
)
def test_images_stand_as_the_camera_was_held(tmp_path, orientation, suffix):
    """One corner is white; where a viewer shows it is where training finds it."""
    image, exif = Image.new("RGB", (16, 8)), Image.Exif()
    image.paste((255, 255, 255), (0, 0, 4, 4))
    exif[0x0112] = orientation
    image.save(tmp_path / f"a.{suffix}", exif=exif)
    shown = open_picture(tmp_path / f"a.{suffix}").pixels()
    right, below = orientation in (2, 3, 6, 7), orientation in (3, 4, 7, 8)
    assert shown.size == ((16, 8) if orientation < 5 else (8, 16))
    corner = ((shown.width - 1) * right, (shown.height - 1) * below)
    assert min(shown.getpixel(corner)) > 200
    assert max(shown.getpixel((shown.width - 1 - corner[0], corner[1]))) < 50


NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)


def jpeg(picture):
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (jpeg(Image.fromarray(NOISE))[:-900], "damaged: .*truncated"),
        (b"", "empty file"),
        (b"hello", "not an image"),
        (b"\0\0\0\x1cftypavif" + bytes(99), "AVIF, a format that Tandem cannot read: convert it"),
        ("grey16", "pixels are I;16, not 8-bit"),
        ("nowhere", "cannot be read: No such file"),
        ("no file", "named pipe"),
        ("large", "its file has more than 280 MiB: make it smaller"),
    ],
)
@pytest.mark.hypothesis
def test_each_kind_of_bad_image_has_its_reason(tmp_path, kind, reason):
    path = tmp_path / "a.png"
    put(path, kind, b"")
    with pytest.raises(BadImage, match=reason):
        open_picture(path).pixels()
    if kind in (b"hello", "no file"):
        with pytest.raises(BadImage, match=reason):
            size_of(path)


@pytest.mark.parametrize("kind", ["text", "profile"])
def test_a_png_with_much_beside_its_pixels_is_read(tmp_path, kind):
    """As editors write them, who keep all their history."""
    more, info = {}, PngInfo()
    if kind == "profile":
        more["icc_profile"] = bytes(3 << 20)
    info.add_text("history", "x" * (3 << 20) * (kind != "profile"), zip=kind == "text")
    path = make(tmp_path / "0.png", pnginfo=info, **more)
    assert size_of(path) == (40, 30) and open_picture(path).pixels().size == (40, 30)


def test_it_is_said_where_no_image_gives_the_size(root, caplog):
    for path in root.glob("train/*/*.png"):
        path.write_bytes(b"\0\0\0\x1cftypavif")
    assert ImageFolder(root, "train", Options()).natural_size() == 224
    assert "uses 224" in caplog.text


def bomb(side, depth, colour, *chunks):
    """A PNG of a few KB: square, of one colour."""

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    packer, row = zlib.compressobj(9), bytes(1 + side * depth // 8)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def with_palette(side):
    """One bit a pixel, with a palette of which a part is transparent: nine bytes each, then."""
    palette = [struct.pack(">I", 6) + b"PLTE" + bytes(6), struct.pack(">I", 1) + b"tRNS\0"]
    return bomb(side, 1, 3, *(one + struct.pack(">I", zlib.crc32(one[4:])) for one in palette))


def tiff(compression, tags, behind=()):
    """A TIFF whose one tile or strip does not have all bytes. `behind`: tags with a number of
    another type, which is behind all others."""
    content = zlib.compress(bytes(1000))
    tags = {258: 8, 259: compression, 262: 1, 277: 1, **tags}
    place, length = (324, 325) if 322 in tags else (273, 279)
    tags = dict(
        sorted({**tags, place: 8 + 2 + 12 * (len(tags) + 2) + 4, length: len(content)}.items())
    )
    there = tags[place] + len(content)
    rows = b"".join(
        struct.pack("<HHII", tag, 17, 1, there)
        if tag in behind
        else struct.pack("<HHII", tag, 4, 1, value)
        for tag, value in tags.items()
    )
    head = struct.pack("<4sIH", b"II*\0", 8, len(tags))
    return head + rows + bytes(4) + content + struct.pack("<Q", 20000)


def webp(side, **more):
    content = io.BytesIO()
    Image.new("RGB", (side, side)).save(content, "WEBP", method=0, **more)
    return content.getvalue()


def wide_canvas(content, side):
    """An animated WebP of a few pixels that says that it is as large as this."""
    at = content.index(b"VP8X") + 12
    return content[:at] + 2 * (side - 1).to_bytes(3, "little") + content[at + 6 :]


MOVING = {"save_all": True, "append_images": [Image.new("RGB", (64, 64), "red")]}
LARGE = {
    "a PNG's palette": lambda: with_palette(6400),
    "a PNG's palette, larger": lambda: with_palette(13000),
    "a TIFF's tile": lambda: tiff(8, {256: 64, 257: 64, 322: 40000, 323: 40000}),
    "a TIFF's tile, which libtiff alone finds": lambda: tiff(
        8, {256: 64, 257: 64, 322: 1, 323: 1}, (322, 323)
    ),
    "a TIFF's strip that has no end": lambda: tiff(8, {256: 7200, 257: 7200, 278: 0xFFFFFFFF}),
    "a PPM of few levels": lambda: b"P6 5600 5600 100\n",
    "a WebP": lambda: webp(6000, lossless=True),
    "frames of a WebP": lambda: wide_canvas(webp(64, **MOVING), 6000),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(n, marks=pytest.mark.long) if "larger" in n else n for n in LARGE]
)
def test_a_small_file_of_many_pixels_takes_little_memory(tmp_path, kind):
    """What its decoder holds beside the pixels counts."""
    path = tmp_path / "0.img"
    path.write_bytes(LARGE[kind]())
    assert path.stat().st_size < 100_000
    [(said, most)] = run_ranks([1], measured, path, 1)
    assert re.match("its pixels need [0-9,]+ MiB, the limit is 280 MiB: |damaged", said), said
    assert most < 50


def measured(path, factor):
    """In a process of its own: what is said of an image, "" for one that is taken, and by how much
    reading it raised the most memory that was taken, in MiB."""
    before, reason = most_memory(), ""
    try:
        decode.open_picture(path).pixels(factor)
    except BadImage as error:
        reason = str(error)
    return reason, most_memory() - before


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
QUICK = ("progressive, larger", "turned, larger")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in PHOTOGRAPHS]
)
def test_a_jpeg_of_many_pixels_takes_300_mib_or_is_refused(tmp_path, name):
    mode, side, factor, more, taken = PHOTOGRAPHS[name]
    path = make(tmp_path / "0.jpg", (side, side), mode, **more)
    [(said, most)] = run_ranks([1], measured, path, factor)
    assert (said == "") == taken and most < 300, (said, most)


def crop_memory(path, kind):
    """The same of a crop of nearly all of it, or of an evaluation."""
    augment.random_box = lambda size, *_: (1, 1, size[0] - 1, size[1] - 1)
    for small in (path.with_name("small.png"), path):
        before, picture = most_memory(), decode.open_picture(small)
        if kind == "crop":
            augment.random_crop(picture, 32, None)
        else:
            augment.center_crop(picture.pixels(), 32, 32)
    return most_memory() - before


@pytest.mark.parametrize(
    "kind, name, size",
    [
        ("crop", "0.png", (5000, 5000)),
        pytest.param("crop", "0.jpg", (8400, 8400), marks=pytest.mark.long),
        pytest.param("evaluation", "0.png", (25000, 2500), marks=pytest.mark.long),
    ],
)
def test_a_crop_of_many_pixels_takes_300_mib(tmp_path, kind, name, size):
    make(tmp_path / "small.png")
    assert run_ranks([1], crop_memory, make(tmp_path / name, size), kind)[0] < 300


@pytest.mark.hypothesis
def test_the_scans_of_a_jpeg_are_told_apart(tmp_path):
    """One scan of all components holds no coefficients; a scan of each holds them all."""
    whole = make(tmp_path / "0.jpg", (32, 32), subsampling=2).read_bytes()
    at = whole.index(b"\xff\xda")
    one = whole[: at + 2] + struct.pack(">HBBBBBB", 8, 1, 1, 0, 0, 63, 0) + whole[at + 14 :]
    held = [decode._coefficient_bytes(Image.open(io.BytesIO(content))) for content in (whole, one)]
    assert held == [0, 32 * 32 * 2 * 6 / 4]


NAMES = (
    "cat", "ant", ".hidden", "..x", "a b", "new\nline", "\udcff", "\x1b]0;x\x07", "é" * 120,
    "x" * 255, "-rf", "~", "0.png", "x.JPEG", "y.gif", ".z.png", "notes.txt", "lost+found",
)  # fmt: skip
KINDS = (
    "image", "empty", "no image", "folder", "empty folder", "circle", "nowhere", "fails",
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
    """One entry of a data set, or its bytes; `good`: an image's bytes."""
    if isinstance(kind, bytes):
        path.write_bytes(kind)
    elif kind in ("folder", "empty folder"):
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
        path.write_bytes(bomb(9000, 1, 0))
    elif kind in DRAWN:
        mode, form, more = DRAWN[kind]
        Image.new(mode, (8, 8)).save(path, form, **more)
    else:
        path.write_bytes({"image": good, "no image": b"GIF89a"}.get(kind, b""))


def put_split(folder, classes, good):
    folder.mkdir(parents=True)
    for name, entries in classes.items():
        (folder / name).mkdir()
        for file, kind in (entries or {"1.png": "image"}).items():
            put(folder / name / file, kind, good)


def decoded(root, path):
    try:
        open_picture(root / path).pixels()
        return "decoded"
    except BadImage as error:
        with pytest.raises(UserError) as raised:
            Quarantine(0).add([Bad(path, str(error))])
        assert "\n" not in str(raised.value)
        return "bad"


@pytest.mark.hypothesis
def test_odd_folders_end_in_a_sentence_or_go_on(tmp_path, monkeypatch):
    """The trainer's listing and decoder, and the one that `make check` runs on each machine."""
    pytest.importorskip("hypothesis")  # where the newest torch is tested
    from hypothesis import given
    from hypothesis import strategies as st

    from launcher.node import probe as machine
    from tests.fuzz import damaged, many

    monkeypatch.setattr(decode, "PAUSES", ())
    good = make(tmp_path / "good.png", (8, 8)).read_bytes()
    turned = make(tmp_path / "turned.jpg", (8, 8), exif=SIDEWAYS).read_bytes()
    ends = {"listed": 0, "refused": 0, "decoded": 0, "bad": 0}
    named = st.sampled_from(("0.png", "1.jpg")) | st.sampled_from(NAMES)
    kinds = st.sampled_from(KINDS) | damaged(good) | damaged(turned)
    files = st.dictionaries(named, kinds, max_size=4)

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
        told = machine.describe_data_set(str(root), "images", tmp_path / "node")
        assert "\n" not in (told["problem"] or "")
        assert (
            machine.describe_data_set(str(root), "images", tmp_path / "node") == told
        )  # from what it kept
        assert (
            machine.describe_data_set(str(root / "none"), "images", tmp_path / "node")["exists"]
            is False
        )
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


def put_into_lfs(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 48213\n")


def put_into_annex(path):
    path.write_text("/annex/objects/SHA256E-s664--39cb.jpg\n")


def link_into_annex(path):
    path.unlink()
    path.symlink_to(
        "../../../.git/annex/objects/M6/0w/SHA256E-s664--39cb.jpg/SHA256E-s664--39cb.jpg"
    )


def link_into_dvc(path):
    path.unlink()
    path.symlink_to("/mnt/cache/files/md5/ab/cdef")


def put_into_dvc(path):
    path.with_name(path.name + ".dvc").write_text("outs:\n- md5: 39cb\n")
    shutil.rmtree(path) if path.is_dir() else path.unlink()


# Stands for git-lfs, git-annex and dvc: within the clone, their commands bring the images.
FETCHES = """#!/bin/sh
case "$PWD $1" in
"$CLONE pull" | "$CLONE get") cp -rT --remove-destination "$ORIGINALS" "$CLONE/data" ;;
esac
"""


@pytest.mark.parametrize(
    ("hide", "pattern"),
    [
        *((put, "*/*/*.png") for put in (put_into_lfs, put_into_annex, link_into_annex)),
        *((link_into_dvc, "*/*/*.png"), (put_into_dvc, "*/*/*.png"), (put_into_dvc, "../data")),
    ],
)
def test_images_that_were_not_fetched_yet_are_refused_with_the_command(
    root, tmp_path_factory, monkeypatch, hide, pattern
):
    """The command is run by a shell."""
    clone, tools = tmp_path_factory.mktemp("a clone"), tmp_path_factory.mktemp("tools")
    for name in ("git-lfs", "git-annex", "dvc"):
        (tools / name).write_text(FETCHES)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("CLONE", str(clone))
    monkeypatch.setenv("ORIGINALS", str(root))
    shutil.copytree(root, clone / "data")
    for path in [*(clone / "data").glob(pattern)]:
        hide(path.parent.resolve() / path.name)

    def use():
        ImageFolder(str(clone / "data"), "train", Options()).refuse_if_unusable(rank=0)

    with pytest.raises(UserError) as refused:
        use()
    command = str(refused.value).split("`")[1]
    subprocess.run(["sh", "-c", command], check=True, cwd=clone)
    use()


def test_a_split_of_which_few_images_can_be_used_is_taken(root):
    for path in root.glob("train/*/*.png"):
        path.write_bytes(b"no image")
    folder = ImageFolder(root, "train", Options())
    with pytest.raises(UserError, match=r"train has 6 images. Tandem opened 6 of them, .* 6 x not"):
        folder.refuse_if_unusable(rank=3)
    make(root / "train/ant/1.png")
    folder.refuse_if_unusable(rank=3)
