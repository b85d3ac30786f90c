"""Stopping on SIGTERM at a step that all ranks agree on."""

import collections
import signal
from typing import Any, Deque

import torch

from .world import World

# Keys of the store. Their values are counters, since torch 1.12's stores have no `check`, and `get`
# waits for a missing key.
STOP_REQUESTS, STOP_MEETING = "asked to stop", "stop at meeting"
# A CUDA host may be this many meetings ahead of the last one that its device has finished.
LEAD = 2


class Stop:
    """Finds a step at which all ranks can stop. Every rank calls `should_stop` after each meeting
    of all ranks, such as an all-reduce: no rank leaves a meeting before all have arrived.

    The rank that got the signal writes the number of a later meeting to the store, and all ranks
    stop at that meeting. NCCL's collectives return at once, so a host could run ahead of its device
    and of the other ranks. `should_stop` limits this lead to LEAD meetings. Therefore no rank can
    reach the agreed meeting before its number is written, and all ranks read the number in time.
    """

    def __init__(self, world: World) -> None:
        self.world, self.requested, self.meeting = world, False, 0
        self.lead = LEAD if world.device.type == "cuda" else 0
        self._marks: Deque[Any] = collections.deque()
        signal.signal(signal.SIGTERM, self.request)

    def request(self, *_: object) -> None:
        """Ask for a stop at a step that the ranks will agree on; also the handler of SIGTERM."""
        self.requested = True

    def should_stop(self) -> bool:
        """Return True when all ranks stop here. Collective."""
        self.meeting += 1
        store = self.world.store
        if store is None:
            return self.requested
        # Wait until the device has finished all but what follows the last `lead` meetings.
        if self.lead:
            self._marks.append(self._mark())
            if len(self._marks) > self.lead:
                self._marks.popleft().synchronize()
        agreed_meeting = store.add(STOP_MEETING, 0)  # reads the counter
        if agreed_meeting:
            return agreed_meeting <= self.meeting
        # Only the first of several requests sets the meeting.
        if self.requested and store.add(STOP_REQUESTS, 1) == 1:
            store.add(STOP_MEETING, self.meeting + 1 + self.lead)
        return False

    def _mark(self) -> Any:
        """Record an event after all work queued so far; its `synchronize` sleeps until then."""
        mark = torch.cuda.Event(blocking=True)
        mark.record()
        return mark
