"""python -m trainer: train, predict or extract, under any launcher or none."""

import os
import sys
import traceback
from typing import List, NoReturn, Optional

from .cli import parse
from .errors import UserError, explain
from .place import place


def main(argv: Optional[List[str]] = None) -> int:
    """One process of the run; the returned number is its exit code (docs/run-directory.md)."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return explain(error, place(os.environ))
    # Only now, since it imports torch, for seconds: --help and refused options do without.
    from .process import begin

    return begin(options) or 0  # (torch declares that `record` may swallow it)


def run() -> NoReturn:
    """The process from its first to its last moment."""
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    if "torch" in sys.modules:
        from .process import leave

        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    run()
