"""Sums of gradients over slow links, as communication hooks of DDP: `attach`.

Read in this order: `base.py` (what a strategy is, and the ranks of one machine), `allreduce.py`,
then `feedback.py` (`ef`, which sends a few levels a value) with `codec.py` and `entropy.py`,
`carrier.py` (its messages, in the background), and `attach.py`, by which a script has it, with
`usage.py` and `unsummed.py` (what the script does with the sums)."""

from .attach import Attached, attach, hook
from .base import Sync, Topology
from .kinds import KINDS, effective_spec, make

__all__ = ["KINDS", "Attached", "Sync", "Topology", "attach", "effective_spec", "hook", "make"]
