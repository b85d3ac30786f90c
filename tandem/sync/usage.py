"""What becomes of the sums in a model's gradients: a step uses them, or they are thrown away.

In a GAN the generator's loss goes through the discriminator, whose gradients are summed, too, and
zeroed unused: what a strategy left out of those must not be added to the next ones.

A step is heard from the optimizer that was named, from any other of torch's (2.0 and later), and
from weights that have changed in place. Where no step was heard, gradients that are gone were
thrown away. All ranks run one script, so all of them judge alike, without a word between them.
"""

import types
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple

import torch

from ..compat import on_any_step
from .base import Unused


class Usage:
    """Of one model's sums. Its parameters and optimizers may outlive it."""

    def __init__(self, optimizer: Any = None) -> None:
        self.heard = False  # whether any step was
        self.in_step = False  # whether the coming sum is for the same step as the last one
        self.dropped = 0  # sums that were thrown away
        self.mixed = False  # whether a step moved some of the weights that had moved together
        self._watched: Set[torch.Tensor] = set()  # parameters
        # Of the last sum: the version of each parameter, and of its gradient if it has one.
        self._versions: Dict[torch.Tensor, Tuple[int, Optional[int]]] = {}
        self._gone: Set[torch.Tensor] = set()  # whose gradient is not there (any more)
        self._moved: Set[torch.Tensor] = set()
        self._ever_moved: Set[torch.Tensor] = set()
        me = weakref.ref(self)
        self._hooks = [on_any_step(lambda stepped: _call(me, Usage.hear, stepped))]
        weakref.finalize(self, _remove, self._hooks).atexit = False
        if hasattr(optimizer, "step"):
            wrap_step(optimizer, lambda: _call(me, Usage.hear, optimizer, True))

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look at the gradients before any backward adds to one of these."""
        me = weakref.ref(self)
        for one in parameters:
            if one not in self._watched:
                look = torch.utils.hooks.unserializable_hook(lambda _: _call(me, Usage.look))
                self._hooks.append(one.register_hook(look))
                self._watched.add(one)

    def summed(self) -> None:
        """The sums of a backward are in the gradients."""
        for one in self._watched:
            grad = None if one.grad is None else one.grad._version
            self._versions[one] = one._version, grad
        self._gone = {one for one, (_, grad) in self._versions.items() if grad is None}
        self._moved = set()

    def hear(self, optimizer: Any, named: bool = False) -> None:
        """An optimizer has stepped."""
        groups = getattr(optimizer, "param_groups", ())
        own = self._versions.keys() & {one for group in groups for one in group["params"]}
        if named and not own:
            own = set(self._versions)  # it steps copies of the weights
        self._moved |= {one for one in own if one.grad is not None}

    def look(self) -> None:
        """See whether a step used the last sum, or who zeroed it before one did."""
        if not self._moved:
            versions = self._versions.items()
            self._moved = {one for one, (version, _) in versions if one._version != version}
        if not self._moved:
            self._gone |= self._zeroed()

    def _zeroed(self) -> Set[torch.Tensor]:
        """Whose last sum is gone; reads the device only where gradients were changed in place."""
        grads = {one: one.grad for one in self._versions if one not in self._gone}
        gone = {one for one, grad in grads.items() if grad is None}
        changed = {
            one: grad.detach()
            for one, grad in grads.items()
            if grad is not None and grad._version != self._versions[one][1]
        }
        if changed:
            some = torch.stack([grad.any() for grad in changed.values()]).tolist()
            gone |= {one for one, kept in zip(changed, some) if not kept}
        return gone

    def unused(self) -> Unused:
        """Of the last sum."""
        self.look()
        waiting = () if self._moved else self._versions.keys() - self._gone
        return {**dict.fromkeys(self._gone, False), **dict.fromkeys(waiting, True)}

    def close(self, skipped: bool) -> Unused:
        """The same, before the next sum. `skipped`: the step was left out for an overflow."""
        unused = self.unused()
        self.in_step = bool(self._versions) and not self._moved and not skipped
        if self._moved:
            self.heard = True
            left = self._versions.keys() - self._moved - self._gone
            # (A GradScaler leaves out the step of that optimizer whose gradients overflowed.)
            self.mixed = self.mixed or (not skipped and bool(left & self._ever_moved))
            self._ever_moved |= self._moved
        elif self._versions and len(self._gone) == len(self._versions):
            self.dropped += not skipped
        self._versions = {}
        return unused


def wrap_step(optimizer: Any, after: Callable[[], None]) -> None:
    """Have `after` called whenever this optimizer has stepped, whatever else wraps its step."""
    step = optimizer.step

    def stepped(_: Any, *args: Any, **words: Any) -> Any:
        result = step(*args, **words)
        after()
        return result

    left = getattr(step, "__func__", step)  # by what schedulers leave there they know it again
    vars(stepped).update(getattr(left, "__dict__", {}))
    optimizer.step = types.MethodType(stepped, optimizer)


def _remove(hooks: List[Any]) -> None:
    for hook in hooks:
        if hook is not None:
            hook.remove()


def _call(me: "weakref.ref[Usage]", method: Callable[..., None], *args: Any) -> None:
    usage = me()
    if usage is not None:
        method(usage, *args)
