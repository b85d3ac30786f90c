"""The words of advice: by the trainer's variables of make, or in the lines of a user's own script,
which has no such variables."""

from __future__ import annotations

from typing import NamedTuple


class Phrasing(NamedTuple):
    """Words for one who trains in this way; `{}` is the strategy."""

    sync: str
    warmed_up: str  # how a strategy begins where all was its warm-up
    batch: str
    workers: str
    saving: str
    memory: str


TRAINER = Phrasing(
    sync="SYNC={}",
    warmed_up="with more EPOCHS, or with ARGS='--sync_warmup 0'",
    batch="twice the BATCH per node (--accumulate 2 if memory is short)",
    workers="twice the loader processes (--workers)",
    saving="save half as often (--checkpoint_every)",
    memory="Fewer loader processes (ARGS='--workers 1'), a smaller BATCH",
)
SCRIPT = Phrasing(
    sync='tandem.sync.attach(model, "{}", optimizer=optimizer) in the script',
    warmed_up="with more steps, or with attach's warmup_steps=0",
    batch="twice the batch of each rank, by the script's own option",
    workers="twice the loader processes (its DataLoader's num_workers)",
    saving="save half as often",
    memory="Fewer loader processes (its DataLoader's num_workers), a smaller batch",
)
