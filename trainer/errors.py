"""Errors whose sentence is meant for the user."""


class UserError(Exception):
    """Bad input: one sentence naming the thing, the cause and the remedy. Exit code 2."""
