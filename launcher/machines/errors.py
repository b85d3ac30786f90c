"""Errors that concern machines of a run."""

from __future__ import annotations

from contract.errors import UserError


class MachineError(UserError):
    """A UserError about machines of the run; `hosts` are their names in the inventory."""

    def __init__(self, hosts: list[str], *problems: str):
        super().__init__(*problems)
        self.hosts = hosts


class Busy(UserError):
    """Another run took a machine first: waiting helps."""
