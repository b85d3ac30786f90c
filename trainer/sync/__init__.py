"""The strategies of `--sync`: one small class each, under the names of `trainer/strategies.py`."""

from typing import Callable, Dict, Type

from ..strategies import parse
from .allreduce import AllReduce
from .base import Moment, Sync
from .compressed import BF16, FP16
from .ef import ErrorFeedback
from .powersgd import PowerSGD

__all__ = ["KINDS", "Moment", "Sync", "make"]

KINDS: Dict[str, Type[Sync]] = {
    "allreduce": AllReduce,
    "fp16": FP16,
    "bf16": BF16,
    "ef": ErrorFeedback,
    "powersgd": PowerSGD,
}


def make(spec: str, last_bucket: Callable[[], None]) -> Sync:
    """The strategy of a `--sync`. Raises UserError."""
    strategy = parse(spec)
    return KINDS[strategy.name](strategy, last_bucket)
