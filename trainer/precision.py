"""Mixed precision by name: fp32, fp64, bf16 and apex's levels O0 to O3.

O1: autocast to fp16 with a dynamic loss scale. O2: half weights, fp32 batch normalisation, fp32
master weights, dynamic scale. O3: all half, scale 1.
"""

import contextlib
import dataclasses
import importlib.util
import math
import pathlib
from typing import Any, ContextManager, Dict, List, Tuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .compat import copy_all
from .errors import UserError

AUTOCAST = {"bf16": torch.bfloat16, "O1": torch.float16}
WEIGHTS = {"fp64": torch.float64, "O2": torch.float16, "O3": torch.float16}


def refuse_other_apex() -> None:
    """PyPI's `apex` has nothing to do with NVIDIA's, and hides it. Raises UserError."""
    found = importlib.util.find_spec("apex")
    folders = list(found.submodule_search_locations or []) if found is not None else []
    if found is not None and not any(pathlib.Path(f, "normalization").is_dir() for f in folders):
        raise UserError(
            "the installed package `apex` is another project than NVIDIA's: pip uninstall apex. "
            "--precision O0 to O3 work without apex too."
        )


@dataclasses.dataclass
class LossScale:
    """apex's schedule: halved when a gradient overflows, doubled after 2000 steps without.

    Ours rather than torch's GradScaler, which refuses fp16 gradients and, in torch 1.12, any CPU.
    """

    value: float = 2.0**16
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value /= 2
        elif self.good_steps == 2000:
            self.value, self.good_steps = min(self.value * 2, 2.0**24), 0


def optimized(optimizer: torch.optim.Optimizer) -> List[nn.Parameter]:
    """What the optimizer steps, in its order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


class Precision:
    """Our own levels, on torch's autocast."""

    by = "torch"

    def __init__(self, level: str, device: torch.device) -> None:
        self.level, self.device = level, device
        self.input_type = WEIGHTS.get(level, torch.float32)
        self.autocast = AUTOCAST.get(level)
        self.scale = LossScale() if level in ("O1", "O2") else None
        # Half weights, and the fp32 copies that the optimizer steps in their place: in the weights
        # themselves small updates would round to nothing.
        self.masters: List[Tuple[nn.Parameter, nn.Parameter]] = []

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Give weights their type and the optimizer its masters, in place; before DDP."""
        if self.level in WEIGHTS:
            model.to(WEIGHTS[self.level])
        if self.level != "O2":
            return
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.float()
        for group in optimizer.param_groups:
            for position, weight in enumerate(group["params"]):
                if weight.dtype is torch.float16:
                    master = nn.Parameter(weight.detach().float())
                    group["params"][position] = master
                    self.masters.append((weight, master))

    def computing(self) -> ContextManager[Any]:
        """Around each forward."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def backward(self, loss: torch.Tensor, last: bool = True) -> None:
        """`last`: `step` comes next, no other backward."""
        (loss if self.scale is None else loss * self.scale.value).backward()

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> bool:
        """Unscale, clip to the norm `clip` (0: not at all) and step. True when the gradients
        overflowed: nothing changed but the scale. All ranks hold the same sums, so they agree."""
        for weight, master in self.masters:
            master.grad = None if weight.grad is None else weight.grad.float()
        weights = optimized(optimizer)
        if self.scale is not None:
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.scale.value)
        overflow = False
        if clip or self.scale is not None:
            norm = nn.utils.clip_grad_norm_(weights, clip or math.inf)
        if self.scale is not None:
            overflow = not math.isfinite(norm)
            self.scale.update(overflow)
        if not overflow:
            optimizer.step()
            if self.masters:
                halves, masters = zip(*self.masters)
                copy_all(list(halves), list(masters))
        return overflow

    def full_state(self, model: nn.Module) -> Dict[str, torch.Tensor]:
        """The model's state dict, with masters in the place of half weights."""
        masters = dict(self.masters)
        named = {name: masters.get(weight) for name, weight in model.named_parameters()}
        return {**model.state_dict(), **{name: m for name, m in named.items() if m is not None}}

    @torch.no_grad()
    def renew_masters(self, model: nn.Module, state: Dict[str, torch.Tensor]) -> None:
        """After `state` was loaded into the model, whose half weights have rounded it."""
        masters = dict(self.masters)
        for name, weight in model.named_parameters():
            if weight in masters:
                masters[weight].copy_(state[name])

    def state_dict(self) -> Dict[str, Any]:
        """What `full_state` does not hold."""
        return {"scale": None if self.scale is None else dataclasses.asdict(self.scale)}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if self.scale is not None:
            self.scale = LossScale(**state["scale"])
