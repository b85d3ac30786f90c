"""The check of sample logs that the chaos tests rely on can fail."""

import json

import pytest

from tests.lab.lineage import assert_exact

IMAGES, EPOCHS = 6, 2


def attempt(folder, number, resumed, rows):
    """One rank's files of an attempt; rows count on from `resumed`, image by image."""
    for name in ("nodes/node1", "samples"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    start = {"kind": "start", "attempt": number, "resumed_samples": resumed, "train_images": IMAGES}
    with (folder / "nodes/node1/rank0.steps.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")
    lines = ["epoch,position,index", *(f"{n // IMAGES},{n % IMAGES},{n % IMAGES}" for n in rows)]
    (folder / f"samples/rank0.{number}.csv").write_text("\n".join([*lines, ""]))


def test_what_was_done_again_counts_once(tmp_path):
    attempt(tmp_path, 1, 0, range(7))
    attempt(tmp_path, 2, 4, range(4, 10))
    attempt(tmp_path, 3, 8, range(8, 12))
    assert assert_exact([tmp_path], EPOCHS) == 5


@pytest.mark.parametrize("begin", [7, 9], ids=["gap", "larger gap"])
def test_a_gap_is_found(tmp_path, begin):
    attempt(tmp_path, 1, 0, range(6))
    attempt(tmp_path, 2, begin, range(begin, 12))
    with pytest.raises(AssertionError, match="epoch 1"):
        assert_exact([tmp_path], EPOCHS)


def test_an_image_that_comes_twice_is_found(tmp_path):
    attempt(tmp_path, 1, 0, range(12))
    path = tmp_path / "samples/rank0.1.csv"
    path.write_text(path.read_text().replace("1,3,3", "1,3,2"))
    with pytest.raises(AssertionError, match="epoch 1"):
        assert_exact([tmp_path], EPOCHS)


def test_an_epoch_too_few_is_found(tmp_path):
    attempt(tmp_path, 1, 0, range(6))
    with pytest.raises(AssertionError, match="epoch 1"):
        assert_exact([tmp_path], EPOCHS)
