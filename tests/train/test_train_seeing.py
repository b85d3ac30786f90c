"""What a run's records say of it, from the real trainer."""

import time

import pytest

from tests.trainer_ranks import make_images, run_ranks, trainer
from trainer.data.loader import Batch

WHY = "the report needs the control machine's environment"
bottleneck = pytest.importorskip("report.bottleneck", reason=WHY)
measure = pytest.importorskip("report.measure", reason=WHY)
records = pytest.importorskip("report.records", reason=WHY)

# Sleep in the place of computing, so that ranks do not take each other's processors.
SLEEP = """
import time
import torch

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        time.sleep(0.02)
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.04)
        return gradient

class Net(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.end = torch.nn.Linear(3, classes)

    def forward(self, images):
        return self.end(Slow.apply(images.mean((2, 3)).requires_grad_()))

def net(num_classes):
    return Net(num_classes)
"""
ARGV = [
    "--precision", "fp32", "--augment", "none", "--per_node_batch_size", 2, "--workers", 0,
    "--image_size", 16, "--epochs", 1, "--evaluate_every", 99,
]  # fmt: skip


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    (folder / "net.py").write_text(SLEEP)
    images = make_images(folder / "images", per_class=60)
    return ["--data", images, "--model", f"{folder}/net.py:net", *ARGV]


def slowly(seconds, *argv):
    """The trainer on a device to which a batch takes so long, as a GPU in a bad slot."""
    copy = Batch.on

    def on(self, device):
        time.sleep(seconds)
        return copy(self, device)

    Batch.on = on
    return trainer(*argv)


def step_of(folder):
    return measure.measure_step(records.read_run(folder), [])


def test_a_slow_copy_to_the_device_is_the_bottleneck(words, tmp_path):
    for seconds, cause in ((0.0, "compute"), (0.1, "h2d")):
        output = tmp_path / cause
        assert run_ranks([1], slowly, seconds, *words, "--output", output, quiet=True) == [0]
        step = step_of(output)
        assert bottleneck.bottleneck(step, bottleneck.Seen()) == cause
    assert step.h2d == pytest.approx(0.1, rel=0.2)
