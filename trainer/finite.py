"""Losses and tensors that are not finite: how they are noticed, and what usually caused them.

A loss that is NaN or infinite in one step may be the last sign before the weights are lost, or
leave no trace: where a loss scale skips the step, the weights stay as they were. So several steps
in a row count, or weights that are not finite, which never become finite again. A gradient that
overflows under a loss scale does not count: the loss of its step is finite.
"""

import math
from typing import Collection, Dict, List, Optional, TypedDict

import torch

from contract import strategies
from contract.options import Options

from .world import World

# Of an epoch; the weights are finite, so training goes on.
EVALUATION = "epoch {}: the model's outputs on val are not finite, though its weights are"


class Trouble(TypedDict):
    """What one rank observed. `epoch` and `step` are counted from 1, as people count them."""

    host: str
    rank: int
    epoch: int
    step: int
    loss: str  # since that step; empty where it is finite
    tensor: Optional[str]  # of the model, after that step


class Losses:
    """Counts the steps in a row, up to the last one read, whose loss on this rank is not finite."""

    def __init__(self, enough: float) -> None:
        self.enough, self.count = enough, 0
        self.loss, self.epoch, self.step = 0.0, 0, 0  # where the row began

    def add(self, epoch: int, step: int, loss: float) -> None:
        if math.isfinite(loss):
            self.count = 0
            return
        if self.count == 0:
            self.loss, self.epoch, self.step = loss, epoch, step
        self.count += 1

    @property
    def name(self) -> str:
        """What the loss was where the row began; empty where the last one read was finite."""
        return "" if self.count == 0 else "NaN" if math.isnan(self.loss) else "infinite"

    @property
    def lost(self) -> bool:
        return self.count >= self.enough


def not_finite(state: Dict[str, torch.Tensor], weights: Collection[str]) -> List[str]:
    """The names of a model's tensors that hold a NaN or, where they are `weights`, an infinity:
    buffers may hold one on purpose, as masks do. Waits for the device once."""
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    if not floats:
        return []
    # A tensor of many names, such as a shared layer's, is looked through once.
    once = {(place(tensor), name in weights): tensor for name, tensor in floats.items()}
    bad = [
        (~tensor.isfinite() if is_weight else tensor.isnan()).any()
        for (_, is_weight), tensor in once.items()
    ]
    is_bad = dict(zip(once, torch.stack(bad).tolist()))
    return [name for name, tensor in floats.items() if is_bad[place(tensor), name in weights]]


def place(tensor: torch.Tensor) -> str:
    """Return what tells a tensor from all others, whatever its names are. A text, since a file can
    choose numbers such that the hashes of their tuples are the same."""
    return repr((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()))


def describe(troubles: List[Trouble], options: Options, world: World) -> str:
    """A sentence on where the run's numbers were lost, and the likely causes. `troubles`: of every
    rank that has one."""
    with_loss = [trouble for trouble in troubles if trouble["loss"]]
    first = min(with_loss or troubles, key=lambda trouble: trouble["step"])
    at = f"epoch {first['epoch']}, step {first['step']}"
    origins = [trouble for trouble in with_loss if trouble["step"] == first["step"]]
    alone = 0 < len(origins) < world.size
    who = ", ".join(f"{o['host']} (rank {o['rank']})" for o in origins) if alone else ""
    what = f"the loss has been {first['loss']} since {at}"
    if not with_loss:
        what = f"{first['tensor']} of the model is not finite after {at}"
    return (
        f"{what}{f', first on {who}' if who else ''}: the run ends, and what was saved "
        f"before is kept. Likely causes: {'; '.join(causes(options, who))}."
    )


def causes(options: Options, who: str = "") -> List[str]:
    """Clauses for people; `who`: the ranks that it began on, where others were still well."""
    clip = "" if options.clip_grad_norm else " or --clip_grad_norm 1"
    causes = [
        f"the learning rate is too high (--lr {options.lr:g}: try a tenth of it, a longer "
        f"--warmup_epochs{clip})"
    ]
    if options.precision in ("O1", "O2", "O3"):
        causes.append(f"fp16 is too narrow (--precision {options.precision}: try bf16 or fp32)")
    if options.sync != strategies.EXACT:
        causes.append(f"gradients are coded (--sync {options.sync}: try {strategies.EXACT})")
    if ":" in options.model:
        causes.append("the model divides by zero, or takes the logarithm of it")
    if who:
        causes.append(f"if it always begins there, the images or the memory of {who}")
    return causes
