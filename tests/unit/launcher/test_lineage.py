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
    with (folder / f"nodes/node1/rank0.{number}.steps.jsonl").open("a") as file:
        file.write(json.dumps(start) + "\n")
    lines = ["epoch,position,index", *(f"{n // IMAGES},{n % IMAGES},{n % IMAGES}" for n in rows)]
    (folder / f"samples/rank0.{number}.csv").write_text("\n".join([*lines, ""]))


def gap(folder):
    attempt(folder, 1, 0, range(6))
    attempt(folder, 2, 7, range(7, 12))


def twice(folder):
    attempt(folder, 1, 0, range(12))
    path = folder / "samples/rank0.1.csv"
    path.write_text(path.read_text().replace("1,3,3", "1,3,2"))


def too_few(folder):
    attempt(folder, 1, 0, range(6))


@pytest.mark.parametrize("wrong", [gap, twice, too_few])
def test_what_is_wrong_is_seen(tmp_path, wrong):
    wrong(tmp_path)
    with pytest.raises(AssertionError, match="epoch 1"):
        assert_exact([tmp_path], EPOCHS)
