"""A copy deletes little, or says what it would delete."""

import pytest

from contract.layout import FILES, IMAGES, LayoutError, read_data_sets
from planning.data import copy_failure, data_lack, data_refusal
from tests.unit.ansible.provision_machines import load

data_set = load("ansible/data_set.py")


def deletions(count):
    return [f"*deleting   train/cat/{n}.jpg" for n in range(count)] + ["*deleting   train/cat/"]


@pytest.mark.parametrize(
    ("count", "there", "refused"),
    [(0, 0, False), (100, 100, False), (101, 1000, True), (101, 2019, True), (101, 2020, False)],
)
def test_more_than_a_hundred_files_and_five_percent_are_not_deleted(count, there, refused):
    said = data_refusal("imagenet", ["<f+++++++++ new.jpg", *deletions(count)], there, False)
    assert bool(said) == refused
    assert data_refusal("imagenet", deletions(count), there, True) == ""


def test_a_source_without_images_in_train_and_val_is_named(tmp_path):
    assert "there is no such folder" in data_set.examine(tmp_path / "away", IMAGES)[0]
    assert "it is an empty folder" in data_set.examine(tmp_path, IMAGES)[0]
    for images, said in (
        (["val/"], "it has no folder train. It has val"),
        (["train/"], "train is empty"),
        (["train/cat/1.jpg", "val/cat/readme.txt"], "train has one class, cat"),
        (["train/dog/1.jpg", "val/dog/1.jpg"], "val/cat has no images"),
        (["val/cat/2.png"], ""),
    ):
        for name in images:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).mkdir() if name[-1] == "/" else (tmp_path / name).write_bytes(b"x")
        found, _ = data_set.examine(tmp_path, IMAGES)
        assert said in found and bool(said) == bool(found)


def test_a_source_says_what_is_not_read_and_is_refused_for_links_that_lead_nowhere(tmp_path):
    for name in ("train/cat/0.jpg", "train/dog/0.jpg", "train/dog/1.avif", "val/cat/0.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert data_set.examine(tmp_path, IMAGES) == ("", "Tandem skips these files in train: 1 .avif")
    for number in range(3):
        (tmp_path / f"val/cat/{number}.png").symlink_to(f"../../full/{number}.png")
    problem, _ = data_set.examine(tmp_path, IMAGES)
    assert "val/cat/0.png is a link" in problem and "the first of 3" in problem


def test_any_folder_with_files_can_be_copied(tmp_path):
    assert "has no files" in data_set.examine(tmp_path, FILES)[0]
    (tmp_path / "a.h5").touch()
    assert data_set.examine(tmp_path, FILES) == ("", "")
    assert (
        f"write it as {{name: {tmp_path.name}, kind: files}}"
        in data_set.examine(tmp_path, IMAGES)[0]
    )
    (tmp_path / "gone").symlink_to("nowhere")
    assert "gone is a link" in data_set.examine(tmp_path, FILES)[0]


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        ("digits", {"name": "digits", "kind": IMAGES}),
        ({"name": "coco", "kind": "files"}, {"name": "coco", "kind": FILES}),
        *((wrong, None) for wrong in ("../b", "", 7, {"name": "coco"}, {"name": "c", "kind": "x"})),
    ],
)
def test_a_data_set_is_a_name_or_a_name_with_a_kind(entry, read):
    if read:
        assert read_data_sets([entry]) == [read]
    else:
        with pytest.raises(LayoutError, match="data_sets: "):
            read_data_sets([entry])


def test_a_disk_has_room_for_the_files_that_are_new_there(tmp_path):
    """Holes take no room, and replaced files give theirs back."""
    (tmp_path / "coco").mkdir()
    (tmp_path / "coco/a\nb.bin").write_bytes(bytes(1 << 20))
    (tmp_path / "coco/replaced").write_bytes(bytes(1 << 20))
    with (tmp_path / "coco/holes.h5").open("wb") as file:
        file.truncate(1 << 40)
    lines = [r"<f+++++++++ a\#012b.bin", "<f.st...... replaced", "<f+++++++++ holes.h5"]
    for free, lacks in (("1000000", True), ("1100000", False), ("no such folder", False)):
        room = f"Avail\n{free}\n"
        assert bool(data_lack(["coco", "x"], [lines, []], room, tmp_path, "/srv/data")) == lacks


CLEAN = "rsync: protocol version mismatch -- is your shell clean?"


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (["+ /e/bashrc:7: return", "+ /home/a/.bashrc:3: echo Hi", "Hi", "+ /home/a/.bashrc:4: x"],
         "line 3 of /home/a/.bashrc (echo Hi)"),
        (["+ /home/a/.bashrc:1: . x", "++ /home/a/x:9: printf Hi", "Hi+ :1: :"],
         "line 9 of /home/a/x"),
        (["+ :1: :"], ".zshenv"),  # another shell
        ([], ".zshenv"),
    ],
)  # fmt: skip
def test_what_prints_before_rsync_is_named(trace, said):
    assert said in copy_failure("node1", CLEAN, trace)
    assert copy_failure("node1", "No space left", trace) == "node1: No space left"
