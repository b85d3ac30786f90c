"""What a run logs, and the indices that it trained on."""

import logging
import sys
from typing import List

from contract.options import Options
from tandem.timings import attempt, opened

from .world import World


def quiet_others(world: World) -> None:
    """Rank 0 logs information; the others only log warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger(__package__).setLevel(logging.INFO if world.rank == 0 else logging.WARNING)


class SampleLog:
    """`samples/rank<k>.<attempt>.csv`: epoch, position in its order, and index of each sample,
    written once the rank has trained on it."""

    def __init__(self, options: Options, world: World) -> None:
        name = f"samples/rank{world.rank}.{attempt()}.csv"
        self._file = None
        if options.sample_log and options.output:
            self._file = opened(options.output, name, "w")
            self._file.write("epoch,position,index\n")

    def add(self, epoch: int, begin: int, indices: List[int]) -> None:
        if self._file is not None:
            rows = (f"{epoch},{begin + place},{index}\n" for place, index in enumerate(indices))
            self._file.writelines(rows)
            self._file.flush()
