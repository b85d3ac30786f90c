"""What a run's records say of it, from the real trainer."""

import time

import pytest

from tests.trainer_ranks import make_images, run_ranks, trainer
from trainer.data.loader import Batch

WHY = "the report needs the control machine's environment"
bottleneck = pytest.importorskip("report.bottleneck", reason=WHY)
uses = pytest.importorskip("report.uses", reason=WHY)
measure = pytest.importorskip("report.measure", reason=WHY)
read = pytest.importorskip("report.read", reason=WHY)


def slowly(*argv):
    """The trainer on a device to which a batch takes 50 ms, as a GPU in a bad slot."""
    copy = Batch.on

    def on(self, device):
        time.sleep(0.05)
        return copy(self, device)

    Batch.on = on
    return trainer(*argv)


def test_a_slow_copy_to_the_device_is_the_bottleneck(tmp_path):
    argv = ["--data", make_images(tmp_path / "images", per_class=8), "--output", tmp_path]
    argv += ["--model", "tests.trainer_models:plain", "--precision", "fp32", "--augment", "none"]
    argv += ["--per_node_batch_size", 2, "--workers", 0, "--epochs", 1, "--evaluate_every", 99]
    assert run_ranks([1], slowly, *argv, quiet=True) == [0]
    step = measure.measure_step(read.read_run(tmp_path), [])
    assert bottleneck.bottleneck(step, uses.Uses()) == "h2d"
    assert step.h2d >= 0.05  # as long as it slept; a busy machine sleeps longer
