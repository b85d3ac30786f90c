"""The stopwatch, which is in exactly one category at each moment.

The categories therefore add up by construction, and none is a remainder. On CUDA, each switch
records an event on the current stream, which takes microseconds and no synchronisation; events are
read at log points, or once the device has passed them. Between two log points, the device's
timeline is as long as the host's.
"""

import contextlib
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

import torch


class Lap(NamedTuple):
    """The categories since the last lap, and the times at which each began and ended."""

    categories: List[str]
    marks: List[Any]  # one more than categories


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Forget all before this moment."""
        self.started = time.monotonic()
        self._categories, self._marks = ["other"], [self._now()]

    def _now(self) -> Any:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(self, category: str) -> None:
        """From now on time belongs to `category`."""
        if category != self._categories[-1]:
            self._categories.append(category)
            self._marks.append(self._now())

    @contextlib.contextmanager
    def within(self, category: str) -> Iterator[None]:
        """Time within belongs to `category`; afterwards it belongs to the previous one again."""
        before = self._categories[-1]
        self.enter(category)
        yield
        self.enter(before)

    def lap(self) -> Lap:
        """Everything since the last lap; the current category continues into the next one."""
        now = self._now()
        done = Lap(self._categories, [*self._marks, now])
        self._categories, self._marks = [done.categories[-1]], [now]
        return done

    def passed(self, lap: Lap) -> bool:
        """Whether the device has passed the lap's end, so that `read` would not wait for it."""
        return not self._cuda or bool(lap.marks[-1].query())

    def read(self, lap: Lap, patience: Optional[float] = None) -> Dict[str, float]:
        """Seconds per category. On CUDA this waits until the device has passed the lap's end;
        {} where that takes longer than `patience` seconds."""
        if self._cuda and patience is None:
            lap.marks[-1].synchronize()
        elif self._cuda:
            until = time.monotonic() + float(patience or 0)
            while not self.passed(lap):
                if time.monotonic() > until:
                    return {}
                time.sleep(0.01)
        seconds: Dict[str, float] = {}
        for category, begin, end in zip(lap.categories, lap.marks, lap.marks[1:]):
            spent = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds[category] = seconds.get(category, 0.0) + spent
        return seconds
