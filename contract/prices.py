"""What each strategy of --sync costs in accuracy: the measurements in prices.json, and the labels;
and which strategy is taken where nobody names one: of those whose label covers a run, the one that
leaves out the fewest bits and yet takes at most TOLERANCE times as long as the fastest (SYNC=auto,
the report's advice, `make plan`).

bench/accuracy/tables.py writes prices.json, from paired runs (docs/slow-networks.md). A
label holds for its task and its family of optimizers (OPTIMIZERS in options.py), and promises
nothing about others.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, TypeVar

from contract import strategies
from contract.strategies import ADAM, SGD, Payload, Strategy

TABLE = Path(__file__).with_name("prices.json")
# A strategy is safe if the lower end of its 95 % interval, in points of top-1, is at least this.
SAFE = -0.3
TOLERANCE = 1.05
SAMPLE = Payload(4e6)  # by which strategies are compared: a million values
Key = TypeVar("Key")


class AccuracyCost(NamedTuple):
    """The price of one strategy. `difference`: points of top-1 relative to allreduce after equally
    many samples, the mean over `seeds` pairs; `low`, `high`: its 95 % interval, None for a single
    pair. `samples`: by which factor it needs more samples to reach allreduce's top-1, where longer
    runs did reach it."""

    seeds: int = 0
    difference: float = 0.0
    low: Optional[float] = None
    high: Optional[float] = None
    samples: Optional[float] = None

    @property
    def label(self) -> str:
        """safe, unsettled, costs samples, experimental or not measured."""
        if self.seeds == 0:
            return "not measured"
        if self.low is not None and self.low >= SAFE:
            return "safe"
        if self.high is None or self.high >= 0:
            return "unsettled"
        return "experimental" if self.samples is None else "costs samples"


def read() -> Dict[str, Any]:
    """`task`: what was trained; an AccuracyCost's fields by spec with SGD (`strategies`, and on the
    second task `fonts`) and with AdamW (`adam`, `adam_fonts`); `text`: with AdamW, per cent more of
    a language model's loss."""
    found: Dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


# On the first task, and on the second.
PARTS = {SGD: ("strategies", "fonts"), ADAM: ("adam", "adam_fonts")}


def price_of(strategy: Strategy, family: str = SGD, task: int = 0) -> AccuracyCost:
    """As measured for exactly these arguments, with an optimizer of this family."""
    price = read().get(PARTS[family][task], {}).get(strategy.of(family).spec)
    return AccuracyCost(**price) if price else AccuracyCost()


def deciding_task(first: AccuracyCost, second: AccuracyCost) -> AccuracyCost:
    """Which of two tasks' prices gives the label: what is safe on one must be on both."""
    return second if first.label == "safe" and second.label != "not measured" else first


def label_of(strategy: Strategy, family: str = SGD) -> str:
    if strategy.exact:
        return "exact"
    return deciding_task(*(price_of(strategy, family, task) for task in range(2))).label


def with_adam(strategy: Strategy) -> str:
    """What was seen of it with Adam's family, on the task that decides, as a clause."""
    first = price_of(strategy, ADAM)
    price = deciding_task(first, price_of(strategy, ADAM, task=1))
    if not price.seeds:
        return "too little was measured to say"
    more = read().get("text", {}).get(strategy.of(ADAM).spec)
    text = "" if more is None else f" and {more:+g} % of a small language model's loss"
    steps = read()["task"]["steps"]
    where = "generated images" if price is first else "the letters of fonts"
    return (
        f"{price.difference:+.2f} points of top-1 on {where}{text}, against "
        f"{strategies.EXACT} after {steps:,} steps"
    )


def with_sgd(strategy: Strategy) -> str:
    """What was seen of one that is not safe, as a clause."""
    first = price_of(strategy)
    price = deciding_task(first, price_of(strategy, task=1))
    if not price.seeds:
        return "what it costs in accuracy was not measured"
    wide = "" if price.low is None else f" ({price.low:+.2f} to {price.high:+.2f})"
    where = "" if price is first else " on a second task"
    points = f"{price.difference:+.2f} points of top-1{wide}{where} beside {strategies.EXACT}"
    return f"{points} were measured: {price.label}"


def tasks(strategy: Strategy, family: str = SGD) -> str:
    """On how many tasks it was measured, in words."""
    return "two tasks" if price_of(strategy, family, task=1).seeds else "one task"


def caveats(strategy: Strategy, family: str, steps: float) -> List[str]:
    """A sentence on a run for which the strategy's label says less than it seems to."""
    name, label = f"--sync {strategy.of(family).spec}", label_of(strategy, family)
    if label not in ("exact", "safe"):
        known = with_adam(strategy) if family == ADAM else with_sgd(strategy)
        whose = " with Adam" if family == ADAM else ""
        return [f"{name}{whose}: {known} (docs/slow-networks.md)"]
    if label == "exact" or steps >= read()["task"]["steps"]:
        return []
    return [
        f"{name}: what it costs in accuracy was measured over {read()['task']['steps']:,} steps; "
        f"this run has {steps:,.0f}, and a shorter one may lose more (docs/slow-networks.md)"
    ]


def is_acceptable(strategy: Strategy, family: str, steps: Optional[float] = None) -> bool:
    """Whether a strategy is exact, or safe with such an optimizer in runs of so many steps: those
    that were measured were as long, or shorter. `steps`: None where they are not known."""
    if strategy.exact:
        return True
    if label_of(strategy, family) != "safe":
        return False
    return steps is None or steps >= measured_steps()


def measured_steps() -> int:
    """Steps of the runs by which labels are given."""
    return int(read()["task"]["steps"])


def exactness(strategy: Strategy) -> float:
    """More for one that leaves less out."""
    return float("inf") if strategy.exact else strategy.bytes_per_step(2, SAMPLE)


def most_exact(seconds: Mapping[Key, float], strategy_of: Callable[[Key], Strategy]) -> Key:
    """Of what takes so many seconds, or any multiple of them; among equals the fastest."""
    least = min(seconds.values())
    near = [key for key, taken in seconds.items() if taken <= TOLERANCE * least]
    return max(near, key=lambda key: (exactness(strategy_of(key)), -seconds[key]))
