"""Steps whose gradients no rank got from another: the copies of a DDP model then train apart.

DDP sums gradients where its own forward was called, outside `no_sync`. A loop that calls
`model.module(x)`, or that never leaves `no_sync`, runs to its end without an error, and each rank
steps by its own gradients.
"""

import sys
import weakref
from typing import Any, List, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compat import ddp_iterations, on_any_step

STEPS = 5  # without a sum, in a row, after which rank 0 says so


class UnsummedSteps:
    """Counts a model's optimizer steps since its gradients were summed. Since torch 2.0, which
    tells of steps."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        # Of each optimizer the weights of this model that it steps, and its steps: several
        # optimizers of one model make one step together.
        self._weights: weakref.WeakKeyDictionary[Any, List[Any]] = weakref.WeakKeyDictionary()
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sees_sums = False  # whether it ever heard of one
        self._is_blind = self._warned = False
        me = weakref.ref(self)
        hook = on_any_step(lambda optimizer: _count(me, optimizer))
        if hook is not None:
            weakref.finalize(self, hook.remove).atexit = False

    @property
    def count(self) -> int:
        """So many in a row, where they are many; else 0."""
        most = max(self._counts.values(), default=0)
        return most if most >= STEPS else 0

    def reset(self) -> None:
        """A sum of the gradients begins, or is certain to."""
        self._sees_sums = True
        self._counts.clear()

    def note_forward(self, model: Any, inputs: Any) -> None:
        """DDP sums in the backward of this forward, unless it is in `no_sync`."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self.reset()

    def count_step(self, optimizer: Any) -> None:
        model = self._model()
        if model is None or self._is_blind or not self._moves(optimizer, model):
            return
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if not self.count:
            return
        if not self._sees_sums and ddp_iterations(model):
            # Where a loop calls model.forward(x), no hook of the model runs, and DDP sums.
            self._is_blind = True
            self._counts.clear()
        elif not self._warned:
            self._warned = True
            if dist.get_rank() == 0:
                print(warning(type(model.module).__name__), file=sys.stderr, flush=True)

    def _moves(self, optimizer: Any, model: DistributedDataParallel) -> bool:
        """Whether it steps a weight of the model that has a gradient."""
        if optimizer not in self._weights:
            own = {*model.parameters()}
            stepped = (p for group in optimizer.param_groups for p in group["params"] if p in own)
            self._weights[optimizer] = [weakref.ref(p) for p in stepped]
        weights = (weight() for weight in self._weights[optimizer])
        return any(p is not None and p.grad is not None for p in weights)


def _count(me: "weakref.ref[UnsummedSteps]", optimizer: Any) -> None:
    steps = me()
    if steps is not None:
        steps.count_step(optimizer)


def warning(name: str) -> str:
    return (
        f"tandem: {STEPS} steps of {name} were made and DDP summed none of its gradients: unless "
        "this loop sums them itself, each rank trains a model of its own. Call the DDP model and "
        "not model.module, and make the last forward of a step outside no_sync()."
    )


_BY_MODEL: "weakref.WeakKeyDictionary[Any, UnsummedSteps]" = weakref.WeakKeyDictionary()


def watch_steps(model: Any) -> Optional[UnsummedSteps]:
    """Of a DDP model, or a compiled one; None for others, and where it has one rank."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        return None
    if model not in _BY_MODEL and dist.get_world_size(model.process_group) > 1:
        _BY_MODEL[model] = UnsummedSteps(model)
    return _BY_MODEL.get(model)
