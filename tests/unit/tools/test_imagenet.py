"""`make imagenet` on archives of the official layout that the tests make."""

import gzip
import io
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy
import pytest
from PIL import Image
from scipy.io import savemat

from tools import imagenet

ROOT = Path(__file__).parents[3]
CLASSES = ["n01440764", "n01443537", "n02084071"]
IMAGES = 4  # of each class, and of val: two a class


def tar(files: dict[str, bytes], mode: str = "w") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=tarfile.USTAR_FORMAT) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def meta() -> bytes:
    """As in the devkit: the classes, and above them a synset that has children."""
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"),
             ("num_children", "O")]  # fmt: skip
    rows = [(number, wnid, "a, b", "gloss", 0) for number, wnid in enumerate(CLASSES, 1)]
    rows.append((len(rows) + 1, "n00001740", "entity", "gloss", 3))
    stream = io.BytesIO()
    savemat(stream, {"synsets": numpy.array(rows, dtype=kinds)})
    return stream.getvalue()


def image(name: str) -> bytes:
    chance = random.Random(name)
    return chance.randbytes(chance.randrange(1, 3000))


def expected() -> dict[str, bytes]:
    """Every file that there must be in the end."""
    files = {}
    for number, wnid in enumerate(CLASSES):
        for index in range(IMAGES):
            files[f"train/{wnid}/{wnid}_{index}.JPEG"] = image(f"{wnid}_{index}")
        for index in (number + 1, number + 1 + len(CLASSES)):
            name = f"ILSVRC2012_val_{index:08}.JPEG"
            files[f"val/{wnid}/{name}"] = image(name)
    return files


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "archives"
    folder.mkdir()
    files = {Path(path).name: content for path, content in expected().items()}
    val = {name: content for name, content in files.items() if "_val_" in name}
    classes = {
        f"{wnid}.tar": tar({name: files[name] for name in files if name.startswith(wnid)})
        for wnid in CLASSES
    }
    truth = "".join(f"{number}\n" for number in [1, 2, 3, 1, 2, 3]).encode()
    devkit = {
        "ILSVRC2012_devkit_t12/readme.txt": b"",
        "ILSVRC2012_devkit_t12/data/meta.mat": meta(),
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": truth,
    }
    (folder / imagenet.TRAIN).write_bytes(tar(classes))
    (folder / imagenet.VAL).write_bytes(tar(val))
    (folder / imagenet.DEVKIT).write_bytes(tar(devkit, "w:gz"))
    return folder


def found(target: Path) -> dict[str, bytes]:
    paths = (path for part in ("train", "val") for path in (target / part).rglob("*"))
    return {str(path.relative_to(target)): path.read_bytes() for path in paths if path.is_file()}


def run(source: Path, target: Path) -> int:
    return imagenet.main(["--src", str(source), "--to", str(target)])


def test_archives_become_class_folders_and_a_second_run_reads_none_whole(
    source, tmp_path, capsys, monkeypatch
):
    assert run(source, tmp_path / "to") == 0
    assert found(tmp_path / "to") == expected()
    printed = capsys.readouterr()
    assert f"{tmp_path}/to/train: 3 classes, 12 images\n" in printed.out
    assert f"{tmp_path}/to/val: 3 classes, 6 images\n" in printed.out
    assert printed.err.count("is not the official archive: its MD5 is") == 3
    for module, name in ((imagenet, "_copy"), (imagenet.hashlib, "md5")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("work is done again"))
    assert run(source, tmp_path / "to") == 0


def sparse(name: str, size: int) -> bytes:
    """A member of `size` bytes of which the archive has none."""
    info = tarfile.TarInfo(name)
    info.size, info.type = 0, tarfile.GNUTYPE_SPARSE
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[386:410] = b"%011o\0%011o\0" % (size, 0)  # its one piece, at the end
    head[483:495] = b"%011o\0" % size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + bytes(1024)


def with_meta(content: bytes) -> bytes:
    return tar({"meta.mat": content, "ILSVRC2012_validation_ground_truth.txt": b"1\n"}, "w:gz")


