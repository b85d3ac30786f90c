"""python -m trainer: train, predict or extract, under any launcher or none."""

import os
import sys
from typing import List, Optional

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from .cli import parse
from .compat import is_out_of_memory
from .errors import UserError
from .memory import EXIT_OUT_OF_MEMORY
from .options import Options
from .predict import infer
from .spawn import spawn
from .train import train
from .world import start


@record
def main(argv: Optional[List[str]] = None) -> int:
    """One process of the run; the returned number is its exit code (docs/run-directory.md)."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        if options.spawn > 1 and "RANK" not in os.environ:
            return spawn(_work, options)
        return _work(options)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"trainer: {error}", file=sys.stderr)
        return 2


def _work(options: Options) -> int:
    world = start(options)
    try:
        work = infer if options.predict or options.extract else train
        code = work(options, world)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"trainer: rank {world.rank}: out of memory: {error}", file=sys.stderr)
        code = EXIT_OUT_OF_MEMORY
    if world.size > 1 and code in (0, 75):
        # All ranks are here: leave together, so that no peer sees a connection break.
        dist.barrier()
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
