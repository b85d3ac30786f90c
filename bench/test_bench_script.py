"""How fast three lines of Tandem make a script of a user's own, over links of 1 Gbit/s, and how it
scales beside our own trainer with the same model, which sleeps."""

import statistics

import pytest

from tests.lab.chaos_run import CHECKOUT
from tests.lab.test_script import (  # noqa: F401 (fixtures)
    HERE,
    NODES,
    THIRD,
    TWO_LINES,
    cluster,
    ended,
    make,
    sleeper,
)


@pytest.fixture
def trainer(cluster, tmp_path):  # noqa: F811
    """trainer(epochs) -> (folder, summary) of our own trainer with the same model and batch."""
    lab, inventory = cluster

    def trained(epochs, nodes=NODES):
        model = f"{(HERE / 'sleeping_model.py').relative_to(CHECKOUT)}:heavy_sleeper"
        words = {"MODEL": model, "BATCH": 32, "PRECISION": "fp32", "SYNC": "ef:3"}
        words |= {
            "BALANCE": "off",
            "NODES": nodes,
            "EPOCHS": epochs,
            "ARGS": "--sync_warmup 0 --augment none",
        }
        said = make(lab, "train", INVENTORY=inventory(tmp_path), **words)
        return ended(said)

    return trained


def test_what_three_lines_bring(sleeper, figure):  # noqa: F811
    exact, coded = (sleeper(lines, 110)[1] for lines in (TWO_LINES, [*TWO_LINES, *THIRD]))
    figure("script: images/s with ef:3:peak over exact sums",
           coded["images_per_second"] / exact["images_per_second"], "x")  # fmt: skip


def test_it_scales_as_our_own_trainer_does(sleeper, trainer, figure):  # noqa: F811
    """Efficiency: images/s of three machines over three times those of one, in pairs."""
    lines = [*TWO_LINES, *THIRD]
    alone = [sleeper(lines, 40, nodes=1)[1], trainer(1, nodes=1)[1]]
    pairs = []
    for _ in range(2):
        pairs.append([sleeper(lines, 60)[1], trainer(4)[1]])
    speeds = [[summary["images_per_second"] for summary in pair] for pair in [alone, *pairs]]
    ours = [[together / (NODES * speed) for together, speed in zip(pair, speeds[0])]
            for pair in speeds[1:]]  # fmt: skip
    figure("script: its efficiency on three machines over the trainer's",
           statistics.mean(script / own for script, own in ours), "x", "0.9")  # fmt: skip
