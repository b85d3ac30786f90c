"""Errors that a user can do something about."""

from __future__ import annotations


class UserError(Exception):
    """One or more sentences, each with the thing, the cause and the remedy. No traceback is
    shown."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class MachineError(UserError):
    """A UserError about machines of the run; `hosts` are their names in the inventory."""

    def __init__(self, hosts: list[str], *problems: str):
        super().__init__(*problems)
        self.hosts = hosts


class Busy(UserError):
    """Another run took a machine first: waiting helps."""
