"""Sums of gradients over slow links, as communication hooks of DDP: `attach`."""

from .attach import Attached, attach, hook
from .base import Sync, Topology
from .kinds import KINDS, carried_out, make

__all__ = ["KINDS", "Attached", "Sync", "Topology", "attach", "carried_out", "hook", "make"]
