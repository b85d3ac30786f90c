"""The data set that the prices of --sync were measured on."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contract.layout import read_split
from trainer.data.decode import open_picture

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "examples"))

import glyphs  # noqa: E402


def test_the_bytes_are_the_same_on_every_machine():
    drawn = glyphs.images(glyphs.glyphs()[5], 7, [1, 0, 5])
    assert drawn.shape == (7, 32, 32, 3)
    told = hashlib.sha256(drawn.tobytes()).hexdigest()
    assert told == "063a56567af50ac06ff9727f9e0ffb79ceb232c43a3ffeb0f3d9e6666fc8bfc5"


def test_the_trainer_reads_the_folder(tmp_path, monkeypatch):
    two = glyphs.glyphs()[:2]
    monkeypatch.setattr(glyphs, "CLASSES", 2)
    monkeypatch.setattr(glyphs, "glyphs", lambda: two)
    assert glyphs.write(tmp_path, 3, train=2, val=1) == 6
    found = read_split(tmp_path, "train").images
    assert list(found) == ["00", "01"]
    pixels = np.asarray(open_picture(tmp_path / found["01"][1]).pixels())
    assert (pixels == glyphs.images(two[1], 2, [3, 0, 1])[1]).all()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train", "0"], "--train and --val start at 1"),
        ([], "is not empty: name another folder"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, words, said):
    (tmp_path / "mine.txt").write_text("kept")
    command = [sys.executable, ROOT / "examples/glyphs.py", tmp_path, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
