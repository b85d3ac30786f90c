"""Errors that the user can put right, each in one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn


class ReportError(Exception):
    """What the user can put right: one sentence with the thing, the cause and the remedy. `code` is
    the exit code."""

    code = 2


class NothingMeasured(ReportError):
    """There is nothing to predict from yet; `make plan` then measures."""

    code = 3


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with a command line, by raising ReportError."""

    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message}. See `{self.prog} --help`.")
