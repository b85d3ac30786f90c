"""Find when each host's training loop ran, and store a bounded number of points of a chart.

usage.py reads a machine's lines in these windows. Times are seconds of the machine's monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from report.files import Entry, time_of
from report.read import Machine, RunRecord


@dataclass(frozen=True)
class Window:
    """The training loop of an attempt on a host."""

    attempt: int
    start: float
    end: float
    steps: int  # of the host's first rank
    # The first `warm_steps` steps, until the time `warm_end`, were the warm-up of a strategy.
    warm_steps: int = 0
    warm_end: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def after_warm_up(self) -> Window:
        """The window without the warm-up, unless there is none or it fills the window."""
        if not 0 < self.warm_steps < self.steps - 1:
            return self
        return Window(self.attempt, self.warm_end, self.end, self.steps - self.warm_steps)


def loop_windows(run: RunRecord) -> dict[str, list[Window]]:
    """Map each host to the windows of its attempts."""
    windows: dict[str, list[Window]] = {}
    # A script without timed steps is taken to train for as long as its guard runs.
    for (host, attempt), entry in run.exits.items() if run.untimed else ():
        began, exit_time = entry.mono_start, entry.mono_end
        if began is not None and exit_time is not None and exit_time > began:
            windows.setdefault(host, []).append(Window(attempt, began, exit_time, 0))
    for record in run.ranks:
        start = record.start.mono
        if start is None or any(w.attempt == record.attempt for w in windows.get(record.host, [])):
            continue
        # A rank that died left no end. Its loop then ends with its last line.
        end = record.end.mono
        end = start + sum(record.seconds.values()) if end is None else end
        if end > start:
            columns = record.steps
            # The warm-up is at the beginning, and ends before the first line that is not exact.
            lines = next((i for i, exact in enumerate(columns.exact) if not exact), len(columns))
            warm_steps = sum(columns.count[:lines])
            warm_end = start + columns.clock[lines - 1] if lines else start
            window = Window(record.attempt, start, end, sum(columns.count), warm_steps, warm_end)
            windows.setdefault(record.host, []).append(window)
    return windows


def within(machine: Machine, windows: list[Window]) -> Iterator[tuple[Window, float, Entry]]:
    """Yield each line that a machine recorded in a window, with its window and its time."""
    by_attempt = {window.attempt: window for window in windows}
    newest: dict[int, float] = {}
    for line in machine:
        attempt, mono = line["attempt"], time_of(line.get("mono"))
        # Lines outside the loop show a program that starts or ends.
        window = by_attempt.get(attempt)
        if window is None or mono is None or not window.start <= mono <= window.end:
            continue
        # Clocks do not go back, so a line with an earlier time is damaged or forged.
        if mono >= newest.get(attempt, 0.0):
            newest[attempt] = mono
            yield window, mono, line


Points = list[tuple[float, float]]  # (seconds, value)

MOST_POINTS = 1000  # a series of twice as many drops every second one


class Series:
    """Points, evenly thinned while they are added, because a long run has millions of samples."""

    def __init__(self) -> None:
        self.points: Points = []
        # `count` points were added, of which every `stride`-th point is stored.
        self.count, self.stride = 0, 1

    def add(self, seconds: float, value: float) -> None:
        if self.count % self.stride == 0:
            self.points.append((seconds, value))
        if len(self.points) > 2 * MOST_POINTS:
            self.points, self.stride = self.points[::2], 2 * self.stride
        self.count += 1


def thin(points: list[Any], limit: int) -> list[Any]:
    """Return at most `limit` of the points, evenly spaced."""
    stride = -(-len(points) // limit)
    return points[::stride] if stride > 1 else points
