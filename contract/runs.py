"""The names of runs, and of the file that predicts the next one."""

from __future__ import annotations

import re
import time
from pathlib import Path

# Of what a run records (docs/run-directory.md). It grows where runs of before could not be compared
# with runs of after: where a record lacks a setting, or means something else by it.
RECORD = 2


def short(model: str) -> str:
    """A model's name in the names of recipes; for your own model, the function's."""
    return model.rpartition(":")[2]


def in_names(model: str) -> str:
    """A model's name in the names of runs and files: letters, digits, - and _ of ASCII."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", short(model))


def run_id(model: str, nodes: int, unix: float) -> str:
    """`<UTC time>-<model>-<N>n`."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix))
    return f"{stamp}-{in_names(model)}-{nodes}n"


def may_be_of(run: str, model: str) -> bool:
    """Whether a run of this name trained this model, or another with the same short name."""
    return bool(re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{re.escape(in_names(model))}-\d+n", run))


def prediction_path(runs: Path, model: str, nodes: int) -> Path:
    return runs / f"plan-{in_names(model)}-{nodes}n.json"
