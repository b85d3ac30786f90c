"""The strategies of `--sync`: one small class each, under the names of `contract/strategies.py`."""

from typing import Callable, Dict, Type

from contract.strategies import parse

from .allreduce import BF16, FP16, AllReduce
from .base import Sync, Topology
from .feedback import ErrorFeedback
from .powersgd import PowerSGD

__all__ = ["KINDS", "Sync", "Topology", "make"]

KINDS: Dict[str, Type[Sync]] = {
    "allreduce": AllReduce,
    "fp16": FP16,
    "bf16": BF16,
    "ef": ErrorFeedback,
    "powersgd": PowerSGD,
}


def make(spec: str, last_bucket: Callable[[], None], patience: float = 120.0) -> Sync:
    """The strategy that `--sync` asks for; `patience`: seconds that it waits for a silent peer.
    Raises UserError."""
    strategy = parse(spec)
    return KINDS[strategy.name](strategy, last_bucket, patience)
