"""Machines that come and go, as local nodes: what is trained is what one would train by hand.

Stand-in: each node's owner is a file in a folder of its own, as `tandem away` writes it.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch

from tests.lab import lineage
from tests.train.script_runs import CHECKOUT
from tests.trainer_ranks import newest_checkpoint

pytest.importorskip("fabric", reason="the launcher needs the control node's environment")
pytestmark = pytest.mark.long
EPOCHS = 16
PATIENCE = 240  # seconds, on a machine that does other things too
MODEL = """
import time
from torch import nn
class Slow(nn.Sequential):
    def forward(self, images):
        time.sleep(0.05)  # a step that is worth being interrupted, on any processor
        return super().forward(images)
def slow(num_classes):
    return Slow(nn.Flatten(), nn.Linear(3 * 15 * 15, num_classes))
"""


class Lab:
    """Two local nodes with owners, and runs on them, below one folder."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "slow.py").write_text(MODEL)
        lines = ["[cluster]"]
        for node in ("node1", "node2"):
            (folder / f"{node}-away").mkdir()
            words = {"ansible_connection": "local", "env_python": sys.executable, "gpus": 0}
            words |= {"node_dir": folder / node, "data_root": CHECKOUT / "data"}
            words |= {"hours": "00:00-24:00", "idle_minutes": 0.1}
            words["away_dir"] = folder / f"{node}-away"
            lines.append(" ".join([node, *(f"{name}={value}" for name, value in words.items())]))
        (folder / "pcs.ini").write_text("\n".join([*lines, ""]))

    def away(self, node):
        (self.folder / f"{node}-away/anna").touch()

    def back(self, node):
        (self.folder / f"{node}-away/anna").unlink()

    def start(self, *words):
        # FORCE: this machine may be training, or have these tests twice.
        options = ["--inventory", self.folder / "pcs.ini", "--force", *words]
        self.before = set((CHECKOUT / "runs").glob("2*"))
        self.out = (self.folder / "out").open("w+")
        command = [sys.executable, "-m", "launcher", "train", *map(str, options)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=CHECKOUT, env=env, stdout=self.out, stderr=subprocess.STDOUT
        )

    def train(self):
        model = f"{self.folder}/slow.py:slow"
        trainer = ("--sample_log", "--evaluate_every", EPOCHS, "--workers", 0, "--image_size", 15)
        self.start("--model", model, "--data", "digits", "--epochs", EPOCHS, "--", *trainer)
        self.wait(lambda: set((CHECKOUT / "runs").glob("2*")) - self.before)
        (self.run,) = set((CHECKOUT / "runs").glob("2*")) - self.before

    def wait(self, holds):
        limit = time.monotonic() + PATIENCE
        while not holds():
            assert self.process.poll() is None and time.monotonic() < limit, self.said()
            time.sleep(0.05)

    def said(self):
        return (self.folder / "out").read_text()

    def attempts(self):
        try:
            return json.loads((self.run / "attempts.json").read_text())["attempts"]
        except OSError:  # the first has not begun
            return []

    def trains(self, attempt, nodes):
        """Waits until that attempt has these nodes, and its first rank has done some steps."""
        self.wait(lambda: len(self.attempts()) >= attempt)
        assert self.attempts()[attempt - 1]["nodes"] == nodes, self.said()
        log = self.folder / nodes[0] / "runs" / self.run.name / f"samples/rank0.{attempt}.csv"
        self.wait(lambda: log.exists() and log.stat().st_size > 0)

    def ends(self):
        assert self.process.wait(PATIENCE) == 0, self.said()

    def nodes(self, run=None):
        return [self.folder / node / "runs" / (run or self.run.name) for node in ("node1", "node2")]

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE)


@pytest.fixture
def lab(tmp_path):
    made = Lab(tmp_path)
    yield made
    made.close()


def test_a_machine_that_was_away_at_the_start_joins_as_by_hand(lab):
    lab.away("node2")
    lab.train()
    lab.trains(1, ["node1"])
    lab.back("node2")
    lab.wait(lambda: len(lab.attempts()) == 2)
    # What a person would resume: as it was saved before the second attempt began to train.
    hand = f"{lab.run.name}-by-hand"
    for folder, copied in zip((*lab.nodes(), lab.run), (*lab.nodes(hand), lab.run.with_name(hand))):
        if folder.exists():
            shutil.copytree(folder, copied)
    lab.trains(2, ["node1", "node2"])
    lab.ends()
    assert [one["status"] for one in lab.attempts()] == ["stopped", "finished"]
    assert "tandem: the run begins without node2: its user typed `tandem away`" in lab.said()
    assert "tandem: node2 can participate: the workers save and exit" in lab.said()
    lineage.assert_exact(lab.nodes(), EPOCHS)
    lab.start("--resume", hand)
    lab.ends()
    ours, theirs = (newest_checkpoint(lab.nodes(run)[0]) for run in (None, hand))
    assert ours["step"] == theirs["step"]
    assert all(torch.equal(ours["model"][name], theirs["model"][name]) for name in ours["model"])


def test_the_owner_of_node_0_is_back_and_leaves_again(lab):
    lab.train()
    lab.trains(1, ["node1", "node2"])
    lab.away("node1")
    lab.trains(2, ["node2"])
    assert "tandem: node1 leaves: its user typed `tandem away`" in lab.said()
    assert "tandem: node1: all processes of the run have ended" in lab.said()
    lab.away("node2")
    lab.wait(
        lambda: (
            "the checkpoint is saved, and the run waits: at least 1 machine must be" in lab.said()
        )
    )
    lab.back("node1")
    lab.trains(3, ["node1"])
    lab.back("node2")
    lab.trains(4, ["node1", "node2"])
    lab.ends()
    # The third attempt had node2's checkpoint, though its owner had node2.
    assert lineage.assert_exact(lab.nodes(), EPOCHS) == 0


def test_resumed_by_hand_it_goes_on_from_a_machine_whose_owner_is_back(lab):
    lab.train()
    lab.trains(1, ["node1", "node2"])
    lab.away("node1")
    lab.trains(2, ["node2"])
    lab.process.terminate()
    assert lab.process.wait(PATIENCE) != 0, lab.said()
    lab.back("node1")
    lab.away("node2")
    lab.start("--resume", lab.run.name)
    lab.trains(3, ["node1"])
    lab.ends()
    # The third attempt had node2's checkpoint: what node1 itself had saved was older.
    assert lineage.assert_exact(lab.nodes(), EPOCHS) == 0