def of_matlab(size: int) -> bytes:
    """The beginning of a meta.mat whose one part unpacks to so many zeros."""
    part = zlib.compress(bytes(size))
    return bytes(124) + b"\0\1IM" + struct.pack("<II", imagenet.COMPRESSED, len(part)) + part


def long_name(size: int) -> bytes:
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, size
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(size))


LARGE = {
    "a class's tar": (
        "train", lambda: tar({f"{one}.tar": sparse("x.JPEG", 2**31) for one in CLASSES}),
    ),
    "an image": ("val", lambda: sparse("ILSVRC2012_val_00000001.JPEG", 2**31)),
    "a file of the devkit": ("devkit", lambda: gzip.compress(sparse("meta.mat", 2**31))),
    "its unpacked size": ("devkit", lambda: with_meta(bytes(50 << 20))),
    "a name in it": ("devkit", lambda: long_name(50 << 20)),
    "a part of meta.mat": ("devkit", lambda: with_meta(of_matlab(50 << 20))),
}  # fmt: skip


@pytest.mark.parametrize("what", LARGE)
def test_a_small_archive_fills_neither_disk_nor_memory(source, tmp_path, capsys, monkeypatch, what):
    which, content = LARGE[what]
    monkeypatch.setattr(imagenet, "MAX_UNPACKED_BYTES", 16 << 20)
    name = {"train": imagenet.TRAIN, "val": imagenet.VAL, "devkit": imagenet.DEVKIT}[which]
    (source / name).write_bytes(content())
    if which == "val":  # one image is all that there is to be
        monkeypatch.setattr(imagenet, "read_devkit", lambda _: ({1: CLASSES[0]}, [1]))
        (source / imagenet.TRAIN).write_bytes(tar({f"{CLASSES[0]}.tar": tar({"a.JPEG": b"a"})}))
    tracemalloc.start()
    assert run(source, tmp_path / "to") == 2
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "Traceback" not in capsys.readouterr().err
    assert most < 3 * imagenet.MAX_UNPACKED_BYTES
    written = sum(path.stat().st_size for path in tmp_path.rglob("to/**/*.JPEG"))
    assert written < 1000


@pytest.mark.parametrize("wnid", ["../../out", "n1"])
def test_no_class_is_a_path(source, tmp_path, capsys, monkeypatch, wnid):
    monkeypatch.setattr(sys.modules[__name__], "CLASSES", [wnid, *CLASSES[1:]])
    truth = {"ILSVRC2012_validation_ground_truth.txt": b"1\n", "meta.mat": meta()}
    (source / imagenet.DEVKIT).write_bytes(tar(truth, "w:gz"))
    classes = {f"{one}.tar": tar({"a.JPEG": b"a"}) for one in CLASSES}
    (source / imagenet.TRAIN).write_bytes(tar(classes))
    (source / imagenet.VAL).write_bytes(tar({"ILSVRC2012_val_00000001.JPEG": b"a"}))
    assert run(source, tmp_path / "to") == 2
    assert repr(wnid) in capsys.readouterr().err and not (tmp_path / "out").exists()


# The program that a test kills: itself, as a power cut would, when it has renamed `count` folders
# or copied `count` images.
KILLED = """
import os, signal, sys
from tools import imagenet
copy, left = imagenet._copy, [int(sys.argv[3])]
def copy_or_die(file, path, size):
    if not left[0]:
        path.write_bytes(file.read(size // 2))
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    copy(file, path, size)
imagenet._copy = copy_or_die
imagenet.main(["--src", sys.argv[1], "--to", sys.argv[2]])
"""


