"""Detect steps whose gradients were not summed, so that each rank trains its own model.

DDP sums gradients only if its own forward was called, outside `no_sync`. A loop that calls
`model.module(x)`, or that never leaves `no_sync`, runs to its end without an error. timings.py and
attach.py therefore report forwards and sums to the model's `UnsummedSteps`, which prints a warning.
"""

import sys
import weakref
from typing import Any, List, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compat import count_ddp_forwards, register_step_hook
from .usage import call_if_alive

WARN_AFTER_STEPS = 5  # in a row; a loop may make fewer unsummed steps on purpose


class UnsummedSteps:
    """Counts a model's optimizer steps since its gradients were last summed. Needs torch 2.0: older
    torches do not report steps."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        # For each optimizer the weights of this model that it steps, and its steps: several
        # optimizers of one model make one step together.
        self._weights: weakref.WeakKeyDictionary[Any, List[Any]] = weakref.WeakKeyDictionary()
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._saw_sum = self._has_warned = False
        self._is_blind = False  # the loop calls DDP so that no hook of the model runs
        # torch keeps a global hook until it is removed, so the hook refers to this object weakly.
        self_ref, count_step = weakref.ref(self), UnsummedSteps.count_step
        hook = register_step_hook(lambda stepped: call_if_alive(self_ref, count_step, stepped))
        if hook is not None:
            weakref.finalize(self, hook.remove).atexit = False

    @property
    def count(self) -> int:
        """Return the number of unsummed steps in a row, or 0 if it is below WARN_AFTER_STEPS."""
        count = max(self._counts.values(), default=0)
        return count if count >= WARN_AFTER_STEPS else 0

    def reset(self) -> None:
        """Note that a sum of the gradients begins, or is certain to."""
        self._saw_sum = True
        self._counts.clear()

    def note_forward(self, model: Any, inputs: Any) -> None:
        """Note a forward in whose backward DDP sums; a forward pre-hook of the model."""
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self.reset()

    def count_step(self, optimizer: Any) -> None:
        """Count a step of an optimizer, if it steps a weight of the model that has a gradient."""
        model = self._model()
        if model is None or self._is_blind:
            return
        # Steps of other models' optimizers do not count, nor steps without a gradient of this one.
        if optimizer not in self._weights:
            parameters = {*model.parameters()}
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            self._weights[optimizer] = [weakref.ref(p) for p in stepped if p in parameters]
        weights = (weight() for weight in self._weights[optimizer])
        if not any(weight is not None and weight.grad is not None for weight in weights):
            return
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if not self.count:
            return
        if not self._saw_sum and count_ddp_forwards(model):
            # The loop calls model.forward(x), which runs no hook of the model. But DDP does sum.
            self._is_blind = True
            self._counts.clear()
        elif not self._has_warned:
            self._has_warned = True
            if dist.get_rank() == 0:
                name = type(model.module).__name__
                print(
                    f"tandem: DDP did not sum the gradients of {name} in {WARN_AFTER_STEPS} steps. "
                    "Unless this loop sums them, each rank trains a separate model. Call the DDP "
                    "model instead of model.module, and run the last forward of a step outside "
                    "no_sync().",
                    file=sys.stderr,
                    flush=True,
                )


_BY_MODEL: "weakref.WeakKeyDictionary[Any, UnsummedSteps]" = weakref.WeakKeyDictionary()


def watch_steps(model: Any) -> Optional[UnsummedSteps]:
    """Return the counter of a DDP model, compiled or not; None for other models and one rank."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not isinstance(model, DistributedDataParallel):
        return None
    # One rank sums nothing, and each step would look unsummed.
    if model not in _BY_MODEL and dist.get_world_size(model.process_group) > 1:
        _BY_MODEL[model] = UnsummedSteps(model)
    return _BY_MODEL.get(model)
