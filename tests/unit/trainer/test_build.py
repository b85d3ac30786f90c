"""Options reach what they are about: the loss, the memory format, DDP, torch.compile."""

from unittest import mock

import pytest
import torch

from contract.errors import UserError
from contract.options import Options
from tandem.timings import Clock
from tests.trainer_ranks import make_images
from trainer import parallel
from trainer.build import job, materials
from trainer.data.loader import TrainBatches
from trainer.step import train_step
from trainer.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), per_class=5)


def made(images, **settings):
    options = Options(data=str(images), model="tests.trainer_models:plain", workers=0, **settings)
    world = World(batches=(8,))
    return job(options, world, materials(options, world), Clock(CPU))


def test_label_smoothing_reaches_the_loss(images):
    outputs, targets = torch.randn(3, 4), torch.tensor([0, 3, 1])
    smooth = 0.8 * torch.eye(4)[targets] + 0.05
    wanted = -(smooth * outputs.log_softmax(1)).sum()
    torch.testing.assert_close(made(images, label_smoothing=0.2).loss(outputs, targets), wanted)


def test_compile_reaches_what_a_step_calls_and_not_what_is_saved(images, monkeypatch):
    compiled = torch.nn.Identity()
    monkeypatch.setattr(torch, "compile", lambda net, dynamic: compiled, raising=False)
    ours = made(images, compile=True)
    assert ours.net is compiled
    assert "_orig_mod" not in "".join(ours.model.state_dict())


@pytest.mark.parametrize(
    ("version", "parts", "ranks"), [("1.12.1", 1, 2), ("1.12.1", 3, 1), ("2.15.0", 3, 2)]
)
def test_a_static_graph_in_micro_batches_is_refused_by_an_old_torch(
    monkeypatch, version, parts, ranks
):
    options, two = Options(static_graph=True), World(size=2, batches=(4, 4))
    monkeypatch.setattr(torch, "__version__", "1.12.1")
    with pytest.raises(UserError, match=r"micro-batches \(3 a step\) in torch 1.12.1"):
        parallel.check_micro_batches(options, two, 3)
    monkeypatch.setattr(torch, "__version__", version)
    parallel.check_micro_batches(options, World(size=ranks, batches=(4,) * ranks), parts)


def test_a_step_reads_nothing_from_the_device(images):
    """On CUDA each reading would wait for all that was queued."""
    mode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
    if torch.__version__ < "2":
        pytest.skip("this torch has another way to watch operators")

    class Readings(mode):
        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.found += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    ours = made(images, momentum=0.9, ema=0.5, mixup=0.2, accumulate=2)
    batch = next(TrainBatches(ours.train_set, ours.options, ours.world).epoch(0))
    train_step(ours, batch, 0, 0.1)
    with Readings() as readings:
        tally = train_step(ours, batch, 1, 0.1)
        assert readings.found == 0
        tally.sum().item()
    assert readings.found == 1


def test_the_average_is_updated_every_so_many_steps_that_were_made(images):
    ours = made(images, ema=0.5, ema_every=3)
    batch = next(TrainBatches(ours.train_set, ours.options, ours.world).epoch(0))
    for step in range(7):
        train_step(ours, batch, step, 0.1)
    assert ours.ema.updates == 2
    ours = made(images, ema=0.5)
    with mock.patch.object(ours.precision, "step", return_value=True):
        train_step(ours, batch, 0, 0.1)
    assert ours.ema.updates == 0
    train_step(ours, batch, 1, 0.1)
    assert ours.ema.updates == 1
