"""The memory of a device: how much of it a step may take (--auto_batch), and how much it took."""

import resource

import torch

from contract.options import OPTIMIZERS
from contract.split import SMALLEST, micro_batches

from .build import Job
from .oom import OutOfMemory, one_pass
from .precision import optimized
from .step import blank_pass, resting, unchanged


def agree_micro_batches(job: Job) -> None:
    """With --auto_batch, the fewest micro-batches that fit, the same on all ranks. Collective. On
    GPUs with --balance, too: a machine may have more images than the batch that was asked for.

    A trial pass contains none of training's own collectives, since a rank that runs out of memory
    would never reach them: batch normalisation over ranks is switched off meanwhile.
    """
    unequal = bool(job.options.balance) and job.world.device.type == "cuda"
    if not job.options.auto_batch and not unequal:
        return
    count = job.world.batches[job.world.rank]
    parts = job.micro_batches
    with resting(job.norms, job.options.sync_bn):
        while not _fits(job, max(micro_batches(count, parts))) and count // parts > SMALLEST:
            parts *= 2
    job.micro_batches = max(job.world.gather(parts))


def _fits(job: Job, size: int) -> bool:
    """Whether a forward and backward of `size` images fits, together with the memory that is needed
    later; leaves the model as it was."""
    try:
        with unchanged(job), one_pass():
            reserve = reserved(job) if job.world.device.type == "cuda" else 0
            ballast = torch.empty(reserve, dtype=torch.uint8, device=job.world.device)
            blank_pass(job, job.model, size)
            del ballast
    except OutOfMemory:
        return False
    return True


def reserved(job: Job) -> int:
    """Bytes of GPU memory that a trial pass must leave free: what the optimizer allocates at its
    first step (masters and average exist already), and a twentieth for fragmentation."""
    copies = len(OPTIMIZERS[job.options.optimizer].keeps(job.options))
    weights = sum(weight.numel() * weight.element_size() for weight in optimized(job.optimizer))
    total = torch.cuda.get_device_properties(job.world.device).total_memory
    return copies * weights + int(total) // 20


def peak(device: torch.device) -> int:
    """The peak memory of this process in bytes: allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
