"""What the files of a checkpoint hold: only tensors and plain containers."""

from typing import Any, Dict, List, Optional, TypedDict

import torch

from .ema import AverageState
from .precision import PrecisionState


class Snapshot(TypedDict):
    """The state of a run, and how far it has come: the fields of Position, and the number of
    `samples` trained on since the run began. `options`: those that a resumed run must share, by
    their repr."""

    model: Dict[str, torch.Tensor]
    optimizer: Dict[str, Any]  # torch's own
    precision: PrecisionState
    ema: Optional[AverageState]
    epoch: int
    sample: int
    step: int
    best_top1: float
    run: str
    samples: int
    train_images: int
    classes: List[str]
    options: Dict[str, str]


class OwnState(TypedDict, total=False):
    """The contents of a machine's own file. Only machines that train by themselves have an
    optimizer and a loss scale of their own."""

    sync: Dict[str, Any]  # the strategy's own
    optimizer: Dict[str, Any]
    precision: PrecisionState
    run: str
    step: int
    nodes: List[int]  # the machine of each rank
