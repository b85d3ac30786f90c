"""A copy deletes little, or says what it would delete."""

import pytest

from planning.data import data_refusal
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
    assert "there is no such folder" in data_set.problem(tmp_path / "away")
    assert "it is an empty folder" in data_set.problem(tmp_path)
    for images, said in (
        (["val/"], "it has no folder train, but val"),
        (["train/"], "train is empty"),
        (["train/cat/1.jpg", "val/cat/readme.txt"], "train has one class, cat"),
        (["train/dog/1.jpg", "val/dog/1.jpg"], "val/cat has no images"),
        (["val/cat/2.png"], ""),
    ):
        for name in images:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).mkdir() if name[-1] == "/" else (tmp_path / name).write_bytes(b"x")
        found = data_set.problem(tmp_path)
        assert said in found and bool(said) == bool(found)
