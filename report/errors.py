"""How the report refuses what was typed."""

from __future__ import annotations

import argparse
from typing import NoReturn

from contract.errors import UserError


class NothingMeasured(UserError):
    """There is nothing to predict from yet; `make plan` then measures."""

    code = 3


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with a command line, by raising UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See `{self.prog} --help`.")
