"""Errors that a user can do something about."""

from __future__ import annotations


class UserError(Exception):
    """One or more sentences, each with the thing, the cause and the remedy. No traceback is
    shown."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class Busy(UserError):
    """Another run took a machine first: waiting mends it."""
