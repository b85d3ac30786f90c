"""The words of advice: by the trainer's variables of make, or in the lines of a user's own script,
which has no such variables, and whose batches are of samples."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

from report.view import Choice, Command, Facts, Log


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


def in_samples(item: Any) -> Any:
    """A part of a view with samples for images, but in what is typed and what was printed."""
    if isinstance(item, (Command, Facts, Log)):
        return item
    if isinstance(item, str):
        return re.sub(r"\b([Ii])mage(s?)\b", _sample, item)
    if isinstance(item, Choice):
        return item._replace(text=in_samples(item.text))
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(in_samples, item))
    if isinstance(item, (list, tuple)):
        return type(item)(map(in_samples, item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item)]
        return dataclasses.replace(item, **{n: in_samples(getattr(item, n)) for n in names})
    return item


def _sample(match: re.Match[str]) -> str:
    return ("S" if match[1] == "I" else "s") + "ample" + match[2]
