"""Help any training script: average gradients over slow links (`tandem.sync`), and time its steps
for `python -m report` (`tandem.timings`). docs/own-script.md describes both.

Read `coordinates.py` (the rank of a process) and `exchange.py` (values from all ranks) first, then
`timings.py` or `sync/__init__.py`."""

from contract.errors import UserError

__all__ = ["UserError", "__version__"]
__version__ = "0.1.0"  # of the whole project; plan.json records it
