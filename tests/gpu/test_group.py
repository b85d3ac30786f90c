"""A group of one rank, with DDP around the model: over NCCL on a GPU, by every strategy."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from contract import strategies
from tandem.sync.carrier import Carrier, Stage
from tests.gpu.jobs import batches, options_of, prepared, that_torch_has, train, weights
from tests.gpu.ranks import off
from tests.trainer_ranks import run_ranks
from tests.unit.trainer.sync_ranks import Steps
from trainer.step import rebuild_buckets

SPECS = [one.of(strategies.SGD).spec for one in strategies.usual()]
SPECS += ["allreduce:gloo", "fp16:gloo", "ef:5:own"]
SPECS = that_torch_has(SPECS)
# Of the sum of gradients, which of one rank is its own.
NEAR = {"allreduce": 1e-6, "bf16": 0.01, "fp16": 2e-3, "ef:255:peak": 0.02}
NEAR.update({"allreduce:gloo": 1e-6, "fp16:gloo": 2e-3, "ef:15:peak": 0.3})
NEAR.update(dict.fromkeys(("ef:5:peak", "ef:5:own", "ef:3:peak"), 1.5))
# Of a job: how far it may end from one without DDP.
JOBS = {("sync", spec): {**NEAR, "ef:15:peak": 0.5, "powersgd:4": 2.0}[spec] for spec in SPECS}
for level in that_torch_has(["fp32", "bf16", "O1", "O2", "O3"]):
    JOBS["precision", level] = 1e-4 if level == "fp32" else 0.05


def in_a_group(images, device):
    """In a rank: (backend, by strategy how far its sums are from the exact ones, for each of JOBS
    how far one with DDP ends from one without, what a carrier brings)."""
    world = group_of_one(images, device)
    return dist.get_backend(), sums(world), jobs(images, device, world), carried(world.device)


def group_of_one(images, device):
    """A world that counts as two, so that all is built that several ranks have."""
    from tandem.compat import bound_to
    from trainer import world

    backend = world._backend(device)
    own = world.start(options_of(images, device))
    store = dist.HashStore()
    bound = bound_to(device) if backend == "nccl" else {}
    dist.init_process_group(backend, store=store, rank=0, world_size=1, **bound)
    return dataclasses.replace(own, size=2)


def sums(world):
    found = {}
    for spec in SPECS:
        steps = Steps(spec, world)
        exact = steps.exact(1)
        found[spec] = float((steps.step(1) - exact).norm() / exact.norm())
    return found


def jobs(images, device, world):
    from trainer import build

    # It is one machine, between whose ranks the sum would be exact.
    build.carried_out, found = lambda spec, *_: spec, {}
    for kind, name in JOBS:
        if not that_torch_has([name], device):
            continue
        given = {kind: name, "model": "tests.gpu.models:fixed", "momentum": 0.0}
        forced = prepared(images, device, world, **given)
        rebuild_buckets(forced)
        begin = weights(forced)
        alone = prepared(images, device, dataclasses.replace(world, size=1), **given)
        for job in (forced, alone):
            train(job, batches(job, 2))
        found[kind, name] = off(weights(forced), weights(alone), begin)
    return found


def carried(device, jobs=30, values=2**20):
    """What becomes of tensors that one stage makes while the next one still reads earlier ones."""

    def make(number):
        return [torch.full((values,), float(number), device=device)]

    def read(made):
        if device.type == "cuda":
            torch.cuda._sleep(10**7)  # some milliseconds
        return made[0].mean()

    carrier = Carrier([Stage(make), Stage(read)], device, 30)
    futures = [carrier.future() for _ in range(jobs)]
    for number, future in enumerate(futures):
        carrier.start(number, future)
    return [float(future.wait()) for future in futures]


@pytest.fixture(scope="module")
def found(images, device):
    return run_ranks([1], in_a_group, str(images), device, env={"WORLD_SIZE": 1})[0]


@pytest.mark.needs_gpu
def test_the_backend_is_nccl(found):
    assert found[0] == "nccl"


@pytest.mark.quick
@pytest.mark.parametrize("spec", that_torch_has(NEAR))
def test_the_sum_of_one_rank_is_its_own(found, spec):
    assert found[1][spec] < NEAR[spec]


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "name"), JOBS)
def test_a_job_with_ddp_goes_where_one_without_does(found, kind, name):
    far = found[2][kind, name]
    assert far < JOBS[kind, name]
    if name.startswith(("fp16", "ef")):
        assert far > 0  # what it rounds is seen: it took part


@pytest.mark.quick
def test_memory_is_not_used_anew_before_the_next_stage_has_read_it(found):
    assert found[3] == list(map(float, range(30)))
