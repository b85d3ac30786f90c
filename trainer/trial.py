"""`--trial SECONDS`: a run's steps alone, to see how long they take (`make plan`)."""

import time

from .data.generated import Generated, GeneratedBatches
from .data.loader import Batch
from .options import Options
from .train import Run
from .world import World

# The first also warms up the device and its algorithms: who reads the times leaves it out.
LEAST = 4


class Trial(Run):
    """Steps until the seconds are over, and at least LEAST of them; nothing is evaluated or
    saved."""

    def __init__(self, options: Options, world: World) -> None:
        super().__init__(options, world)
        if isinstance(self.job.train_set, Generated):
            self.batches = GeneratedBatches(self.job.train_set, options, world)
        self._until, self._over = time.monotonic() + options.trial, False

    def all_epochs(self) -> bool:
        """False when somebody asked to stop before."""
        while self.epoch():
            self.position.epoch = self.position.sample = 0
        return self._over or not self.stop.told

    def _step(self, batch: Batch) -> None:
        super()._step(batch)
        if self.position.step >= LEAST and time.monotonic() >= self._until and not self.stop.told:
            self._over = self.stop.told = True  # as if it had been asked to: its ranks agree
