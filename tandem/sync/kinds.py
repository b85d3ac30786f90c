"""The strategies of `--sync`: a class for each name of `contract/strategies.py`."""

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
    """Make the strategy `spec`. `patience`: seconds to wait for a silent peer. Raises UserError."""
    strategy = parse(spec)
    return KINDS[strategy.name](strategy, patience)


# Parts of optimizers' names. ADAM: those that divide by the root of a running mean of squares, and
# so make small values count as much as large ones.
FAMILY_NAMES = {ADAM: ("adam", "adagrad", "adadelta", "rmsprop", "lamb"), SGD: ("sgd",)}


def family_of(optimizer: Any) -> Optional[str]:
    """Return an optimizer's family, by the names of its class and base classes; None if unknown."""
    # Base classes count, because a user's optimizer is often a subclass of torch's.
    classes = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    for family, names in FAMILY_NAMES.items():
        if any(name in kind for kind in classes for name in names):
            return family
    return None


def effective_spec(spec: str, nodes: Sequence[int], family: Optional[str]) -> str:
    """Return the strategy that ranks on these machines use with an optimizer of this family: exact
    sums if `spec` works only between machines and there is one machine."""
    strategy = parse(spec).for_family(family)
    return EXACT if strategy.rule.hierarchical and len(set(nodes)) == 1 else strategy.spec
