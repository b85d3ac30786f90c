"""Find out whether an optimizer step uses the sums in a model's gradients, or the loop zeroes them.

In a GAN the generator's loss goes through the discriminator. The discriminator's gradients are
summed, too, and zeroed unused. Rounding errors of these sums must not be added to the next
gradients of the discriminator, so attach.py asks `SumUsage` before each step.

`SumUsage` sees a step in three ways: the optimizer that the user named steps; another optimizer of
torch steps (2.0 and later); weights have changed in place. If it saw no step, the loop has zeroed
missing gradients. All ranks run the same script, so they find the same without communication.
"""

import contextlib
import types
import weakref
from typing import Any, Callable, Dict, Iterable, Optional, Set, Tuple

import torch

from ..compat import register_step_hook
from .base import Unused


class SumUsage:
    """Follows one model's sums. `optimizer`: the user named it as this model's."""

    def __init__(self, optimizer: Any = None) -> None:
        self.saw_step = False  # ever
        self.in_step = False  # the next sum belongs to the same step as the last sum
        self.dropped_sums = 0  # how many sums the loop has zeroed before a step used them
        self.saw_partial_step = False  # a step changed some of the weights that were changed whole
        self._parameters: Set[torch.Tensor] = set()  # that have a hook
        # The version of each parameter, and of its gradient if it has one, at the last sum. torch
        # raises a tensor's version with each change in place.
        self._versions: Dict[torch.Tensor, Tuple[int, Optional[int]]] = {}
        self._without_sum: Set[torch.Tensor] = set()  # no gradient, or zeroed since the last sum
        self._stepped: Set[torch.Tensor] = set()  # since the last sum
        self._ever_stepped: Set[torch.Tensor] = set()
        # Optimizers and parameters outlive this object, so their hooks refer to it weakly, and a
        # finalizer removes the hooks.
        usage = weakref.ref(self)
        note_step = SumUsage.note_step
        hook = register_step_hook(lambda stepped: call_if_alive(usage, note_step, stepped))
        self._hooks = contextlib.ExitStack()
        if hook is not None:
            self._hooks.callback(hook.remove)
        weakref.finalize(self, self._hooks.close).atexit = False
        if hasattr(optimizer, "step"):
            wrap_step(optimizer, lambda: call_if_alive(usage, note_step, optimizer, True))

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look for a step whenever a backward is about to change one of these gradients."""
        usage = weakref.ref(self)
        for parameter in parameters:
            if parameter not in self._parameters:
                look = torch.utils.hooks.unserializable_hook(
                    lambda _: call_if_alive(usage, SumUsage.look_for_step)
                )
                self._hooks.callback(parameter.register_hook(look).remove)
                self._parameters.add(parameter)

    def note_sums(self) -> None:
        """Remember the versions of weights and gradients, now that these hold a backward's sums."""
        for parameter in self._parameters:
            grad_version = None if parameter.grad is None else parameter.grad._version
            self._versions[parameter] = parameter._version, grad_version
        self._without_sum = {p for p, (_, grad) in self._versions.items() if grad is None}
        self._stepped = set()

    def note_step(self, optimizer: Any, is_named: bool = False) -> None:
        """Note that an optimizer has stepped; `is_named`: the user named it as this model's."""
        groups = getattr(optimizer, "param_groups", ())
        stepped = self._versions.keys() & {p for group in groups for p in group["params"]}
        if is_named and not stepped:
            stepped = set(self._versions)  # it steps copies, such as master weights in fp32
        # An optimizer skips parameters without a gradient.
        self._stepped |= {p for p in stepped if p.grad is not None}

    def look_for_step(self) -> None:
        """Find out whether a step used the last sum, and otherwise which gradients were zeroed."""
        # An optimizer without a hook changes weights in place.
        if not self._stepped:
            versions = self._versions.items()
            self._stepped = {p for p, (version, _) in versions if p._version != version}
        if self._stepped:
            return
        changed = {}
        for parameter in self._versions.keys() - self._without_sum:
            grad = parameter.grad
            if grad is None:
                self._without_sum.add(parameter)
            elif grad._version != self._versions[parameter][1]:
                changed[parameter] = grad.detach()
        # Reading values waits for the device, so only gradients that changed in place are read.
        if changed:
            nonzero = torch.stack([grad.any() for grad in changed.values()]).tolist()
            self._without_sum |= {p for p, is_nonzero in zip(changed, nonzero) if not is_nonzero}

    def find_unused(self) -> Unused:
        """Return the parameters whose last sum no step has used, as `base.Unused`."""
        self.look_for_step()
        waiting = () if self._stepped else self._versions.keys() - self._without_sum
        return {**dict.fromkeys(self._without_sum, False), **dict.fromkeys(waiting, True)}

    def close(self, skipped: bool) -> Unused:
        """Return `find_unused`, and prepare for the next sum. `skipped`: a GradScaler skipped the
        step because gradients overflowed."""
        unused = self.find_unused()
        # If no step used the sums yet, the next backward adds to them, and so to the same step.
        self.in_step = bool(self._versions) and not self._stepped and not skipped
        if self._stepped:
            self.saw_step = True
            unstepped = self._versions.keys() - self._stepped - self._without_sum
            # With several optimizers a GradScaler skips only those whose gradients overflowed.
            is_partial = not skipped and bool(unstepped & self._ever_stepped)
            self.saw_partial_step = self.saw_partial_step or is_partial
            self._ever_stepped |= self._stepped
        elif self._versions and len(self._without_sum) == len(self._versions):
            self.dropped_sums += not skipped
        self._versions = {}
        return unused


def wrap_step(optimizer: Any, after: Callable[[], None]) -> None:
    """Call `after` whenever this optimizer has stepped, even if a library wraps its step, too."""
    step = optimizer.step

    def stepped(_: Any, *args: Any, **words: Any) -> Any:
        result = step(*args, **words)
        after()
        return result

    # torch's schedulers mark the step that they wrapped with an attribute, and look for it again.
    vars(stepped).update(getattr(getattr(step, "__func__", step), "__dict__", {}))
    optimizer.step = types.MethodType(stepped, optimizer)


def call_if_alive(reference: Callable[[], Any], method: Callable[..., None], *args: Any) -> None:
    """Call a method of a weakly referenced object, unless the object is gone."""
    instance = reference()
    if instance is not None:
        method(instance, *args)
