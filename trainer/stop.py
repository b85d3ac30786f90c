"""Stopping on SIGTERM at a step that all ranks agree on."""

import signal
from types import FrameType
from typing import Optional

from .world import World

EXIT_STOPPED = 75
# Counters, since torch 1.12's stores have no `check` and `get` waits for a missing key.
ASKED, STEP = "asked to stop", "stop before step"


class Stop:
    """Ask `before(step)` at the beginning of each step, on every rank.

    The rank that was told writes "leave before the next step" to the store and then takes part in
    this one. No rank can finish this step without it, so all read the note before the next.
    """

    def __init__(self, world: World) -> None:
        self.world, self.told = world, False
        signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, number: int, frame: Optional[FrameType]) -> None:
        self.told = True

    def before(self, step: int) -> bool:
        """True when all ranks leave now, before doing `step`."""
        store = self.world.store
        if store is None:
            return self.told
        agreed = store.add(STEP, 0)
        if agreed:
            return agreed <= step
        if self.told and store.add(ASKED, 1) == 1:
            store.add(STEP, step + 1)
        return False
