"""A stopwatch that is in exactly one category at each moment.

The categories therefore add up by construction, and none is a remainder. On CUDA, each switch
records an event on the current stream, which takes microseconds and does not synchronise. Events
are read once the device has passed them. Between two such readings, the device's timeline is as
long as the host's.
"""

import contextlib
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import torch


class Lap(NamedTuple):
    """The categories since the last lap, and the moments at which each began and ended: seconds of
    time.monotonic(), or CUDA's events."""

    categories: List[str]
    moments: List[Any]  # one more than categories


class Clock:
    """Measures the seconds of each category, on the host or on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forget everything before this moment."""
        self.started = time.monotonic()
        self._categories, self._moments = ["other"], [self._record_moment()]

    def _record_moment(self) -> Any:
        """Return the time on the host, or an event that the device passes after its work so far."""
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def category(self) -> str:
        """Return the current category."""
        return self._categories[-1]

    def enter(self, category: str) -> None:
        """Count time as `category` from now on."""
        if category != self._categories[-1]:
            self._categories.append(category)
            self._moments.append(self._record_moment())

    @contextlib.contextmanager
    def within(self, category: str) -> Iterator[None]:
        """Count time within the block as `category`, and later time as the category before."""
        outer_category = self._categories[-1]
        self.enter(category)
        yield
        self.enter(outer_category)

    def lap(self) -> Lap:
        """Return everything since the last lap. The current category continues in the next lap."""
        end = self._record_moment()
        lap = Lap(self._categories, [*self._moments, end])
        self._categories, self._moments = [lap.categories[-1]], [end]
        return lap

    def passed(self, lap: Lap) -> bool:
        """Return whether the device has passed the lap's end, so that `read` would not wait."""
        return not self._cuda or bool(lap.moments[-1].query())

    def read(self, lap: Lap, patience: Optional[float] = None) -> Dict[str, float]:
        """Return the seconds of each category. On CUDA this waits until the device has passed the
        lap's end, and returns {} if that takes longer than `patience` seconds."""
        if self._cuda and patience is None:
            lap.moments[-1].synchronize()
        elif self._cuda:
            deadline = time.monotonic() + float(patience or 0)
            while not self.passed(lap):
                if time.monotonic() > deadline:
                    return {}
                time.sleep(0.01)
        seconds: Dict[str, float] = {}
        for category, begin, end in zip(lap.categories, lap.moments, lap.moments[1:]):
            duration = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds[category] = seconds.get(category, 0.0) + duration
        return seconds
