"""A job of the trainer in this process, on the device that the cases compute on."""

import contextlib
import warnings
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from contract.options import Options
from contract.split import rank_batches
from tandem.clock import Clock
from trainer.build import build_job, build_materials
from trainer.data.loader import TrainBatches
from trainer.step import train_step
from trainer.world import start

SIZE = 16  # pixels of the generated images
# torch 1.12 for CUDA 10.2, which the 2080 Ti gets: it has no bf16 and no compiler.
OLD = torch.__version__.startswith("1.")
USUAL = {
    "model": "tests.trainer_models:normed",
    "workers": 0,
    "augment": "none",
    "per_node_batch_size": 12,
    "precision": "fp32",
    "warmup_epochs": 0.0,
    "schedule": "constant",
    "lr": 0.02,
}


HALF = ("O1", "O2", "O3")


def that_torch_has(names, device=None):
    """Those of some precisions or strategies that this torch has, on the device."""
    on_cpu = OLD and device is not None and device.type == "cpu"
    return [name for name in names if not ((OLD and "bf16" in name) or (on_cpu and name in HALF))]


def options_of(images, device, **given):
    return Options(**{"data": str(images), "device": device.type, **USUAL, **given})


def prepared(images, device, world=None, **given):
    """A job as the trainer makes it; the levels of precision also where a run would refuse them."""
    options = options_of(images, device, **given)
    if world is None:
        world = start(options)
        places = [(0, rank) for rank in range(world.size)]
        world = replace(world, batches=rank_batches(options.per_node_batch_size, places))
    return build_job(options, world, build_materials(options, world), Clock(world.device))


def batches(job, epochs=1, size=None):
    """Those of some epochs, in pinned memory where they go to a GPU."""
    every = [
        batch
        for epoch in range(epochs)
        for batch in TrainBatches(job.train_set, job.options, job.world).epoch(epoch)
    ]
    return every[:size]


def train(job, fed, begin=0, lr=None):
    """Steps over these batches; the sums of their losses, which stay on the device."""
    rate = job.options.lr if lr is None else lr
    return [train_step(job, batch, number, rate)[0] for number, batch in enumerate(fed, begin)]


def weights(job):
    """The model's state in its masters' precision, on the CPU."""
    state = job.precision.full_state(job.model)
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def distance(ours, theirs):
    """Greatest difference of two states, each tensor's by its greatest value."""
    pairs = [(ours[name].double(), theirs[name].double()) for name in theirs]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


class _Reads(TorchDispatchMode):
    """Notes operations that would make a host wait for a GPU. On a CPU, where torch cannot tell;
    a tensor of the CPU that is copied to the CPU passes unseen."""

    WAITING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.startswith(self.WAITING):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits_within(device, raises=False):
    """A list that holds, afterwards, the waits of the host for the device; `raises`: on a GPU the
    first one raises where it happens. What torch's debug mode sees is a copy to the host, and a
    stream that is waited for; not an event, nor a wait for the whole device."""
    if device.type == "cpu":
        with _Reads() as reads:
            yield reads.found
        return
    found = []
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("error" if raises else "warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(one.message) for one in told if "synchronizing CUDA" in str(one.message)]
