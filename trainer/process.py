"""What one process of a run does, from its options to its exit code."""

import sys

import torch.distributed as dist

from .compat import is_out_of_memory
from .logs import quiet_others
from .memory import EXIT_OUT_OF_MEMORY
from .options import Options
from .predict import infer
from .stop import EXIT_STOPPED
from .train import train
from .world import start


def work(options: Options) -> int:
    """Train, predict or extract as one rank. Raises UserError for bad input."""
    world = start(options)
    quiet_others(world)
    try:
        todo = infer if options.predict or options.extract else train
        code = todo(options, world)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"trainer: rank {world.rank}: out of memory: {error}", file=sys.stderr)
        return EXIT_OUT_OF_MEMORY
    if world.size > 1 and code in (0, EXIT_STOPPED):
        # All ranks are here: leave together, so that no peer sees a connection break.
        dist.barrier()
        dist.destroy_process_group()
    return code
