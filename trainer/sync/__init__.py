"""The strategies of `--sync`: one small class each, under the names of `contract/strategies.py`."""

import dataclasses
from typing import Callable, Dict, Type

from contract.strategies import parse, parse_rule

from .allreduce import AllReduce
from .base import StepInfo, Sync
from .compressed import BF16, FP16
from .ef import ErrorFeedback
from .local import DiLoCo, LocalSGD, Overlap
from .machines import Machines
from .powersgd import PowerSGD

__all__ = ["KINDS", "Machines", "StepInfo", "Sync", "make"]

KINDS: Dict[str, Type[Sync]] = {
    "allreduce": AllReduce,
    "fp16": FP16,
    "bf16": BF16,
    "ef": ErrorFeedback,
    "powersgd": PowerSGD,
    "localsgd": LocalSGD,
    "overlap": Overlap,
    "diloco": DiLoCo,
}


def make(
    spec: str, last_bucket: Callable[[], None], patience: float = 120.0, rule: str = ""
) -> Sync:
    """The strategy that `--sync` and `--sync_rule` ask for; `patience`: seconds that it waits for a
    silent peer. Raises UserError."""
    strategy = dataclasses.replace(parse(spec), growth=parse_rule(rule))
    return KINDS[strategy.name](strategy, last_bucket, patience)
