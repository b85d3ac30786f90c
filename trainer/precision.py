"""Mixed precision by name: fp32, fp64, bf16 and apex's levels O0 to O3.

O1: autocast to fp16 with a dynamic loss scale. O2: half weights, fp32 batch normalisation, fp32
master weights, dynamic scale. O3: all half, scale 1. The loss scale starts at 2^16, halves when a
gradient overflows and that step is skipped, and doubles after 2000 steps without, as in apex.
"""

import contextlib
import importlib.util
import pathlib
from typing import Any, ContextManager, Dict, List, Optional, Tuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .compat import bf16_in_hardware, grad_scaler
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
            "--precision O1 to O3 need no apex."
        )


def check(level: str, device: torch.device) -> None:
    """Raise UserError for a level that this device does not have."""
    if level.startswith("O"):
        refuse_other_apex()
    if level in ("O1", "O2", "O3") and device.type == "cpu":
        raise UserError(f"--precision {level} computes in fp16 on a GPU; on a CPU use bf16.")
    if level == "bf16" and device.type == "cuda" and not bf16_in_hardware():
        name = torch.cuda.get_device_name()
        raise UserError(f"--precision bf16: {name} only emulates it, slowly; use O1.")


class Masters:
    """fp32 copies of half weights for the optimizer: small updates would round to nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.pairs: List[Tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            for position, weight in enumerate(group["params"]):
                if weight.dtype is torch.float16:
                    master = nn.Parameter(weight.detach().float())
                    group["params"][position] = master
                    self.pairs.append((weight, master))

    def take_gradients(self) -> None:
        for weight, master in self.pairs:
            master.grad = None if weight.grad is None else weight.grad.float()

    @torch.no_grad()
    def give_weights(self) -> None:
        for weight, master in self.pairs:
            weight.copy_(master)


class Precision:
    def __init__(self, level: str, device: torch.device) -> None:
        self.level, self.device = level, device
        self.scaler: Any = None
        if level in ("O1", "O2"):
            self.scaler = grad_scaler(device, init_scale=2.0**16, growth_interval=2000)
        self.masters: Optional[Masters] = None

    def convert(self, model: nn.Module) -> None:
        """Give the model's weights their type, in place; before DDP and the optimizer."""
        if self.level in WEIGHTS:
            model.to(WEIGHTS[self.level])
        if self.level == "O2":
            for module in model.modules():
                if isinstance(module, _BatchNorm):
                    module.float()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Put masters in the place of half weights; before the optimizer's first step."""
        if self.level == "O2":
            self.masters = Masters(optimizer)

    @property
    def input_type(self) -> torch.dtype:
        return WEIGHTS.get(self.level, torch.float32)

    def computing(self) -> ContextManager[Any]:
        """Around each forward."""
        if self.level in AUTOCAST:
            return torch.autocast(self.device.type, dtype=AUTOCAST[self.level])
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> bool:
        """Unscale, clip to the norm `clip` (0: not at all) and step. True when the gradients
        overflowed: nothing changed but the scale."""
        if self.masters is not None:
            self.masters.take_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if clip:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(weights, clip)
        if self.scaler is None:
            optimizer.step()
            return False
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.masters is not None:
            self.masters.give_weights()
        return bool(self.scaler.get_scale() < before)

    def state_dict(self) -> Dict[str, Any]:
        masters = self.masters.pairs if self.masters is not None else []
        return {
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "masters": [master.detach() for _, master in masters],
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.masters is not None:
            for (_, master), value in zip(self.masters.pairs, state["masters"]):
                master.data.copy_(value)
