"""The strategies of `--sync`: one small class each, under the names of `contract/strategies.py`."""

from typing import Callable, Dict, Sequence, Type

from contract.strategies import EXACT, parse

from .allreduce import BF16, FP16, AllReduce
from .base import Sync
from .feedback import ErrorFeedback
from .powersgd import PowerSGD

KINDS: Dict[str, Type[Sync]] = {
    "allreduce": AllReduce,
    "fp16": FP16,
    "bf16": BF16,
    "ef": ErrorFeedback,
    "powersgd": PowerSGD,
}


def make(spec: str, last_bucket: Callable[[], None], patience: float = 120.0) -> Sync:
    """The strategy that `spec` asks for; `patience`: seconds that it waits for a silent peer.
    Raises UserError."""
    strategy = parse(spec)
    return KINDS[strategy.name](strategy, last_bucket, patience)


def carried_out(spec: str, nodes: Sequence[int]) -> str:
    """The strategy that ranks on these machines carry out: the exact sum, where `spec` is one that
    is only between machines and all are one."""
    hierarchical = parse(spec).rule.hierarchical
    return EXACT if hierarchical and len(set(nodes)) == 1 else spec
