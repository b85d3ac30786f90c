"""Read how much accuracy each strategy of --sync costs (prices.json), label the strategies, and
choose among them for SYNC=auto, the report's advice and `make plan`. The choice is the most exact
of the strategies that take at most TOLERANCE times as long as the fastest.

bench/accuracy/tables.py writes prices.json from paired runs (docs/slow-networks.md). A label
applies to its task and its family of optimizers (OPTIMIZERS in options.py), and promises nothing
about others.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, TypeVar

from contract import strategies
from contract.strategies import ADAM, SGD, Payload, Strategy

TABLE = Path(__file__).with_name("prices.json")
# A strategy is safe if the lower end of its 95 % interval, in points of top-1, is at least this.
SAFE = -0.3
TOLERANCE = 1.05
SAMPLE = Payload(4e6)  # a million values, to compare how many bytes strategies send
Key = TypeVar("Key")


class AccuracyCost(NamedTuple):
    """Hold the cost of one strategy. `difference`: points of top-1 minus those of allreduce after
    the same number of samples, the mean over `seeds` pairs. `low`, `high`: its 95 % interval, None
    for a single pair. `samples`: how many times as many samples it needs to reach allreduce's
    top-1, if longer runs reached it."""

    seeds: int = 0
    difference: float = 0.0
    low: Optional[float] = None
    high: Optional[float] = None
    samples: Optional[float] = None

    @property
    def label(self) -> str:
        """Return safe, unsettled, costs samples, experimental or not measured."""
        if self.seeds == 0:
            return "not measured"
        if self.low is not None and self.low >= SAFE:
            return "safe"
        if self.high is None or self.high >= 0:  # the interval contains 0: no difference is proven
            return "unsettled"
        return "experimental" if self.samples is None else "costs samples"


def read_prices() -> Dict[str, Any]:
    """Return the table. `task`: the first task. An AccuracyCost's fields by spec with SGD
    (`strategies`, and on the second task `fonts`) and with AdamW (`adam`, `adam_fonts`). `text`:
    how many per cent a language model's loss is higher with AdamW, by spec."""
    table: Dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


# The keys of the first and of the second task.
TASK_KEYS = {SGD: ("strategies", "fonts"), ADAM: ("adam", "adam_fonts")}


def price_of(strategy: Strategy, family: str = SGD, task: int = 0) -> AccuracyCost:
    """Return the cost that was measured with exactly these arguments and this family of
    optimizers."""
    # A figure says nothing about other levels, scales or optimizers, so there is no fallback.
    price = read_prices().get(TASK_KEYS[family][task], {}).get(strategy.of(family).spec)
    return AccuracyCost(**price) if price else AccuracyCost()


def deciding_task(glyphs: AccuracyCost, fonts: AccuracyCost) -> AccuracyCost:
    """Return the cost that gives the label: a strategy that is safe on one task must be safe on
    both."""
    return fonts if glyphs.label == "safe" and fonts.label != "not measured" else glyphs


def label_of(strategy: Strategy, family: str = SGD) -> str:
    if strategy.exact:
        return "exact"
    return deciding_task(*(price_of(strategy, family, task) for task in range(2))).label


def with_adam(strategy: Strategy) -> str:
    """Return a clause with the cost that was measured with Adam's family on the deciding task."""
    glyphs = price_of(strategy, ADAM)
    price = deciding_task(glyphs, price_of(strategy, ADAM, task=1))
    if not price.seeds:
        return "too little was measured to say"
    percent = read_prices().get("text", {}).get(strategy.of(ADAM).spec)
    text = "" if percent is None else f" and {percent:+g} % of a small language model's loss"
    task = "generated images" if price is glyphs else "the letters of fonts"
    return (
        f"{price.difference:+.2f} points of top-1 on {task}{text}, against "
        f"{strategies.EXACT} after {measured_steps():,} steps"
    )


def with_sgd(strategy: Strategy) -> str:
    """Return a clause with the cost that was measured of a strategy that is not safe."""
    glyphs = price_of(strategy)
    price = deciding_task(glyphs, price_of(strategy, task=1))
    if not price.seeds:
        return "its accuracy was not measured"
    interval = "" if price.low is None else f" ({price.low:+.2f} to {price.high:+.2f})"
    task = "" if price is glyphs else " on a second task"
    points = (
        f"{price.difference:+.2f} points of top-1{interval}{task} compared with {strategies.EXACT}"
    )
    return f"{points} were measured: {price.label}"


def tasks(strategy: Strategy, family: str = SGD) -> str:
    """Return on how many tasks a strategy was measured, in words."""
    return "two tasks" if price_of(strategy, family, task=1).seeds else "one task"


def caveats(strategy: Strategy, family: str, steps: float) -> List[str]:
    """Return a warning if a strategy is not safe in such a run, or if the run has fewer steps than
    the measured ones."""
    name, label = f"--sync {strategy.of(family).spec}", label_of(strategy, family)
    if label not in ("exact", "safe"):
        cost = with_adam(strategy) if family == ADAM else with_sgd(strategy)
        with_text = " with Adam" if family == ADAM else ""
        return [f"{name}{with_text}: {cost} (docs/slow-networks.md)"]
    if label == "exact" or steps >= measured_steps():
        return []
    return [
        f"{name}: its accuracy was measured over {measured_steps():,} steps; this run has "
        f"only {steps:,.0f} and may lose more (docs/slow-networks.md)"
    ]


def is_acceptable(strategy: Strategy, family: str, steps: Optional[float] = None) -> bool:
    """Return whether a strategy is exact, or safe with such an optimizer in a run of `steps` steps.
    The measured runs must not be longer. `steps`: None if the number is unknown."""
    if strategy.exact:
        return True
    # A run that is shorter than the measured ones may lose more.
    if label_of(strategy, family) != "safe":
        return False
    return steps is None or steps >= measured_steps()


def measured_steps() -> int:
    """Return the number of steps of the runs that gave the labels."""
    return int(read_prices()["task"]["steps"])


def most_exact(seconds: Mapping[Key, float], strategy_of: Callable[[Key], Strategy]) -> Key:
    """Return the key of the most exact strategy that is nearly the fastest; among equals the
    fastest. `seconds`: of each key for the same work."""

    def exactness(key: Key) -> Tuple[float, float]:
        # A strategy that sends more omits less.
        strategy = strategy_of(key)
        sent = float("inf") if strategy.exact else strategy.bytes_per_step(2, SAMPLE)
        return sent, -seconds[key]

    fastest = min(seconds.values())
    return max((key for key in seconds if seconds[key] <= TOLERANCE * fastest), key=exactness)
