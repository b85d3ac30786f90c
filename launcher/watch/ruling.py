"""One line for people when a wait rules a run: said once, while the run goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from contract.digests import RunSums
from contract.text import seconds
from contract.waits import WORDS, MeanStep, largest_wait, mean_step

# A wait is named that ruled so many seconds, and so many steps.
LEAST_SECONDS, LEAST_STEPS = 60.0, 30
STEADY = 0.1  # by so much of its share a wait may differ between the halves of that time
KEPT = 720  # looks at the sums; of steps that take longer than 2 min nothing is said
LOOK_EVERY = 5.0  # seconds


class Ruling:
    """Looks through the sums of an attempt for a wait that rules. Each kind is said once."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._said: set[str] = set()
        self._looks: deque[tuple[float, RunSums]] = deque(maxlen=KEPT)
        self._next = float("-inf")

    def look(self, now: float, sums: RunSums) -> None:
        """To be called now and then; `now` is monotonic."""
        if now < self._next:
            return
        self._next = now + LOOK_EVERY
        while len(self._looks) > 1 and self._enough(now, sums, *self._looks[1]):
            self._looks.popleft()
        if self._looks and self._enough(now, sums, *self._looks[0]):
            self._judge(sums)
        self._looks.append((now, sums.copy()))

    def _judge(self, sums: RunSums) -> None:
        """Say what rules since the oldest look, if both halves of that time agree."""
        begin, middle = self._looks[0][1], self._looks[len(self._looks) // 2][1]
        parts = (sums.since(begin), middle.since(begin), sums.since(middle))
        steps = [step for step in map(mean_step, parts) if step is not None]
        kinds = {largest_wait(step.fractions) for step in steps}
        kind = kinds.pop()
        if len(steps) < len(parts) or kinds or kind is None or kind in self._said:
            return
        shares = [step.fractions[kind] for step in steps]
        if max(shares) - min(shares) <= STEADY * shares[0]:
            self._said.add(kind)
            self._say(f"{told(kind, steps[0])}; `make report` says what to do")

    @staticmethod
    def _enough(now: float, sums: RunSums, then: float, before: RunSums) -> bool:
        """Whether enough was done after a look."""
        if now - then < LEAST_SECONDS or not len(before.ranks) == len(sums.ranks) == sums.world:
            return False
        steps = [one.steps - before.ranks[rank].steps for rank, one in sums.ranks.items()]
        return min(steps) >= LEAST_STEPS


def told(kind: str, step: MeanStep) -> str:
    """`network: 1.2 of 1.4 s a step`"""
    wait, whole = getattr(step, kind), step.seconds + step.checkpoint
    return f"{WORDS[kind]}: {seconds(wait)} of {seconds(whole)} a step"
