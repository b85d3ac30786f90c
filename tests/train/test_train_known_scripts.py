"""Scripts as people write them for known frameworks, on two nodes of this machine, with packages
from PyPI: each trains, is killed, and goes on from its checkpoint by the command that
docs/own-script.md gives for it."""

import json
import re
import sys

import numpy
import pytest

from tests.train.script_runs import CHECKOUT, begin, ended
from tests.trainer_ranks import make_images

pytest.importorskip("fabric", reason="a run needs the control node's environment")

KNOWN = CHECKOUT / "tests/train/known"
LAST = "--resume {last} --crash-at -1"
# For each kind of script: where it saves, its arguments, those with which it goes on, and what it
# prints at the end.
KINDS = {
    "transformers": ("checkpoints", "--crash-at 25", LAST, "step 30"),
    "accelerate": ("checkpoints", "--crash-at 2", LAST, "epoch 2"),
    "lightning": ("checkpoints", "--nodes 2 --crash-at 2", LAST, "epoch 2"),
    "timm": ("output", "--crash-at 2", LAST, "epoch 2"),
    "nanogpt": (
        "out", "--dataset={data} --crash_at=25", "--init_from=resume --crash_at=-1", "step 30",
    ),
    "torchvision": (
        "checkpoints", "--data-path {data} --device cpu --output-dir checkpoints --crash-at 1",
        LAST, "epoch 1",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def inventory(tmp_path_factory):
    """The demo's, whose machines have two small data sets: images, and characters as numbers."""
    data = tmp_path_factory.mktemp("data")
    make_images(data / "images", per_class=8)
    (data / "characters").mkdir()
    (numpy.arange(20_000) % 64).astype("uint16").tofile(data / "characters/train.bin")
    demo = (CHECKOUT / "examples/demo.ini").read_text()
    (data / "machines.ini").write_text(demo.replace("data_root=data", f"data_root={data}"))
    return data / "machines.ini"


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_script_trains_on_two_nodes_and_goes_on_after_a_kill(kind, inventory):
    output, arguments, more, printed = KINDS[kind]
    words = ["--inventory", inventory, "--queue", "--nodes=2", f"--output={output}"]
    data = {"nanogpt": "characters", "torchvision": "images"}.get(kind)
    words += ["--data", data] if data else []
    words += [f"--script={KNOWN / kind / 'train.py'}", f"--resume-args={more}", "--max-restarts=1"]
    argv = [sys.executable, "-m", "launcher", "train", *words, "--", *arguments.split()]
    said, code, run = ended(begin([str(word) for word in argv]))
    assert code == 0, said
    assert re.search(rf"^\[node1 0\] {printed}: world size 2", said, re.M), said
    assert len(json.loads((run / "attempts.json").read_text())["attempts"]) == 2
    assert "the script continues from" in said or kind == "nanogpt"
    assert "connected to no other" not in said
    steps = json.loads((run / "summary.json").read_text())["steps"]
    assert bool(steps) == (kind in ("transformers", "lightning"))  # whose callbacks time them
