"""Find out whether an error means that a device has too little memory, and use less memory
(--checkpoint_activations).

A rank cannot retry a step while its peers wait for its gradients inside an all-reduce. The rank
exits with the exit code OUT_OF_MEMORY, and the launcher restarts the run from its checkpoint with
half the micro-batch. The global batch and the learning rate stay the same, but batch normalisation
sees the smaller micro-batch.
"""

import contextlib
from typing import Any, Iterator, List, Optional

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

# Words in the messages of torch, cuBLAS, cuDNN and the CPU allocator.
CERTAIN_WORDS = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
# Words of cuDNN without memory for a workspace, and of cuDNN or cuBLAS without memory for a handle.
# These messages have other causes, too, so they count only if memory was short.
POSSIBLE_WORDS = (
    *("unable to find a valid cudnn algorithm", "unable to find an engine"),
    *("cublas_status_not_initialized", "cudnn_status_not_initialized"),
)


class OutOfMemory(RuntimeError):
    """The device has too little memory for a pass; the text is the library's own message."""


class detect_out_of_memory:
    """Raise an error of a forward, a backward or an evaluation as OutOfMemory if it means too
    little memory.

    This context manager is a class. After an error from a generator of contextlib, a reference
    cycle in Python 3.12 and newer would keep the pass's frames and memory for some time.
    """

    def __enter__(self) -> None:
        self.refused_before = count_refusals()

    def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
        if error is None or isinstance(error, OutOfMemory):
            return
        if is_out_of_memory(error, self.refused_before):
            raise OutOfMemory(str(error)) from error


def is_out_of_memory(error: BaseException, refused_before: Optional[int] = None) -> bool:
    """Return whether an error means too little memory. `refused_before`: `count_refusals()` when
    the pass began, if it is known."""
    # The message decides: torch 1.12 raises a plain RuntimeError, later versions a subclass.
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, OutOfMemory) or any(word in str(error) for word in CERTAIN_WORDS):
        return True
    is_possible = any(word in str(error).lower() for word in POSSIBLE_WORDS)
    if not is_possible or not torch.cuda.is_initialized():
        return False
    # Memory was short if less than a twentieth is free, or if an allocation has failed since the
    # pass began: a process may be limited to a part of the memory, and cuDNN hides the failed
    # allocation of its workspace. Earlier failures (in --auto_batch's trials, or while cuDNN timed
    # its algorithms) prove nothing.
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    has_failed = refused_before is not None and count_refusals() > refused_before
    return free_bytes < total_bytes / 20 or has_failed


def count_refusals() -> int:
    """Count how often torch has failed to allocate GPU memory for this process."""
    if not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_stats_as_nested_dict().get("num_ooms", 0))


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of the model's stages, and compute other activations again in backward.
    This needs less memory, and about a third more computation. A stage is an outermost
    nn.Sequential (ResNet's layers, a transformer's encoder)."""
    if not isinstance(model, nn.Sequential):
        for child in model.children():
            recompute_activations(child)
        return
    stage, forward = model, model.forward
    norms = [module for module in stage.modules() if isinstance(module, _BatchNorm)]

    def recomputed(images: torch.Tensor) -> Any:
        calls: List[int] = []

        def run(inputs: torch.Tensor) -> Any:
            calls.append(1)  # the second call is the one in backward
            with _untracked(norms if len(calls) > 1 else []):
                return forward(inputs)

        if stage.training and torch.is_grad_enabled():
            return checkpoint(run, images, use_reentrant=False)
        return forward(images)

    stage.forward = recomputed  # type: ignore[method-assign]


@contextlib.contextmanager
def _untracked(norms: List[_BatchNorm]) -> Iterator[None]:
    """Keep running statistics unchanged within the block, because they know the batch already."""
    momenta = [module.momentum for module in norms]
    counts = [module.num_batches_tracked for module in norms]
    for module, count in zip(norms, counts):
        module.momentum = 0.0
        # A copy, since torch's SyncBatchNorm needs a tensor in which it counts.
        module.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for module, momentum, count in zip(norms, momenta, counts):
            module.momentum, module.num_batches_tracked = momentum, count
