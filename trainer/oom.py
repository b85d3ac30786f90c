"""Whether an error means that the device has too little memory, however it is worded.

A rank cannot retry a step while its peers wait for its gradients inside an all-reduce. So it exits
with a dedicated exit code, and the run is restarted from its checkpoint with the micro-batch
halved. The global batch and the learning rate stay the same, but batch normalisation sees the
smaller micro-batch.
"""

import contextlib
from typing import Iterator, Optional

import torch

# The words of torch itself, cuBLAS, cuDNN and the CPU allocator.
OUTRIGHT = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
# cuDNN without memory for a workspace, and cuDNN or cuBLAS without memory for a handle. These
# messages have other causes too, so they count only where memory was short.
PERHAPS = (
    *("unable to find a valid cudnn algorithm", "unable to find an engine"),
    *("cublas_status_not_initialized", "cudnn_status_not_initialized"),
)


class OutOfMemory(RuntimeError):
    """The device has too little memory for a pass; the text is the library's own message."""


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """Around a forward and backward, or an evaluation pass: an error that means too little memory
    is raised as OutOfMemory."""
    before = refusals()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error, before):
            raise
        raise OutOfMemory(str(error)) from error


def is_out_of_memory(error: BaseException, refused_before: Optional[int] = None) -> bool:
    """Judges by the message: torch 1.12 raises a plain RuntimeError, later versions a subclass.

    `refused_before`: `refusals()` when the pass began, where it is known."""
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, OutOfMemory) or any(word in str(error) for word in OUTRIGHT):
        return True
    return any(word in str(error).lower() for word in PERHAPS) and _was_short(refused_before)


def refusals() -> int:
    """How often torch has failed to allocate GPU memory for this process."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))


def _was_short(refused_before: Optional[int]) -> bool:
    """Whether less than a twentieth of the GPU's memory is free, or an allocation has failed since
    the pass began: a process may be limited to a part of the memory, and cuDNN hides the failed
    allocation of its workspace. Earlier failures (in --auto_batch's trials, or while cuDNN timed
    its algorithms) prove nothing."""
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < total / 20 or (refused_before is not None and refusals() > refused_before)
