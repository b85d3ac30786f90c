"""A copy deletes little, or says what it would delete."""

import pytest

from planning.data import data_refusal
from tests.unit.ansible.provision_machines import load

data_set = load("ansible/data_set.py")


def deletions(count):
    return [f"*deleting   train/cat/{n}.jpg" for n in range(count)] + ["*deleting   train/cat/"]


@pytest.mark.parametrize(
    ("count", "there", "refused"),
    [(0, 0, False), (100, 100, False), (101, 1000, True), (101, 2019, True), (101, 2020, False),
     (1_281_167, 1_331_167, True)],
)  # fmt: skip
def test_more_than_a_hundred_files_and_five_percent_are_not_deleted(count, there, refused):
    said = data_refusal("imagenet", ["<f+++++++++ new.jpg", *deletions(count)], there, False)
    assert bool(said) == refused
    assert data_refusal("imagenet", deletions(count), there, True) == ""


def image(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_a_source_without_images_in_train_and_val_is_named(tmp_path):
    assert "there is no such folder" in data_set.problem(tmp_path / "away")
    assert "it is an empty folder" in data_set.problem(tmp_path)
    (tmp_path / "val").mkdir()
    assert "it has no folder train, but val" in data_set.problem(tmp_path)
    (tmp_path / "train").mkdir()
    assert data_set.problem(tmp_path)
    image(tmp_path, "train/cat/1.jpg", "val/cat/readme.txt")
    assert "train has one class, cat" in data_set.problem(tmp_path)
    image(tmp_path, "train/dog/1.jpg", "val/dog/1.jpg")
    assert "val/cat has no images" in data_set.problem(tmp_path)
    image(tmp_path, "val/cat/2.png")
    assert data_set.problem(tmp_path) == ""
