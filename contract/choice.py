"""Which strategy of --sync is taken where nobody names one: the most exact that hides.

Of those whose label covers a run (contract/prices.py), the one that leaves out the fewest bits and
yet takes at most TOLERANCE times as long as the fastest. The launcher (SYNC=auto), the report's
advice and `make plan` follow it.
"""

from typing import Callable, Mapping, Optional, TypeVar

from contract import prices
from contract.strategies import Payload, Strategy

TOLERANCE = 1.05
Key = TypeVar("Key")
SAMPLE = Payload(4e6)  # by which strategies are compared: a million values


def is_acceptable(strategy: Strategy, family: str, steps: Optional[float] = None) -> bool:
    """Whether a strategy is exact, or safe with such an optimizer in runs of so many steps: those
    that were measured were as long, or shorter. `steps`: None where they are not known."""
    if strategy.exact:
        return True
    if prices.label_of(strategy, family) != "safe":
        return False
    return steps is None or steps >= measured_steps()


def measured_steps() -> int:
    """Steps of the runs by which labels are given."""
    return int(prices.read()["task"]["steps"])


def exactness(strategy: Strategy) -> float:
    """More for one that leaves less out."""
    return float("inf") if strategy.exact else strategy.bytes_per_step(2, SAMPLE)


def most_exact(seconds: Mapping[Key, float], strategy_of: Callable[[Key], Strategy]) -> Key:
    """Of what takes so many seconds, or any multiple of them; among equals the fastest."""
    least = min(seconds.values())
    near = [key for key, taken in seconds.items() if taken <= TOLERANCE * least]
    return max(near, key=lambda key: (exactness(strategy_of(key)), -seconds[key]))
