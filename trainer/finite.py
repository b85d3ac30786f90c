"""Notice losses and tensors that are not finite, and list the likely causes.

A loss that is NaN or infinite in one step may be the last sign before the weights are lost. The
loss may also leave no trace: if a loss scale skips the step, the weights stay as they were. A run
therefore ends after several such losses in a row, or if weights are not finite, which never become
finite again. A gradient that overflows under a loss scale does not count: its loss is finite.
train.py calls this file.
"""

import math
from typing import Collection, Dict, List, Optional, TypedDict

import torch

from contract import strategies
from contract.options import Options

from .world import World

# Printed after an evaluation. Training continues, because the weights are finite.
EVALUATION = "epoch {}: the model's outputs on val are not finite, though its weights are"


class Trouble(TypedDict):
    """Numbers that are not finite, as one rank observed them. `epoch` and `step` count from 1."""

    host: str
    rank: int
    epoch: int
    step: int
    loss: str  # "NaN" or "infinite" since that step; "" if the loss is finite
    tensor: Optional[str]  # the name of a tensor of the model that is not finite after that step


class Losses:
    """Counts the steps in a row, up to the last one read, whose loss on this rank is not finite."""

    def __init__(self, limit: float) -> None:
        self.limit, self.count = limit, 0
        self.loss, self.epoch, self.step = 0.0, 0, 0  # of the first step of the row

    def add(self, epoch: int, step: int, loss: float) -> None:
        """Count a step's loss; a finite one ends the row. `epoch` and `step` count from 1."""
        if math.isfinite(loss):
            self.count = 0
            return
        if self.count == 0:
            self.loss, self.epoch, self.step = loss, epoch, step
        self.count += 1

    @property
    def name(self) -> str:
        """Name the loss with which the row began; "" if the last one read was finite."""
        return "" if self.count == 0 else "NaN" if math.isnan(self.loss) else "infinite"

    @property
    def is_over_limit(self) -> bool:
        """Return whether so many losses in a row were not finite that the run must end."""
        return self.count >= self.limit


def not_finite(state: Dict[str, torch.Tensor], weights: Collection[str]) -> List[str]:
    """List a model's tensors that hold a NaN or, if they are among `weights`, an infinity. Waits
    for the device once."""
    # Buffers may hold an infinity on purpose, as masks do.
    floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}
    if not floats:
        return []
    # A tensor with several names, such as a shared layer's, is checked once.
    tensors = {(memory_key(tensor), name in weights): tensor for name, tensor in floats.items()}
    checks = [
        (~tensor.isfinite() if is_weight else tensor.isnan()).any()
        for (_, is_weight), tensor in tensors.items()
    ]
    is_bad = dict(zip(tensors, torch.stack(checks).tolist()))
    return [name for name, tensor in floats.items() if is_bad[memory_key(tensor), name in weights]]


def memory_key(tensor: torch.Tensor) -> str:
    """Return a text that only tensors with the same memory and shape share."""
    # Not a tuple: a file can choose numbers so that the hashes of many tuples are equal.
    return repr((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()))


def describe(troubles: List[Trouble], options: Options, world: World) -> str:
    """Describe in a sentence when and on which ranks numbers became not finite, and the likely
    causes. `troubles`: one of each affected rank."""
    # A loss shows the step at which the trouble began. A tensor may be broken for longer.
    with_loss = [trouble for trouble in troubles if trouble["loss"]]
    earliest = min(with_loss or troubles, key=lambda trouble: trouble["step"])
    moment = f"epoch {earliest['epoch']}, step {earliest['step']}"
    origins = [trouble for trouble in with_loss if trouble["step"] == earliest["step"]]
    is_partial = 0 < len(origins) < world.size
    ranks = ", ".join(f"{o['host']} (rank {o['rank']})" for o in origins) if is_partial else ""
    event = f"the loss has been {earliest['loss']} since {moment}"
    if not with_loss:
        event = f"{earliest['tensor']} of the model is not finite after {moment}"
    return (
        f"{event}{f', first on {ranks}' if ranks else ''}: the run ends, and earlier "
        f"checkpoints are kept. Likely causes: {'; '.join(list_causes(options, ranks))}."
    )


def list_causes(options: Options, ranks: str = "") -> List[str]:
    """List the likely causes as clauses of a message. `ranks`: those on which the trouble began; ""
    for all ranks."""
    clip = "" if options.clip_grad_norm else " or --clip_grad_norm 1"
    clauses = [
        f"the learning rate is too high (--lr {options.lr:g}: try a tenth of it, a longer "
        f"--warmup_epochs{clip})"
    ]
    if options.precision in ("O1", "O2", "O3"):
        clauses.append(
            f"the range of fp16 is too small (--precision {options.precision}: try bf16 or fp32)"
        )
    if options.sync != strategies.EXACT:
        clauses.append(f"--sync {options.sync} rounds the gradients (try {strategies.EXACT})")
    if ":" in options.model:
        clauses.append("the model divides by zero, or takes the logarithm of zero")
    if ranks:
        clauses.append(f"bad images or faulty memory on {ranks}, if this always starts there")
    return clauses
