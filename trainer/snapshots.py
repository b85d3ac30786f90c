"""Check the contents of a checkpoint's files, which are tensors and plain containers. A file may
come from a disk that fails, from another program or from somebody else. After `snapshot_in` and
`node_state_in`, each field has the type of Snapshot or NodeState. checkpoint.py makes both."""

import math
from typing import Any, Callable, Dict, List, Optional, TypedDict, cast

import torch

from contract.errors import UserError
from tandem.compat import is_plain

from .ema import AverageState
from .precision import PrecisionState


class Snapshot(TypedDict):
    """The state of a run, and its progress: the fields of Position, and the number of `samples`
    that it has trained on. `options`: the repr of each option that a resumed run must share."""

    model: Dict[str, torch.Tensor]
    optimizer: Dict[str, Any]  # torch's own
    precision: PrecisionState
    ema: Optional[AverageState]
    sync: Optional[Dict[str, Any]]  # a strategy's state that is equal on all ranks
    epoch: int
    sample: int
    step: int
    best_top1: float
    run: str
    samples: int
    train_images: int
    classes: List[str]
    options: Dict[str, str]


class NodeState(TypedDict):
    """The contents of a machine's own file."""

    sync: Dict[str, Any]  # the state that the strategy keeps for this machine; it checks the state
    run: str
    step: int
    nodes: List[int]  # the machine of each rank


def snapshot_in(name: str, state: Dict[str, Any]) -> Snapshot:
    """Check the contents of the file `name` and return them as a Snapshot. Raises UserError, which
    names the first field that is missing or has another type."""
    _check(name, state, SNAPSHOT)
    # Both sides of this comparison count the images so far. If they differ, the file is damaged.
    if state["samples"] != state["epoch"] * state["train_images"] + state["sample"]:
        raise _invalid_field(name, "samples")
    return cast(Snapshot, state)


def node_state_in(name: str, state: Dict[str, Any]) -> NodeState:
    """Check the contents of the file `name` and return them as a NodeState. Raises UserError, as
    snapshot_in does."""
    _check(name, state, NODE_STATE)
    return cast(NodeState, state)


def tensors_in(name: str, value: Any) -> Dict[str, torch.Tensor]:
    """Check a state dict and return it. Raises UserError for anything else."""
    if not _is_tensors(value):
        raise UserError(f"{name} contains no named tensors: use a checkpoint or a state dict.")
    return cast(Dict[str, torch.Tensor], value)


def _check(name: str, state: Dict[str, Any], shape: Dict[str, Callable[[Any], bool]]) -> None:
    for key, fits in shape.items():
        if key not in state or not fits(state[key]):
            raise _invalid_field(name, key)


def _invalid_field(name: str, field: str) -> UserError:
    return UserError(
        f"{name} is not a checkpoint of this program: its `{field}` is missing or invalid. "
        "Remove it, or start a new training with --resume none."
    )


def _is_count(value: Any) -> bool:
    # A bool is an int, too. JSON and fp64, in which counts travel, are exact up to 2**53.
    return type(value) is int and 0 <= value < 2**53


def _is_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and is_plain(tensor) for key, tensor in value.items()
    )


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_precision(value: Any) -> bool:
    if not isinstance(value, dict) or "scale" not in value:
        return False
    # A scale of 0 or infinity would spoil every gradient.
    scale = value["scale"]
    return scale is None or (
        isinstance(scale, dict)
        and type(scale.get("value")) is float
        and 0 < scale["value"] < math.inf
        and _is_count(scale.get("good_steps"))
    )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


SNAPSHOT: Dict[str, Callable[[Any], bool]] = {
    "model": _is_tensors,
    "optimizer": _is_dict,  # optim.load_state checks the contents
    "precision": _is_precision,
    "ema": lambda value: (
        value is None
        or (
            _is_dict(value)
            and _is_count(value.get("updates"))
            and _is_tensors(value.get("average"))
        )
    ),
    "sync": lambda value: value is None or _is_dict(value),
    "epoch": _is_count,
    "sample": _is_count,
    "step": _is_count,
    "best_top1": lambda value: type(value) in (int, float) and 0 <= value <= 1,
    "run": lambda value: isinstance(value, str),
    "samples": _is_count,
    "train_images": _is_count,
    "classes": _is_strings,
    "options": lambda value: (
        isinstance(value, dict) and _is_strings([*value.keys(), *value.values()])
    ),
}
NODE_STATE: Dict[str, Callable[[Any], bool]] = {
    "sync": _is_dict,
    "run": SNAPSHOT["run"],
    "step": SNAPSHOT["step"],
    "nodes": lambda value: isinstance(value, list) and all(map(_is_count, value)),
}
