"""Options reach what they are about: the loss, the memory format, DDP, torch.compile."""

from unittest import mock

import pytest
import torch

from contract.errors import UserError
from contract.options import Options
from tandem.clock import Clock
from tandem.compat import ddp_buffers
from trainer import parallel
from trainer.build import build_job, build_materials
from trainer.data.loader import TrainBatches
from trainer.memory import recompute_activations
from trainer.models import build
from trainer.step import train_step
from trainer.world import World

CPU = torch.device("cpu")


def made(images, **settings):
    options = Options(data=str(images), model="tests.trainer_models:plain", workers=0, **settings)
    world = World(batches=(8,))
    return build_job(options, world, build_materials(options, world), Clock(CPU))


def test_label_smoothing_reaches_the_loss(images):
    outputs, targets = torch.randn(3, 4), torch.tensor([0, 3, 1])
    smooth = 0.8 * torch.eye(4)[targets] + 0.05
    wanted = -(smooth * outputs.log_softmax(1)).sum()
    loss = made(images, label_smoothing=0.2).loss(outputs, (targets, targets.roll(1, 0)), None)
    torch.testing.assert_close(loss, wanted)


def test_compile_reaches_what_a_step_calls_and_not_what_is_saved(images, monkeypatch):
    compiled = torch.nn.Identity()
    monkeypatch.setattr(torch, "compile", lambda net, dynamic: compiled, raising=False)
    ours = made(images, compile=True)
    assert ours.net is compiled
    assert "_orig_mod" not in "".join(ours.model.state_dict())


def test_channels_last_reaches_weights_and_inputs(images):
    ours = made(images, channels_last=True)
    inputs = ours.normalise(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    for tensor in (ours.model[0].weight, inputs):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("on", [False, True])
def test_ddp_gets_its_options(on):
    named = dict.fromkeys(("find_unused_parameters", "static_graph"), on)
    options = Options(broadcast_buffers=on, bucket_mb=7 if on else None, **named)
    with mock.patch.object(parallel, "DistributedDataParallel") as ddp:
        world = World(size=2, batches=(4, 4))
        parallel.wrap(torch.nn.Linear(1, 1), options, world, mock.Mock())
    wanted = {**named, "bucket_cap_mb": 7 if on else 25, **ddp_buffers(on)}
    assert {name: ddp.call_args.kwargs[name] for name in wanted} == wanted


def test_checkpointed_activations_are_computed_again():
    calls = []
    model = build("resnet18", 4, 32)
    model.layer2[0].conv1.register_forward_hook(lambda *_: calls.append(1))
    recompute_activations(model)
    model(torch.zeros(2, 3, 32, 32)).sum().backward()
    model.eval()
    model(torch.zeros(2, 3, 32, 32))
    assert len(calls) == 2 + 1


@pytest.mark.parametrize(("version", "parts", "ranks"), [("1.12.1", 1, 2), ("2.15.0", 3, 2)])
def test_a_static_graph_in_micro_batches_is_refused_by_an_old_torch(
    monkeypatch, version, parts, ranks
):
    options, two = Options(static_graph=True), World(size=2, batches=(4, 4))
    monkeypatch.setattr(torch, "__version__", "1.12.1")
    with pytest.raises(UserError, match=r"micro-batches \(3 a step\) in torch 1.12.1"):
        parallel.check_micro_batches(options, two, 3)
    monkeypatch.setattr(torch, "__version__", version)
    parallel.check_micro_batches(options, World(size=ranks, batches=(4,) * ranks), parts)


def test_the_average_is_updated_every_so_many_steps(images):
    ours = made(images, ema=0.5, ema_every=3)
    batch = next(TrainBatches(ours.train_set, ours.options, ours.world).epoch(0))
    for step in range(7):
        train_step(ours, batch, step, 0.1)
    assert ours.ema.updates == 2
    with mock.patch.object(ours.precision, "step", return_value=True):
        train_step(ours, batch, 8, 0.1)
    assert ours.ema.updates == 2  # the step was skipped
