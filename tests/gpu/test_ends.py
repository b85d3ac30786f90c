"""How runs end, and how they begin where a first pass is slow."""

import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.gpu.jobs import batches, distance, prepared, train, weights
from tests.gpu.ranks import run_two
from trainer.stop import LEAD, Stop
from trainer.world import World


@pytest.mark.needs_gpu
def test_a_host_runs_ahead_of_its_device_two_meetings_at_most(device):
    """Each step of the device takes far longer than the host needs to hand it over."""
    before = signal.getsignal(signal.SIGTERM)
    stop, ends, ahead = Stop(World(size=2, device=device, store=dist.HashStore())), [], []
    signal.signal(signal.SIGTERM, before)
    for _ in range(8):
        assert stop.should_stop() is False
        ahead.append(sum(not event.query() for event in ends))
        torch.cuda._sleep(50_000_000)  # cycles: some 30 ms
        ends.append(torch.cuda.Event())
        ends[-1].record()
    torch.cuda.synchronize()
    assert max(ahead) <= LEAD
    assert max(ahead) > 0


REFUSED_BESIDE_NCCL = """
import sys, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
from trainer.__main__ import run
run()
"""


@pytest.mark.needs_gpu
def test_nccl_s_tear_down_says_nothing_after_the_sentence(images):
    """torch 2.4 and later warn there of a group that was not destroyed."""
    command = [sys.executable, "-c", REFUSED_BESIDE_NCCL, "--data", images, "--model", "resnet1"]
    done = subprocess.run([*command, "--device", "cuda"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("trainer: --model resnet1: ")


def statistics_of(norm):
    """The group over which batch normalisation sums, where it does."""
    own = norm.group.group if hasattr(norm, "group") else getattr(norm, "process_group", None)
    return own or dist.group.WORLD


def unequal(images, device, given):
    """In a rank: the first pass takes the second rank longer than its peer waits for a sum.
    Returns whether a step has moved the weights."""
    from trainer import step

    job = prepared(images, device, model="tests.gpu.models:fixed", **given)
    # After the meeting, which may take as long as a loaded machine needs.
    for group in {dist.group.WORLD, *map(statistics_of, job.norms)}:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    real = step.dummy_pass

    def slow(*args, **kwargs):
        """Stands in for a compilation, which one rank finds in its cache."""
        step.dummy_pass = real
        time.sleep(4.5 * job.world.rank)
        return real(*args, **kwargs)

    step.dummy_pass = slow
    step.rebuild_buckets(job)
    before = weights(job)
    train(job, batches(job, 1, 1))
    return step.dummy_pass is real and distance(weights(job), before) > 0


@pytest.mark.needs_torch_2  # whose time-outs can be set later
@pytest.mark.parametrize(
    "given",
    [pytest.param({}, marks=pytest.mark.quick), {"static_graph": True}, {"sync_bn": True}],
    ids=str,
)
def test_a_first_pass_that_takes_longer_on_one_rank_breaks_nothing(images, device, given):
    """Compiling is no step: its peers wait longer than --timeout for it."""
    assert run_two(unequal, str(images), device, given) == [True, True]
