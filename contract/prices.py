"""What each strategy of --sync costs in accuracy: the measurements in prices.json, and the labels.

bench/accuracy/tables.py writes prices.json, from paired runs on one task
(docs/slow-networks.md says which). A label holds for that task and promises nothing about others.
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
PROMISING = ("bf16", "fp16", "ef")


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
    """`task`: what was trained; `strategies`: a Price's fields by spec."""
    found: Dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def price_of(strategy: Strategy) -> Price:
    """As measured for exactly these arguments."""
    found = read()["strategies"].get(strategy.spec)
    return Price(**found) if found else Price()


def label_of(strategy: Strategy) -> str:
    return "exact" if strategy.exact else price_of(strategy).label


def caveats(strategy: Strategy, optimizer: str, steps: float) -> List[str]:
    """Sentences on a run for which the strategy's label says less than it seems to."""
    if strategy.exact or not price_of(strategy).seeds:
        return []
    task, name, found = read()["task"], f"--sync {strategy.spec}", []
    if optimizer != task["optimizer"]:
        found.append(
            f"{name}: what it costs in accuracy was measured with --optimizer {task['optimizer']}; "
            f"with {optimizer} nothing is known"
        )
    if steps < task["steps"]:
        found.append(
            f"{name}: what it costs in accuracy was measured over {task['steps']:,} steps; this "
            f"run has {steps:,.0f}, and a shorter one may lose more (docs/slow-networks.md)"
        )
    return found


def labels() -> str:
    """The labels of all measured strategies, for a sentence: `ef:2 safe, ef:4 unsettled`."""
    specs: List[str] = list(read()["strategies"])
    return ", ".join(f"{spec} {label_of(strategies.parse(spec))}" for spec in specs)


def advised() -> List[Strategy]:
    """Those of strategies.usual() that advice may name."""
    return [strategy for strategy in strategies.usual() if _is_advised(strategy)]


def _is_advised(strategy: Strategy) -> bool:
    label = label_of(strategy)
    return label in ADVISED or (label == "not measured" and strategy.name in PROMISING)
