"""Help any training script: average gradients over slow links (`tandem.sync`), time its steps for
`python -m report` (`tandem.timings`), and divide batches among PCs of different speed (`sampler`,
`batch_size`, `weigh`). docs/own-script.md describes them.

Read `coordinates.py` (the rank of a process) and `exchange.py` (values from all ranks) first, then
`timings.py`, `balance.py` or `sync/__init__.py`."""

from typing import TYPE_CHECKING, Any

from contract.errors import UserError

if TYPE_CHECKING:
    from .balance import batch_size, sampler, weigh

__all__ = ["UserError", "__version__", "batch_size", "sampler", "weigh"]
__version__ = "0.1.0"  # of the whole project; plan.json records it


def __getattr__(name: str) -> Any:
    """Load `balance.py` when it is used: it imports torch, which the control node does not have."""
    if name in ("batch_size", "sampler", "weigh"):
        from . import balance

        return getattr(balance, name)
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
