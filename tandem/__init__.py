"""Pieces for any training script: gradient sums over slow links (`tandem.sync`), and timings that
`python -m report` reads (`tandem.timings`). docs/own-script.md.

Read `coordinates.py` (which rank this is), `exchange.py` (what ranks tell one another), then
`timings.py`, or the head of `sync/`."""

from contract.errors import UserError

__all__ = ["UserError", "__version__"]
__version__ = "0.1.0"  # of the whole project; plan.json records it
