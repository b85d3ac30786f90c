"""Values over time, of which a bounded number is kept."""

from __future__ import annotations

Points = list[tuple[float, float]]  # (seconds, value)

MOST = 1000  # beyond twice as many every second one is kept


class Series:
    """What was added, evenly thinned while it is added: a long run has millions of samples."""

    def __init__(self) -> None:
        self.points: Points = []
        self.seen, self.every = 0, 1  # how many were added; of how many one is kept

    def add(self, seconds: float, value: float) -> None:
        if self.seen % self.every == 0:
            self.points.append((seconds, value))
        if len(self.points) > 2 * MOST:
            self.points, self.every = self.points[::2], 2 * self.every
        self.seen += 1


def thin(points: Points, most: int) -> Points:
    """At most so many of them, evenly spaced."""
    stride = -(-len(points) // most)
    return points[::stride] if stride > 1 else points
