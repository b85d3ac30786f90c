"""What the user can put right, in one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn


class ReportError(Exception):
    """What the user can put right: one sentence with the thing, the cause and the remedy; `code`:
    the exit code."""

    code = 2


class NothingMeasured(ReportError):
    """There is nothing yet to predict from: `make plan` measures then."""

    code = 3


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one sentence: raises ReportError."""

    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message}. See `{self.prog} --help`.")
