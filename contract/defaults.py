"""What is trained where neither MODEL nor DATA is given, and on which machines without INVENTORY.
Only this file holds these names, for train, dry-run, slurm, plan and the demo."""

from __future__ import annotations

INVENTORY = "inventory.ini"
DATA = "digits"
# For a first run: it takes seconds on two old cores (examples/small_cnn.py).
MODEL = "examples.small_cnn:small_cnn"
# For the user's own data.
MODEL_OF_DATA = "resnet18"


def model(name: str | None, data: str | None) -> str:
    """The model of a run for which `name` and `data` were given (None: not given)."""
    return name or (MODEL if data is None else MODEL_OF_DATA)
