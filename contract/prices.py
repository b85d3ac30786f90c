"""Read how much accuracy each strategy of --sync costs (prices.json), label the strategies, and
choose a strategy for SYNC=auto, the report's advice and `make plan`: the most exact strategy that
takes at most TOLERANCE times as long as the fastest.

bench/accuracy/tables.py writes prices.json from paired runs (docs/slow-networks.md). A label
applies to its task and its family of optimizers (OPTIMIZERS in options.py), and promises nothing
about other tasks and families.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, TypeVar

from contract import strategies
from contract.strategies import ADAM, SGD, Payload, Strategy

TABLE = Path(__file__).with_name("prices.json")
# A strategy is safe if the lower end of its 95 % interval, in points of top-1, is at least this.
SAFE = -0.3
# With Adam's family, a small language model's loss must also be at most this per cent higher.
SAFE_LOSS_PERCENT = 1.5
TOLERANCE = 1.05
SAMPLE = Payload(4e6)  # a million values, for a comparison of the bytes that strategies send
Key = TypeVar("Key")


class AccuracyCost(NamedTuple):
    """Hold the cost of a strategy. `difference`: top-1 minus allreduce's top-1 after the same
    number of samples, in points, the mean over `seeds` pairs of runs. `low`, `high`: the 95 %
    interval of the difference, None for a single pair. `samples`: how many times as many samples
    the strategy needs to reach allreduce's top-1, if longer runs reached it."""

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
        if self.high is None or self.high >= 0:  # an interval with 0 proves no difference
            return "unsettled"
        return "experimental" if self.samples is None else "costs samples"


def read_prices() -> Dict[str, Any]:
    """Return the content of prices.json. `strategies` (first task) and `fonts` (second task) have
    {spec: fields of AccuracyCost} with SGD, `adam` and `adam_fonts` with AdamW. `text`: {spec: per
    cent by which a language model's loss is higher with AdamW}. `task` describes the first task."""
    table: Dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


# {family: keys of the first and of the second task}.
TASK_KEYS = {SGD: ("strategies", "fonts"), ADAM: ("adam", "adam_fonts")}


def price_of(strategy: Strategy, family: str = SGD, task: int = 0) -> AccuracyCost:
    """Return the cost that was measured with exactly these arguments and this family of
    optimizers."""
    # A figure says nothing about other levels, scales or optimizers, so there is no fallback.
    price = read_prices().get(TASK_KEYS[family][task], {}).get(strategy.for_family(family).spec)
    return AccuracyCost(**price) if price else AccuracyCost()


def deciding_task(glyphs: AccuracyCost, fonts: AccuracyCost) -> AccuracyCost:
    """Return the cost on the task that decides the label, because a safe strategy must be safe on
    both tasks, if both were measured."""
    return fonts if glyphs.label == "safe" and fonts.label != "not measured" else glyphs


def label_of(strategy: Strategy, family: str = SGD) -> str:
    """Return `exact`, or the label of the strategy's cost with this family of optimizers."""
    if strategy.exact:
        return "exact"
    label = deciding_task(*(price_of(strategy, family, task) for task in range(2))).label
    if family == SGD or label != "safe":
        return label
    percent = read_prices()["text"].get(strategy.for_family(family).spec)
    if percent is None:
        return "unsettled"
    return "safe" if percent <= SAFE_LOSS_PERCENT else "experimental"


def with_adam(strategy: Strategy) -> str:
    """Return a clause with the measured cost with Adam's family on the deciding task."""
    glyphs = price_of(strategy, ADAM)
    price = deciding_task(glyphs, price_of(strategy, ADAM, task=1))
    if not price.seeds:
        return "its accuracy is unknown, because too little was measured"
    percent = read_prices().get("text", {}).get(strategy.for_family(ADAM).spec)
    text = "" if percent is None else f" and {percent:+g} % in a small language model's loss"
    task = "generated images" if price is glyphs else "letters in many fonts"
    return (
        f"{price.difference:+.2f} points in top-1 on {task}{text}, compared with "
        f"{strategies.EXACT} after {measured_steps():,} steps"
    )


def with_sgd(strategy: Strategy) -> str:
    """Return a clause with the measured cost with SGD of a strategy that is not safe."""
    glyphs = price_of(strategy)
    price = deciding_task(glyphs, price_of(strategy, task=1))
    if not price.seeds:
        return "its accuracy was not measured"
    interval = "" if price.low is None else f" ({price.low:+.2f} to {price.high:+.2f})"
    task = "" if price is glyphs else " on a second task"
    points = (
        f"{price.difference:+.2f} points in top-1{interval}{task} compared with {strategies.EXACT}"
    )
    return f"{points} were measured: {price.label}"


def tasks(strategy: Strategy, family: str = SGD) -> str:
    """Return on how many tasks a strategy was measured, in words."""
    return "two tasks" if price_of(strategy, family, task=1).seeds else "one task"


def caveats(strategy: Strategy, family: str, steps: float) -> List[str]:
    """Return a warning if a strategy is not safe in such a run, or if the run has fewer steps than
    the measured ones."""
    name, label = f"--sync {strategy.for_family(family).spec}", label_of(strategy, family)
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
    """Return whether a strategy is exact, or safe with this family of optimizers in a run with this
    number of steps (None: unknown)."""
    if strategy.exact:
        return True
    # A run that is shorter than the measured runs may lose more.
    if label_of(strategy, family) != "safe":
        return False
    return steps is None or steps >= measured_steps()


def measured_steps() -> int:
    """Return the number of steps of the runs that gave the labels."""
    return int(read_prices()["task"]["steps"])


def most_exact(seconds: Mapping[Key, float], strategy_of: Callable[[Key], Strategy]) -> Key:
    """Return the key of the most exact strategy that is nearly the fastest; of equally exact ones
    the fastest. `seconds`: {key: time for the same work}."""
    fastest = min(seconds.values())
    # A strategy that sends more bytes omits less, so it counts as more exact.
    exactness: Dict[Key, Tuple[float, float]] = {}
    for key in (key for key in seconds if seconds[key] <= TOLERANCE * fastest):
        strategy = strategy_of(key)
        sent = float("inf") if strategy.exact else strategy.bytes_per_step(2, SAMPLE)
        exactness[key] = sent, -seconds[key]
    return max(exactness, key=exactness.__getitem__)
