"""The strategies of `--sync`: one small class each, under the names of `contract/strategies.py`."""

from typing import Any, Dict, Optional, Sequence, Type

from contract.strategies import ADAM, EXACT, SGD, parse

from .allreduce import BF16, FP16, AllReduce
from .base import Sync
from .feedback import ErrorFeedback

KINDS: Dict[str, Type[Sync]] = {
    "allreduce": AllReduce,
    "fp16": FP16,
    "bf16": BF16,
    "ef": ErrorFeedback,
}


def make(spec: str, patience: float = 120.0) -> Sync:
    """The strategy that `spec` asks for; `patience`: seconds that it waits for a silent peer.
    Raises UserError."""
    strategy = parse(spec)
    return KINDS[strategy.name](strategy, patience)


# Parts of the names of optimizers, in small letters: what divides by the root of a running mean of
# squares, and what does not.
NAMES = {ADAM: ("adam", "adagrad", "adadelta", "rmsprop", "lamb"), SGD: ("sgd",)}


def family_of(optimizer: Any) -> Optional[str]:
    """The family of an optimizer, by its class and those that it is made from; None for one that is
    not known here."""
    classes = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    for family, names in NAMES.items():
        if any(name in kind for kind in classes for name in names):
            return family
    return None


def effective_spec(spec: str, nodes: Sequence[int], family: Optional[str]) -> str:
    """The strategy that ranks on these machines carry out, with an optimizer of this family: the
    exact sum, where `spec` is one that is only between machines and all are one."""
    strategy = parse(spec).of(family)
    return EXACT if strategy.rule.hierarchical and len(set(nodes)) == 1 else strategy.spec
