"""Find out what becomes of the sums in a model's gradients: a step uses them, or the loop zeroes
them.

In a GAN the generator's loss goes through the discriminator. The discriminator's gradients are
summed, too, and zeroed unused. Their rounding errors must not be added to its next gradients.

A step is seen in three ways: from the optimizer that the user named; from torch's other optimizers
(2.0 and later); from weights that changed in place. If no step was seen, missing gradients were
zeroed. All ranks run the same script, so they come to the same result without communication.
"""

import types
import weakref
from typing import Any, Callable, Dict, Iterable, Optional, Set, Tuple

import torch

from ..compat import register_step_hook
from .base import Unused


class SumUsage:
    """Follows one model's sums. Parameters and optimizers may outlive it, so their hooks refer to
    it weakly."""

    def __init__(self, optimizer: Any = None) -> None:
        self.saw_step = False
        self.in_step = False  # the next sum belongs to the same step as the last one
        self.dropped_sums = 0  # all of whose gradients were zeroed before a step
        self.saw_partial_step = False  # it changed a part of the weights that others changed whole
        self._parameters: Set[torch.Tensor] = set()  # that have a hook
        # The version of each parameter, and of its gradient if it has one, at the last sum.
        self._versions: Dict[torch.Tensor, Tuple[int, Optional[int]]] = {}
        self._without_sum: Set[torch.Tensor] = set()  # no gradient, or zeroed since the last sum
        self._stepped: Set[torch.Tensor] = set()  # since the last sum
        self._ever_stepped: Set[torch.Tensor] = set()
        # Hooks of torch's optimizers and of parameters outlive this object.
        usage = weakref.ref(self)
        note_step = SumUsage.note_step
        hooks = self._hooks = [register_step_hook(lambda stepped: _call(usage, note_step, stepped))]

        def remove_hooks() -> None:
            for hook in hooks:
                if hook is not None:
                    hook.remove()

        weakref.finalize(self, remove_hooks).atexit = False
        if hasattr(optimizer, "step"):
            wrap_step(optimizer, lambda: _call(usage, note_step, optimizer, True))

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look for a step whenever a backward is about to change one of these gradients."""
        usage = weakref.ref(self)
        for parameter in parameters:
            if parameter not in self._parameters:
                look = torch.utils.hooks.unserializable_hook(
                    lambda _: _call(usage, SumUsage.look_for_step)
                )
                self._hooks.append(parameter.register_hook(look))
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
        """Find out whether a step used the last sum, or else which of its gradients were zeroed."""
        # An optimizer that has no hook changes weights in place, which raises their versions.
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
        # Sums that no step used yet are added to: the next backward belongs to the same step.
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
    """Call `after` whenever this optimizer has stepped, even if others wrap its step, too."""
    step = optimizer.step

    def stepped(_: Any, *args: Any, **words: Any) -> Any:
        result = step(*args, **words)
        after()
        return result

    # torch's schedulers mark the step that they wrapped with an attribute, and look for it again.
    vars(stepped).update(getattr(getattr(step, "__func__", step), "__dict__", {}))
    optimizer.step = types.MethodType(stepped, optimizer)


def _call(usage_ref: "weakref.ref[SumUsage]", method: Callable[..., None], *args: Any) -> None:
    usage = usage_ref()
    if usage is not None:
        method(usage, *args)
