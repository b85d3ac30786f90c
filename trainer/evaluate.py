"""Evaluate the model on the images of val: each image counts once, on any number of ranks."""

import contextlib
from typing import Callable, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist
from torch.nn import functional

from contract.errors import RankError, UserError

from .build import Job
from .data.loader import eval_batches
from .memory import detect_out_of_memory


class Result(NamedTuple):
    """The result over all ranks."""

    samples: int  # images that could be read
    top1: float  # 0 to 1
    top5: float
    loss: float  # the mean over images


class Unevaluated(Exception):
    """Raised on all ranks if there is no result. `error`: the error with which this rank ends; None
    if only other ranks cannot read their images."""

    def __init__(self, error: Optional[UserError]) -> None:
        super().__init__()
        self.error = error


def share_buffers(job: Job) -> None:
    """Copy rank 0's buffers (batch normalisation's running statistics) to all ranks. Collective.

    Buffers are broadcast, not averaged. Rank 0's buffers then never change here, so the times of
    evaluating and saving do not change a bit of the run. As with DDP's own broadcast, the
    statistics come from rank 0's share of the data.
    """
    if job.world.size == 1:
        return
    buffers = dict(job.model.named_buffers())
    averages = {} if job.ema is None else job.ema.average
    tensors = [*buffers.values(), *(averages[name] for name in buffers if name in averages)]
    for kind in sorted({tensor.dtype for tensor in tensors}, key=str):
        # One message a type: a network has a hundred small buffers, each a round trip.
        group = [tensor for tensor in tensors if tensor.dtype is kind]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.broadcast(flat, 0)
        for tensor, values in zip(group, flat.split([tensor.numel() for tensor in group])):
            tensor.copy_(values.view_as(tensor))


@torch.no_grad()
def evaluate(job: Job, progress: Callable[[int], None] = lambda done: None) -> Result:
    """Evaluate the model, or its average if it has one, on the evaluation images, after
    `share_buffers`. Raises Unevaluated. Collective.

    `progress` is called before each batch with the number of images that this rank has done.
    """
    averaged = contextlib.nullcontext() if job.ema is None else job.ema.applied(job.model)
    # Images, top-1 hits, top-5 hits and loss. In fp64 a million images lose no printed digit.
    sums = torch.zeros(4, dtype=torch.float64, device=job.world.device)
    job.model.eval()
    failure: Optional[UserError] = None
    with averaged:
        done = 0
        try:
            for batch in eval_batches(job.eval_set, job.options, job.world, job.eval_batch):
                progress(done)
                done += len(batch.indices)
                with detect_out_of_memory():
                    sums += _sum_scores(job, *batch.copy_to(job.world.device))
        except RankError as error:
            failure = error  # raised below, when the other ranks know that this rank failed
    # Training continues, but frozen modules stay in evaluation mode.
    job.model.train()
    for module in job.frozen:
        module.eval()
    # Not an all-reduce with the short timeout of a step: one rank may be reading from a cold share.
    gathered = job.world.gather((sums.tolist(), failure is not None))
    rank_sums = [row for row, _ in gathered]
    count, top1, top5, loss = (sum(column) for column in zip(*rank_sums))
    has_failed = any(rank_failed for _, rank_failed in gathered)
    if not count and not has_failed:
        failure = UserError(
            f"--data {job.options.data}: the {len(job.eval_set)} images of val cannot be read "
            "any more: repair them. A checkpoint has everything that was trained so far."
        )
    if has_failed or failure:
        raise Unevaluated(failure)
    return Result(samples=int(count), top1=top1 / count, top5=top5 / count, loss=loss / count)


def _sum_scores(job: Job, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Evaluate a batch. Return a tensor (4): the number of images, and the sums of top-1 hits,
    top-5 hits and loss."""
    # The outputs are freed when this function returns. The next batch needs their memory, so these
    # lines are not in the caller's loop.
    with job.precision.computing():
        outputs = job.model(job.normalise(images)).double()
    top1, top5, loss = score(outputs, targets)
    number = loss.new_full((1,), len(targets))
    return torch.cat([number, *(column.sum(0, True).double() for column in (top1, top5, loss))])


def score(
    outputs: torch.Tensor, targets: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each image whether its class has the highest score, whether its class is among the
    highest five, and the loss: each (n)."""
    hits = outputs.topk(min(5, outputs.shape[1]), 1).indices == targets[:, None]
    loss = functional.cross_entropy(outputs, targets, reduction="none")
    return hits[:, 0], hits.any(1), loss
