"""What a step computes: a plain loop's numbers, in the formats and types that were asked for."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.gpu.jobs import HALF, batches, distance, prepared, train, weights
from trainer.data.batch import MEAN, STD

CPU = torch.device("cpu")
FP64 = {"model": "tests.gpu.models:fixed", "precision": "fp64"}


@pytest.fixture(scope="module")
def by_hand(images):
    """Weights after 20 steps of a loop as anybody writes it: fp64, on the CPU, whole batches."""
    job = prepared(images, CPU, **FP64)
    model = job.model
    mean, std = (torch.tensor(one, dtype=torch.float64) for one in (MEAN, STD))
    decays = [[p for p in model.parameters() if (p.dim() > 1) is many] for many in (True, False)]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(decays, (1e-4, 0.0))]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    for batch in batches(job, 5, 20):
        pixels = (batch.images.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        optimizer.zero_grad()
        cross_entropy(model(pixels), batch.targets).backward()
        optimizer.step()
    return weights(job)


@pytest.mark.quick
@pytest.mark.parametrize("given", [{}, {"channels_last": True}, {"checkpoint_activations": True}])
def test_20_steps_are_those_of_a_plain_loop(images, device, by_hand, given):
    job = prepared(images, device, **FP64, **given)
    train(job, batches(job, 5, 20))
    assert distance(weights(job), by_hand) < 1e-9


@pytest.mark.parametrize("level", ["fp32", "bf16", *HALF])
def test_each_precision_learns_in_its_type(images, device, without_apex, level):
    job, types = prepared(images, device, precision=level), set()
    job.model[0].register_forward_hook(lambda _, __, output: types.add(output.dtype))
    losses = [float(loss) for loss in train(job, batches(job, 8))]
    first, last = sum(losses[:4]), sum(losses[-4:])
    assert last < 0.6 * first
    assert types == {{"fp32": torch.float32, "bf16": torch.bfloat16}.get(level, torch.float16)}
    assert all(torch.equal(own, master.half()) for own, master in job.precision.masters)


def begin_with(scale, value):
    """On a GPU it is a tensor there."""
    scale.load_state_dict({"value": value, "good_steps": 0})


@pytest.mark.quick
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_that_overflows_is_skipped_and_halves_the_scale(images, device, without_apex, level):
    job = prepared(images, device, precision=level, ema=0.9)
    fed, scale = batches(job, 2), job.precision.scale
    begin_with(scale, 2.0**8)
    train(job, fed[:2])
    # Running statistics move: the forward was good.
    before = {name: value for name, value in weights(job).items() if "running" not in name}
    average, good = job.ema.updates, scale.good_steps
    begin_with(scale, 2.0**60)
    train(job, fed[2:3], begin=2)
    after = weights(job)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved == ["1.num_batches_tracked", "4.num_batches_tracked"]
    assert (scale.value, scale.good_steps) == (2.0**59, 0)
    assert job.ema.updates == average
    begin_with(scale, 2.0**8)
    train(job, fed[3:4], begin=3)
    assert (good, scale.good_steps) == (2, 1)
    assert not torch.equal(before["0.weight"], weights(job)["0.weight"])


@pytest.mark.needs_torch_2
@pytest.mark.needs_gpu
@pytest.mark.parametrize("level", ["fp32", "bf16"])
def test_compiled_kernels_compute_the_same(images, device, level):
    """By the real compiler, which needs Triton and a C compiler."""
    torch._dynamo.reset()
    given = {"model": "tests.gpu.models:fixed", "precision": level}
    plain, made = (prepared(images, device, compile=on, **given) for on in (False, True))
    for job in (plain, made):
        train(job, batches(job, 1, 4))
    assert distance(weights(made), weights(plain)) < (1e-3 if level == "fp32" else 0.1)


@pytest.mark.needs_gpu
def test_the_stopwatch_s_parts_make_up_the_steps(images, device):
    """By the device's time line."""
    job = prepared(images, device)
    fed = batches(job, 2)
    train(job, fed[:2])
    job.clock.lap()
    train(job, fed[2:], begin=2)
    lap = job.clock.lap()
    spent = job.clock.read(lap)
    whole = lap.marks[0].elapsed_time(lap.marks[-1]) / 1000
    assert {"h2d", "forward", "backward", "optimizer"} <= set(spent)
    assert min(spent.values()) >= 0
    assert sum(spent.values()) == pytest.approx(whole, rel=0.01)
