"""Sums of gradients over slow links, as communication hooks of DDP: `attach`."""

from .attach import Attached, attach, hook
from .base import Sync, Topology
from .kinds import KINDS, effective_spec, make

__all__ = ["KINDS", "Attached", "Sync", "Topology", "attach", "effective_spec", "hook", "make"]
