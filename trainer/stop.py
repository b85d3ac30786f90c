"""Stopping on SIGTERM at a step that all ranks agree on."""

import collections
import signal
from types import FrameType
from typing import Any, Callable, Deque, Optional

import torch

from .world import World

# Counters, since torch 1.12's stores have no `check` and `get` waits for a missing key.
ASKED, STEP = "asked to stop", "stop before step"
# Steps that a CUDA host may have begun beyond the last one that its device has finished.
LEAD = 2


def every_step(step: int) -> int:
    """The ranks meet within each step, as by an all-reduce of its gradients."""
    return step


class Stop:
    """Ask `before(step)` at the beginning of each step, on every rank.

    The rank that was told writes a later step to the store, before which all leave, and then goes
    on. `meets(step)` is the first step from `step` on that no rank can begin to compute before
    every rank has done all steps ahead of it. NCCL's collectives return at once, so a host would
    run ahead of its device, and so of the other ranks: `before` holds it LEAD steps ahead at most.
    No rank can therefore reach the agreed step before the note is written, and all read it there.
    """

    def __init__(self, world: World, meets: Callable[[int], int] = every_step) -> None:
        self.world, self.meets, self.told = world, meets, False
        self.lead = LEAD if world.device.type == "cuda" else 0
        self._marks: Deque[Any] = collections.deque()
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, number: int, frame: Optional[FrameType]) -> None:
        self.told = True

    def before(self, step: int) -> bool:
        """True when all ranks leave now, before doing `step`."""
        store = self.world.store
        if store is None:
            return self.told
        self._hold_back()
        agreed = store.add(STEP, 0)
        if agreed:
            return agreed <= step
        if self.told and store.add(ASKED, 1) == 1:
            store.add(STEP, self.meets(self.meets(step + 1) + self.lead))
        return False

    def _hold_back(self) -> None:
        """Wait until the device has finished all but the last `lead` of the steps begun."""
        if self.lead:
            self._marks.append(self._mark())
            if len(self._marks) > self.lead:
                self._marks.popleft().synchronize()

    def _mark(self) -> Any:
        """The end of what the device was given so far; `synchronize` sleeps until it is there."""
        mark = torch.cuda.Event(blocking=True)
        mark.record()
        return mark
