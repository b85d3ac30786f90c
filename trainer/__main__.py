"""python -m trainer: train, predict or extract, under any launcher or none."""

import os
import sys
import traceback
from typing import List, NoReturn, Optional

from torch.distributed.elastic.multiprocessing.errors import record

from .cli import parse
from .errors import INTERRUPTED, UserError, explain
from .process import leave, spawn, work
from .world import place


@record
def main(argv: Optional[List[str]] = None) -> int:
    """One process of the run; the returned number is its exit code (docs/run-directory.md)."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.spawn > 1 and "RANK" not in os.environ:
            return spawn(options)
        return work(options)
    except UserError as error:
        return explain(error, place(os.environ).local_rank)
    except KeyboardInterrupt:
        return INTERRUPTED


def run() -> NoReturn:
    """The process from its first to its last moment."""
    try:
        code = main() or 0  # (torch declares that `record` may swallow it)
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)


if __name__ == "__main__":
    run()