@pytest.mark.parametrize("copied", [6, 15])
def test_after_a_kill_the_same_command_goes_on(source, tmp_path, copied):
    target = tmp_path / "to"
    argv = [sys.executable, "-c", KILLED, source, target, str(copied)]
    killed = subprocess.run(argv, cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    whole = {
        path: path.stat().st_mtime_ns
        for wnid in CLASSES[: copied // IMAGES]
        for path in (target / "train" / wnid).iterdir()
    }
    assert len(whole) == min(copied // IMAGES * IMAGES, 12)
    assert not (target / "val").exists()
    assert run(source, target) == 0
    assert found(target) == expected()
    assert {path: path.stat().st_mtime_ns for path in whole} == whole
    assert sorted(path.name for path in target.iterdir()) == [".archives.json", "train", "val"]
    assert sorted(path.name for path in (target / "train").iterdir()) == CLASSES


@pytest.fixture
def photographs(monkeypatch):
    """In the archives, in the place of bytes that are no images; but one of val."""

    def photograph(name: str) -> bytes:
        if name == "ILSVRC2012_val_00000002.JPEG":
            return b"no image"
        stream, noise = io.BytesIO(), random.Random(name).randbytes(90 * 70 * 3)
        Image.frombytes("RGB", (90, 70), noise).save(stream, "JPEG")
        return stream.getvalue()

    monkeypatch.setattr(sys.modules[__name__], "image", photograph)


def test_images_become_smaller_on_their_way_and_none_is_broken_by_a_kill(
    photographs, source, tmp_path, capsys
):
    target, words = tmp_path / "to", ["--src", source, "--to", tmp_path / "to"]
    code = "import sys; from tools import imagenet; sys.exit(imagenet.main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, *words, "--size", "32"]

    def whole():
        """Those that are there; os.walk passes over what is renamed meanwhile."""
        for folder, _, names in os.walk(target):
            yield from (Path(folder, name) for name in names if re.match(r"[^.].*\.JPEG$", name))

    def sizes():
        for path in whole():
            if path.stat().st_size > 8:
                with Image.open(path) as copy:
                    copy.load()
                    yield copy.size

    for count in (1, 5):
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL)
        while len(list(whole())) < count:
            assert process.poll() is None
            time.sleep(0.002)
        process.kill()
        process.wait()
        assert set(sizes()) == {(41, 32)} and not (target / "val").exists()
    assert imagenet.main([str(word) for word in [*words, "--size", "16"]]) == 2
    assert imagenet.main([str(word) for word in [*words, "--size", "32"]]) == 0
    assert "1 files are no images" in capsys.readouterr().err
    assert sorted(found(target)) == sorted(expected())
    assert list(sizes()) == 17 * [(41, 32)]
    assert not list(target.rglob("*.part"))


def refused(source, tmp_path, capsys) -> str:
    assert run(source, tmp_path / "to") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("tandem: ") and "Traceback" not in printed
    assert not list(tmp_path.rglob("outside*"))
    return printed


def test_all_missing_archives_are_named_at_once(source, tmp_path, capsys):
    (source / imagenet.TRAIN).unlink()
    (source / imagenet.DEVKIT).unlink()
    said = refused(source, tmp_path, capsys)
    assert f"lacks {imagenet.TRAIN}, {imagenet.DEVKIT}. Download them" in said
    assert not (tmp_path / "to").exists()


OUTSIDE = {f"{wnid}.tar": tar({"../outside.JPEG": b"x"}) for wnid in CLASSES}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (imagenet.TRAIN, None, f"{imagenet.TRAIN} cannot be read to its end"),
        (
            imagenet.DEVKIT,
            gzip.compress(tar({"readme.txt": b""}), mtime=0),
            "has no meta.mat and no ILSVRC",
        ),
        (imagenet.VAL, tar({"ILSVRC2012_val_00000001.JPEG": b"x"}), "00000004.JPEG and 2 more"),
        (imagenet.TRAIN, tar(OUTSIDE), "'../outside.JPEG', which is not an image"),
    ],
)
def test_half_an_archive_or_another_one_is_named(source, tmp_path, capsys, name, content, said):
    path = source / name
    path.write_bytes(content or path.read_bytes()[: path.stat().st_size // 2])
    assert said in refused(source, tmp_path, capsys)


def test_a_disk_that_is_too_small_is_named_before_anything_is_copied(
    source, tmp_path, capsys, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "choose a folder on another disk" in refused(source, tmp_path, capsys)
    assert list((tmp_path / "to").iterdir()) == []


def test_without_a_source_it_says_what_to_type(capsys):
    assert imagenet.main([]) == 2
    assert "make imagenet SRC=" in capsys.readouterr().err
