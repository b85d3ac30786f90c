"""What each strategy of --sync costs in accuracy: the measurements in prices.json, and the labels.

bench/accuracy/tables.py writes prices.json, from paired runs with SGD (docs/slow-networks.md). A
label holds for its task and its family of optimizers (OPTIMIZERS in options.py), and promises
nothing about others: what is known of Adam's stands in WITH_ADAM.
"""

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

from contract import strategies
from contract.strategies import Strategy

TABLE = Path(__file__).with_name("prices.json")
# A strategy is safe if the lower end of its 95 % interval, in points of top-1, is at least this.
SAFE = -0.3
LABELS = ("exact", "safe", "unsettled", "costs samples", "experimental", "not measured")
# What advice may name: nothing that was shown to cost accuracy. Of the strategies that are not
# measured yet, it may name only those whose methods lost nothing in first trials with two seeds;
# advice shows the label too.
ADVISED = LABELS[:3]
SGD, ADAM = "sgd", "adam"  # families of optimizers
PROMISING = {SGD: ("bf16", "fp16", "ef"), ADAM: ("bf16", "fp16")}


class Loss(NamedTuple):
    """What was seen with AdamW, against allreduce after as many steps. `points` of top-1: the
    glyphs of prices.json, 1,000 steps at a rate of 0.002, four seeds (bench/accuracy/runs.jsonl).
    `percent` more of the loss: a character GPT of 0.24 M parameters, 1,200 steps of two machines
    over Gloo, three seeds."""

    points: float
    percent: float

    def __str__(self) -> str:
        return (
            f"{-self.points:.1f} points of top-1 less on generated images, and {self.percent:g} % "
            "more loss in a small language model,"
        )


WITH_ADAM = {
    "ef:1.6": Loss(-21.0, 20),
    "ef:2": Loss(-21.0, 20),  # the same three levels
    "ef:4": Loss(-0.9, 1.1),
    "powersgd:4": Loss(-3.3, 8),
}


class Price(NamedTuple):
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
        """One of LABELS except "exact", which is not a matter of measurement."""
        if self.seeds == 0:
            return "not measured"
        if self.low is not None and self.low >= SAFE:
            return "safe"
        if self.high is None or self.high >= 0:
            return "unsettled"
        return "experimental" if self.samples is None else "costs samples"


def read() -> Dict[str, Any]:
    """`task`: what was trained; `strategies`, and on the second task `fonts`: a Price's fields by
    spec."""
    found: Dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def price_of(strategy: Strategy, part: str = "strategies") -> Price:
    """As measured for exactly these arguments, with SGD."""
    found = read().get(part, {}).get(strategy.spec)
    return Price(**found) if found else Price()


def label_of(strategy: Strategy, family: str = SGD) -> str:
    if strategy.exact:
        return "exact"
    if family == ADAM:
        return "experimental" if strategy.spec in WITH_ADAM else Price().label
    return price_of(strategy).label


def with_adam(strategy: Strategy) -> str:
    """What was seen of it with Adam's family, as a clause."""
    lost = WITH_ADAM.get(strategy.spec)
    return f"{lost} than with {strategies.EXACT}" if lost else "too little was measured to say"


def elsewhere(strategy: Strategy) -> str:
    """What was seen on the second task, with SGD, as a clause; empty where nothing was."""
    price = price_of(strategy, "fonts")
    if price.high is None:
        return ""
    lost = ", a measured loss" if price.high < 0 else ""
    return f"on a second one {price.difference:+.2f} points of top-1{lost}"


def caveats(strategy: Strategy, family: str, steps: float) -> List[str]:
    """A sentence on a run for which the strategy's label says less than it seems to."""
    name = f"--sync {strategy.spec}"
    if family == ADAM and not strategy.exact:
        return [f"{name} with Adam: {with_adam(strategy)} (docs/slow-networks.md)"]
    if strategy.exact or not price_of(strategy).seeds or steps >= read()["task"]["steps"]:
        return []
    return [
        f"{name}: what it costs in accuracy was measured over {read()['task']['steps']:,} steps; "
        f"this run has {steps:,.0f}, and a shorter one may lose more (docs/slow-networks.md)"
    ]


def labels() -> str:
    """The labels of all measured strategies, for a sentence: `ef:2 safe, ef:4 unsettled`."""
    specs: List[str] = list(read()["strategies"])
    return ", ".join(f"{spec} {label_of(strategies.parse(spec))}" for spec in specs)


def advised(family: str = SGD) -> List[Strategy]:
    """Those of strategies.usual() that advice may name for a run with such an optimizer."""
    return [strategy for strategy in strategies.usual() if _is_advised(strategy, family)]


def _is_advised(strategy: Strategy, family: str) -> bool:
    label = label_of(strategy, family)
    return label in ADVISED or (label == "not measured" and strategy.name in PROMISING[family])
