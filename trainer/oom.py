"""Whether an error means that the device has too little memory, however it is worded.

A rank cannot try a step again while its peers wait for its gradients inside an all-reduce. So it
leaves with its own exit code, and the run is started again from its checkpoint with the micro-batch
halved: same global batch, same learning rate. Batch normalisation sees the smaller micro-batch.
"""

import contextlib
from typing import Iterator, Optional

import torch

# torch's own words, and those of cuBLAS, cuDNN and the CPU's allocator.
OUTRIGHT = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
# cuDNN without room for a workspace, and both without room for their handle: they mean other things
# too, and are believed only where memory was short.
PERHAPS = (
    *("unable to find a valid cudnn algorithm", "unable to find an engine"),
    *("cublas_status_not_initialized", "cudnn_status_not_initialized"),
)


class OutOfMemory(RuntimeError):
    """The device has too little memory for a pass; the text is the library's."""


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """A forward and backward, or an evaluation. What shows within that memory is too small is
    raised as OutOfMemory."""
    before = refusals()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error, before):
            raise
        raise OutOfMemory(str(error)) from error


def is_out_of_memory(error: BaseException, refused_before: Optional[int] = None) -> bool:
    """By its words: torch 1.12 raises a plain RuntimeError, later ones a subclass.

    `refused_before`: `refusals()` when the pass began, where it is known."""
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, OutOfMemory) or any(word in str(error) for word in OUTRIGHT):
        return True
    return any(word in str(error).lower() for word in PERHAPS) and _was_short(refused_before)


def refusals() -> int:
    """How often torch has refused this process memory of its GPU."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))


def _was_short(refused_before: Optional[int]) -> bool:
    """Whether less than a twentieth of the GPU's memory is free, or torch has refused some since: a
    process may be limited to a part of it, and cuDNN hides that its workspace was refused. What was
    refused earlier (to --auto_batch's trials, or while cuDNN timed its algorithms) says nothing."""
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < total / 20 or (refused_before is not None and refusals() > refused_before)
