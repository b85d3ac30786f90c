"""A group of one rank, with DDP around the model: over NCCL on a GPU, by every strategy."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from contract import strategies
from tandem.sync.carrier import Carrier, Stage
from tests.gpu.jobs import options_of, that_torch_has
from tests.trainer_ranks import run_ranks
from tests.unit.trainer.sync_ranks import Steps

SPECS = [one.for_family(strategies.SGD).spec for one in strategies.list_usual()]
SPECS += ["ef:5:own"]
SPECS = that_torch_has(SPECS)
# Of the sum of gradients, which of one rank is its own.
NEAR = {"allreduce": 1e-6, "bf16": 0.01, "fp16": 2e-3, "ef:255:peak": 0.02}
NEAR["ef:15:peak"] = 0.3
NEAR.update(dict.fromkeys(("ef:5:peak", "ef:5:own", "ef:3:peak"), 1.5))


def in_a_group(images, device):
    """In a rank: (backend, by strategy how far its sums are from the exact ones, what a carrier
    brings)."""
    world = group_of_one(images, device)
    return dist.get_backend(), sums(world), carried(world.device)


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
        found[spec, "coding"] = type(getattr(steps.sync, "coding", None)).__name__
        found[spec] = float((steps.step(1) - exact).norm() / exact.norm())
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


@pytest.mark.needs_gpu
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.startswith("ef")])
def test_a_bucket_is_coded_by_triton(found, spec):
    assert found[1][spec, "coding"] == "Kernels"


@pytest.mark.quick
@pytest.mark.parametrize("spec", that_torch_has(NEAR))
def test_the_sum_of_one_rank_is_its_own(found, spec):
    assert found[1][spec] < NEAR[spec]


@pytest.mark.quick
def test_memory_is_not_used_anew_before_the_next_stage_has_read_it(found):
    assert found[2] == list(map(float, range(30)))
