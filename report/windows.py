"""When each host's training loop ran, on that machine's monotonic clock, and the values that were
recorded meanwhile, of which a bounded number is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from report.files import Entry, time_of
from report.read import Machine, Run, attempt_of


@dataclass(frozen=True)
class Window:
    """The loop of one attempt on one host: monotonic seconds, and the steps its first rank took.
    `warm_steps` of them were the warm-up of a strategy, which ended at `warm_end`."""

    attempt: int
    start: float
    end: float
    steps: int
    warm_steps: int = 0
    warm_end: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def after_warm_up(self) -> Window:
        """The window without the warm-up; all of it where there is no warm-up, or nothing else."""
        if not 0 < self.warm_steps < self.steps - 1:
            return self
        return Window(self.attempt, self.warm_end, self.end, self.steps - self.warm_steps)


def loop_windows(run: Run) -> dict[str, list[Window]]:
    """Host -> its windows. A rank without an end is taken to have ended with its last line. A
    script whose steps nobody timed has the time of its guard."""
    windows: dict[str, list[Window]] = {}
    for (host, attempt), entry in run.exits.items() if run.untimed else ():
        began, exit_time = entry.mono_start, entry.mono_end
        if began is not None and exit_time is not None and exit_time > began:
            windows.setdefault(host, []).append(Window(attempt, began, exit_time, 0))
    for record in run.ranks:
        start = record.start.mono
        if start is None or any(w.attempt == record.attempt for w in windows.get(record.host, [])):
            continue
        end = record.end.mono
        end = start + sum(record.seconds.values()) if end is None else end
        if end > start:
            columns = record.steps
            lines = next((at for at, exact in enumerate(columns.exact) if not exact), len(columns))
            warm = sum(columns.count[:lines])
            warm_end = start + columns.clock[lines - 1] if lines else start
            window = Window(record.attempt, start, end, sum(columns.count), warm, warm_end)
            windows.setdefault(record.host, []).append(window)
    return windows


def within(machine: Machine, windows: list[Window]) -> Iterator[tuple[Window, float, Entry]]:
    """Each of the samples that was taken within the loop of its attempt: that loop, when
    it was taken (`mono`), and its line. Times never go back."""
    by_attempt = {window.attempt: window for window in windows}
    last: dict[int, float] = {}
    for line in machine:
        attempt, mono = attempt_of(line), time_of(line.get("mono"))
        window = by_attempt.get(attempt)
        if window is None or mono is None or not window.start <= mono <= window.end:
            continue
        if mono >= last.get(attempt, 0.0):
            last[attempt] = mono
            yield window, mono, line


Points = list[tuple[float, float]]  # (seconds, value)

MOST = 1000  # beyond twice as many every second one is kept


class Series:
    """Points, evenly thinned as they are added: a long run has millions of samples."""

    def __init__(self) -> None:
        self.points: Points = []
        self.count, self.stride = 0, 1  # how many were added; of how many one is kept

    def add(self, seconds: float, value: float) -> None:
        if self.count % self.stride == 0:
            self.points.append((seconds, value))
        if len(self.points) > 2 * MOST:
            self.points, self.stride = self.points[::2], 2 * self.stride
        self.count += 1


def thin(points: Points, most: int) -> Points:
    """At most so many of them, evenly spaced."""
    stride = -(-len(points) // most)
    return points[::stride] if stride > 1 else points
