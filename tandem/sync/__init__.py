"""Sums of gradients over slow links, as communication hooks of DDP."""

from .base import Sync, Topology
from .kinds import KINDS, carried_out, make

__all__ = ["KINDS", "Sync", "Topology", "carried_out", "make"]
