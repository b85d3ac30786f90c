"""`make shrink` on images that the tests make, killed and whole."""

import errno
import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from contract.errors import UserError
from tools import shrink

SHAPE = shrink.Shape(32, 90)


def make(path: Path, size: tuple[int, int], **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = random.Random(str(path)).randbytes(size[0] * size[1] * 3)
    Image.frombytes("RGB", size, noise).save(path, **options)


@pytest.fixture
def source(tmp_path) -> Path:
    root = tmp_path / "photos"
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            for number in range(20):
                make(root / f"{split}/{label}/{number}.jpg", (90, 70))
    return root


def sizes(root: Path) -> dict[str, tuple[int, int]]:
    """Of all images, which are decoded whole."""
    found = {}
    for path in root.rglob("*.*"):
        hidden = path.name.startswith(".")  # that grow
        if path.is_file() and not hidden and path.name not in (shrink.SETTINGS, "no.jpg"):
            with Image.open(path) as image:
                image.load()
                found[str(path.relative_to(root))] = image.size
    return found


def test_each_image_has_a_copy_that_is_no_larger_than_asked_for(source, tmp_path, capfd):
    turned = Image.Exif()
    turned[0x0112] = 6  # held upright
    make(source / "train/cat/upright.jpg", (640, 320), exif=turned)
    make(source / "train/cat/drawing.png", (40, 50))
    make(source / "train/cat/small.png", (32, 200))
    make(source / "train/dog/deep/er.JPEG", (33, 33))
    (source / "val/dog/no.jpg").write_text("no image")
    (source / "train/dog/linked.jpg").symlink_to(source / "val/dog/0.jpg")
    shrink.run(source, tmp_path / "to", SHAPE)
    copies = sizes(tmp_path / "to")
    assert len(copies) == 4 * 20 + 5
    assert copies["train/cat/upright.jpg"] == (32, 64)
    assert copies["train/cat/drawing.png.jpg"] == (32, 40)
    assert copies["train/dog/deep/er.JPEG"] == (32, 32)
    assert copies["train/dog/linked.jpg"] == copies["val/cat/7.jpg"] == (41, 32)
    small, no = "train/cat/small.png", "val/dog/no.jpg"
    for path in (small, no):
        assert (tmp_path / "to" / path).read_bytes() == (source / path).read_bytes()
    said = capfd.readouterr().err
    assert no in said and small not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos", "to"]
    with pytest.raises(UserError):
        shrink.run(source, tmp_path / "to", SHAPE)


def test_what_is_killed_leaves_no_broken_image_and_continues(source, tmp_path):
    part, target = tmp_path / "to.part", tmp_path / "to"
    code = "import sys; from pathlib import Path; from tools.shrink import run, Shape; "
    code += f"run(Path(sys.argv[1]), Path(sys.argv[2]), Shape{tuple(SHAPE)})"
    for count in (1, 60):
        process = subprocess.Popen([sys.executable, "-c", code, source, target])
        while len(list(part.rglob("*.jpg"))) < count:
            assert process.poll() is None
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with (part / shrink.SETTINGS).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # its workers have ended
        there = set(sizes(part).values())
        assert there == {(41, 32)} and not target.exists()
        with pytest.raises(UserError):  # of another size
            shrink.run(source, target, shrink.Shape(16, 90))
    before = {path: path.stat().st_mtime_ns for path in part.rglob("[0-9]*.jpg")}
    shrink.run(source, target, SHAPE)
    assert len(sizes(target)) == 80
    kept = [(target / path.relative_to(part)).stat().st_mtime_ns for path in before]
    assert kept == list(before.values())


def test_a_full_disk_is_said_with_its_folder_and_leaves_nothing_half_written(
    source, tmp_path, monkeypatch
):
    def fill(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill)  # which workers have that are forked
    forked = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("fork"))
    monkeypatch.setattr(shrink, "ProcessPoolExecutor", forked)
    with pytest.raises(UserError, match=f"{tmp_path}/to.part: No space left on device"):
        shrink.run(source, tmp_path / "to", SHAPE)
    assert not list(tmp_path.rglob("*.jpg.part")) and not (tmp_path / "to").exists()
