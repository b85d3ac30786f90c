"""--checkpoint_activations: less memory for about a third more computation."""

import contextlib
from typing import Any, Iterator, List

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recompute_activations(model: nn.Module) -> None:
    """Keep only the inputs of the model's stages, and compute the rest again in backward.

    A stage is an outermost nn.Sequential (ResNet's layers, a transformer's encoder).
    """
    if isinstance(model, nn.Sequential):
        _recompute(model)
        return
    for child in model.children():
        recompute_activations(child)


def _recompute(stage: nn.Sequential) -> None:
    forward = stage.forward
    norms = [module for module in stage.modules() if isinstance(module, _BatchNorm)]

    def recomputed(images: torch.Tensor) -> Any:
        calls: List[int] = []

        def run(inputs: torch.Tensor) -> Any:
            calls.append(1)
            with _untracked(norms if len(calls) > 1 else []):
                return forward(inputs)

        if stage.training and torch.is_grad_enabled():
            return checkpoint(run, images, use_reentrant=False)
        return forward(images)

    stage.forward = recomputed  # type: ignore[method-assign]


@contextlib.contextmanager
def _untracked(norms: List[_BatchNorm]) -> Iterator[None]:
    """When a batch is recomputed, it must not count in the running statistics a second time."""
    momenta = [module.momentum for module in norms]
    counts = [module.num_batches_tracked for module in norms]
    for module in norms:
        module.momentum, module.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for module, momentum, count in zip(norms, momenta, counts):
            module.momentum, module.num_batches_tracked = momentum, count
