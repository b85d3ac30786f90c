"""The parts of a step: gradient sync, chance, timing."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from contract.options import Options
from tandem.clock import Clock
from tests.trainer_ranks import run_ranks
from trainer import step
from trainer.data.batch import Normalise, build_loss, derive_seed, mix_images, plan_mix
from trainer.parallel import Computing
from trainer.precision import Precision
from trainer.step import frozen_batch_norm, local_only
from trainer.world import World


def ranks_gradients(kind, forwards, world=None):
    """Summed gradients of a small net after `forwards` forwards and one backward, checked."""
    from tandem.sync import Attached
    from trainer.parallel import wrap
    from trainer.world import start

    options = Options(bucket_mb=1)
    world = world or start(options)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 400), torch.nn.BatchNorm1d(400))
    net.append(torch.nn.Linear(400, 800))
    marks, attached = [], Attached(kind)
    attached.on_last_bucket = lambda: marks.append(1)
    wrapped = wrap(net, options, world, attached)
    for _ in range(2):
        marks.clear()
        wrapped.zero_grad()
        inputs = torch.arange(12.0).view(4, 3) * (world.rank + 1)
        loss = sum(wrapped(inputs / 12).pow(2).mean() for _ in range(forwards))
        (loss * world.size).backward()  # DDP takes the mean
    own = [p.grad.clone() for p in net.parameters()]
    with local_only(wrapped, on=True):
        wrapped.zero_grad()
        sum(wrapped(inputs / 12).pow(2).mean() for _ in range(forwards)).backward()
    alone = [p.grad.clone() for p in net.parameters()]
    for grad in alone:
        dist.all_reduce(grad)
    close = {"allreduce": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[kind]
    scale = max(float(grad.abs().max()) for grad in alone)
    worst = max(float((a - b).abs().max()) for a, b in zip(own, alone))
    return worst < close * scale, len(marks), worst > 1e-5 * scale


def sums_of_16_bits():
    """What --sync fp16 and bf16 make of this Gloo, and whether it sums bf16."""
    from contract.errors import UserError
    from trainer.world import start

    world = start(Options(bucket_mb=1))
    half = ranks_gradients("fp16", 1, world)
    try:
        answer = ranks_gradients("bf16", 1, world)
    except UserError as error:
        answer = str(error)
    try:
        dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16))
    except RuntimeError:
        return half, False, answer
    return half, True, answer


def test_gradients_are_summed_in_16_bits_and_the_last_bucket_is_stamped_once():
    """Gloo of torch 1.12 does not know bf16, and would say so in the middle of a backward."""
    for half, able, answer in run_ranks([1, 1, 1], sums_of_16_bits):
        assert half == (True, 1, True)
        if able:
            assert answer == (True, 1, True)
        else:
            assert f"gloo of torch {torch.__version__} cannot sum bf16" in answer


def test_two_forwards_before_one_backward_work():
    """Pitfall 2: DDP copied buffers in place at each forward; ours copies before evaluation."""
    assert run_ranks([1, 1], ranks_gradients, "allreduce", 2) == [(True, 1, False)] * 2


def chances(steps):
    """Dropout's masks of some steps as train_step seeds them, and what was drawn before."""
    from trainer.world import start

    world = start(Options())
    masks = []
    job = SimpleNamespace(options=Options(), world=world)
    for number in steps:
        step.seed_step(job, number)
        masks.append(torch.nn.functional.dropout(torch.ones(64)).tolist())
        torch.rand(world.rank + 3)
    return masks


def test_dropout_depends_on_step_and_rank_alone():
    """Pitfall 20: the same seed on each rank gave the same chance everywhere."""
    first, second = run_ranks([1, 1], chances, [4, 5, 6])
    assert first[0] != second[0]
    assert first[0] != first[1]
    assert run_ranks([1, 1], chances, [6])[1] == second[2:]


@pytest.mark.parametrize("parallel", ["ddp", "dp"])
def test_a_step_seeds_the_generators_it_draws_from_as_manual_seed_does(monkeypatch, parallel):
    cards = [torch.Generator() for _ in range(3)]
    for card in cards:
        card.manual_seed(5)
    monkeypatch.setattr(torch.cuda, "default_generators", cards)
    monkeypatch.setattr(torch, "manual_seed", None)
    seed = derive_seed("dropout", 0, 7, 2)
    world = World(rank=2, device=torch.device("cuda", 1))
    step.seed_step(mock.Mock(options=Options(parallel=parallel), world=world), 7)
    assert torch.default_generator.initial_seed() == seed
    seeded = [card.initial_seed() == seed for card in cards]
    assert seeded == ([False, True, False] if parallel == "ddp" else [True] * 3)


def test_resting_norms_keep_their_statistics_and_rest_no_longer_than_a_step_that_failed():
    """--skip_oom goes on after one."""
    norm = torch.nn.BatchNorm1d(3)
    with pytest.raises(RuntimeError), frozen_batch_norm([norm], on=True):
        norm(torch.ones(1, 3))
        raise RuntimeError("CUDA out of memory")
    assert norm.training
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_tallies_keep_no_graph(kind):
    """Pitfall 17: `total += loss` keeps the graphs of all steps alive. A micro-batch at a time
    becomes floats, which stay channels last."""
    device, seen, sizes = torch.device("cpu"), [], []
    normalise = Normalise(device, torch.float32, torch.channels_last)
    linear = torch.nn.Linear(3 * 64, 2)

    def net(images):
        seen.append(images)
        return linear(images.flatten(1))

    def counted(images):
        sizes.append(len(images))
        return normalise(images)

    job = SimpleNamespace(
        options=Options(**{kind: 0.5}), world=mock.Mock(rank=0, size=1), net=net, image_size=8,
        clock=Clock(device), normalise=counted, precision=Precision("fp32", device),
        loss=build_loss(Options()),
    )  # fmt: skip
    images = torch.randint(0, 255, (6, 3, 8, 8), dtype=torch.uint8)
    tally = step._sum_gradients(job, images, torch.tensor([0, 1, 1, 0, 1, 0]), 6, [2, 2, 2], 3)
    assert linear.weight.grad is not None and tally.shape == (2,)
    assert not (tally.requires_grad or tally.grad_fn)
    assert set(sizes) == {2}
    assert all(part.is_contiguous(memory_format=torch.channels_last) for part in seen)
    whole = normalise(images)
    plan = plan_mix(job.options, 8, 3, 0)
    assert torch.equal(torch.cat(seen), mix_images(whole, whole.roll(1, 0), plan))


def test_dp_s_threads_compute_in_the_type_that_was_asked_for():
    """Autocast is of one thread: DataParallel's found none, or fp16 in the place of bf16."""
    net = Computing(torch.nn.Linear(2, 2), Precision("bf16", torch.device("cpu")))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: net(torch.ones(1, 2)).dtype).result() is torch.bfloat16
