"""`--trial SECONDS`: a run's steps alone, to see how long they take (`make plan`)."""

import math
import time

from contract.options import Options

from .data.generated import Generated, GeneratedBatches
from .data.loader import Batch
from .finite import Losses
from .train import Run
from .world import World

# Steps. The first one also warms up the device, so readers of the times leave it out.
LEAST = 4


class Trial(Run):
    """Runs steps until the time is up, but at least LEAST of them; nothing is evaluated or
    saved."""

    def __init__(self, options: Options, world: World) -> None:
        super().__init__(options, world)
        if isinstance(self.job.train_set, Generated):
            self.batches = GeneratedBatches(self.job.train_set, options, world)
        # What it learns is thrown away; the steps take as long whatever the loss is.
        self.losses = Losses(enough=math.inf)
        self._until, self._over = time.monotonic() + options.trial, False

    def all_epochs(self) -> bool:
        """False when a stop was requested before the end."""
        while self.epoch():
            self.position.epoch = self.position.sample = 0
        return self._over or not self.stop.requested

    def _step(self, batch: Batch) -> None:
        super()._step(batch)
        over = self.position.step >= LEAST and time.monotonic() >= self._until
        if over and not self.stop.requested:
            # As if somebody had requested a stop, so that all ranks agree on the step.
            self._over = self.stop.requested = True
