"""What counts as an image of a data set, and what is said of the rest."""

import contextlib
import os
import shlex
import subprocess

import pytest

from contract import layout
from contract.layout import LayoutError, read_split

USUAL = ("train/ant/0.jpg", "train/cat/0.jpg", "val/ant/0.jpg")


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"?")
    return root


@pytest.mark.parametrize(
    ("names", "images", "unread"),
    [
        (["train/@eaDir/ant/t.jpg"], 0, {"in @eaDir": 1}),
        (["train/ant/@eaDir/0.jpg/SYNO.jpg", "train/ant/@eaDir/1.jpg/S.jpg"], 0, {"in @eaDir": 2}),
        (["train/ant/.ipynb_checkpoints/0.jpg"], 0, {"in .ipynb_checkpoints": 1}),
        (["train/#recycle/0.jpg", "train/cat/deep/lost+found/0.jpg"], 0,
         {"in #recycle": 1, "in lost+found": 1}),
        (["train/ant/1.jfif", "train/ant/1.JPE", "train/ant/deep/2.jpg"], 3, {}),
        (["train/ant/1.avif", "train/cat/1.AVIF", "train/cat/b"], 0,
         {".avif": 2, "without a suffix": 1}),
        (["train/ant/.1.jpg", "train/0.jpg"], 0, {"hidden": 1, "beside the classes": 1}),
        (["train/@eaDir.d/1.jpg"], 1, {}),  # a class, by its own name
    ],
)  # fmt: skip
def test_each_file_is_an_image_or_is_counted(tmp_path, names, images, unread):
    read = read_split(write(tmp_path, *USUAL, *names), "train")
    assert sum(map(len, read.images.values())) == 2 + images
    assert read.skipped == unread
    assert read.note("train") == "; ".join(
        ["Tandem skips these files in train: " + ", ".join(f"{count} {kind}" for kind, count in
         sorted(unread.items(), key=lambda one: (-one[1], one[0])))] * bool(unread)
    )  # fmt: skip


def test_a_class_with_nothing_that_is_read_is_refused_with_what_it_has(tmp_path):
    write(tmp_path, *USUAL, "train/bee/0.avif", "train/bee/1.avif")
    with pytest.raises(LayoutError, match=r"train/bee has no images .*but 2 \.avif"):
        read_split(tmp_path, "train")


def test_links_are_followed_and_those_that_lead_nowhere_are_no_images(tmp_path):
    """ImageNet-100, as links into the full set, by folders and by files."""
    write(tmp_path / "full", "n1/0.jpg", "n1/1.jpg", "n2/0.jpg")
    root = write(tmp_path / "data", *USUAL)
    (root / "train/n1").symlink_to("../../full/n1")
    (root / "train/ant/1.jpg").symlink_to(tmp_path / "full/n2/0.jpg")
    (root / "train/ant/2.jpg").symlink_to("2.jpg")
    (root / "train/ant/3.jpg").symlink_to("/mnt/gone/3.jpg")
    (root / "train/ant/round").symlink_to("..")
    read = read_split(root, "train")
    assert [len(paths) for paths in read.images.values()] == [2, 1, 2]
    assert (
        read.note("train") == "Tandem skips these files in train: 3 links that cannot be followed"
    )
    (root / "train/n2").symlink_to("/mnt/gone/n2")
    with pytest.raises(LayoutError, match=r"train/n2 is a link .*\(to /mnt/gone/n2\)"):
        read_split(root, "train")


@pytest.mark.parametrize(
    ("train", "val", "differ"),
    [
        ("\u00c4pfel", "A\u0308pfel", "accents"),
        ("dog ", "dog", "blanks"),
        ("Tabby", "tabby", "capitals"),
        ("it's \u00e9", "it's e\u0301", "accents"),
        ("a\u00a0b", "a b", "blanks"),
        ("\uff21b", "Ab", "look equal"),
    ],
)
def test_a_class_whose_name_only_looks_the_same_is_said_with_its_cure(tmp_path, train, val, differ):
    write(tmp_path, *USUAL, f"train/{train}/0.jpg", f"val/{val}/0.jpg")
    with pytest.raises(LayoutError) as refused:
        read_split(tmp_path, "val")
    text, command, _ = str(refused.value).split("`")
    assert differ in text
    subprocess.run(["bash", "-c", command], check=True)
    assert [*read_split(tmp_path, "val").images] == sorted(["ant", "cat", train])


def test_two_classes_that_look_the_same_are_said(tmp_path):
    write(tmp_path, *USUAL, "train/Cat/0.jpg")
    note = read_split(tmp_path, "train").note("train")
    assert note == "Cat and cat are different classes: they differ in capitals"


def test_names_that_are_quoted_are_read_by_bash(tmp_path):
    for name in ("a b", "it's", "\\", "new\nline", os.fsdecode(b"caf\xe9"), "\u00e9'\\", "-x"):
        printed = subprocess.run(
            ["bash", "-c", f"printf %s {layout._quote_for_bash(name)}"],
            capture_output=True,
            check=True,
        ).stdout
        assert printed == os.fsencode(name)
        assert layout._quote_for_bash(name).isprintable()
    assert shlex.split(layout._quote_for_bash("a b")) == ["a b"]


def test_all_files_of_a_folder_are_listed_and_again_when_a_folder_has_changed(tmp_path):
    root, cache = tmp_path / "set", tmp_path / "cache"
    write(root, "a/1.txt", ".hidden", os.fsdecode(b"a/not \xff utf-8"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/far.bin").write_bytes(bytes(7))
    (root / "link").symlink_to(tmp_path / "shared")
    (root / "gone").symlink_to("nowhere")
    os.mkfifo(root / "pipe")
    with (root / "holes").open("wb") as file:
        file.truncate(1 << 40)

    def read():
        return layout.read_listings(root, cache, kind=layout.FILES)[layout.FILES]

    first = read()
    sizes = 7 + (1 << 40) + sum((root / name).stat().st_size for name in ("a/1.txt", ".hidden"))
    assert first["images"] == 5 and first["bytes"] >= sizes
    assert "1 that are no files" in first["note"] and "1 links" in first["note"]
    assert read() == first
    (root / "a/1.txt").rename(root / "a/2.txt")
    assert read()["sha256"] != first["sha256"]


def test_a_script_s_folder_may_have_a_part_that_cannot_be_read_and_files_that_go(
    tmp_path, monkeypatch
):
    """As a whole disk has lost+found, and a cache files that come and go."""
    write(tmp_path, "a.txt", "b.txt", "lost+found/c.txt")
    scandir, beats = os.scandir, []

    def scan(folder):
        if folder.endswith("lost+found"):
            raise PermissionError(13, "Permission denied", folder)
        entries = list(scandir(folder))
        (tmp_path / "b.txt").unlink(missing_ok=True)
        return contextlib.closing(entry for entry in entries)

    monkeypatch.setattr(os, "scandir", scan)
    listing, _ = layout.list_files(tmp_path, lambda: beats.append(1))
    monkeypatch.undo()
    assert listing["images"] == 1 and "1 folders that cannot be read" in listing["note"]
    assert len(beats) >= 3  # for each entry, since one folder may have a million
