"""The loss scale of O1 and O2, with apex's schedule: halved when a gradient overflows, and doubled
after 2000 steps without overflow.

It is used instead of torch's GradScaler, which refuses fp16 gradients and, in torch 1.12, any CPU.

The invariant: ranks that sum their gradients have equal scales in each step, though they never
exchange them. They begin with the same scale, and all hold the same sum, which is inf or NaN where
any rank's part of it was: so either all of them skip the step and halve the scale, or none does.
Therefore the sum must be checked, never a rank's own gradients. Ranks that train by themselves
check their own, and each has its own scale.
"""

import dataclasses
from typing import TypedDict, Union

import torch

MOST, PATIENCE = 2.0**24, 2000


class ScaleState(TypedDict):
    """As a checkpoint holds it."""

    value: float
    good_steps: int


@dataclasses.dataclass
class LossScale:
    """The scale on the host, which must know for each step whether it overflowed."""

    value: float = 2.0**16
    good_steps: int = 0

    @property
    def factor(self) -> Union[float, torch.Tensor]:
        """The factor by which the loss is multiplied."""
        return self.value

    def inverse(self, device: torch.device) -> torch.Tensor:
        """By which the gradients on the device are multiplied."""
        return torch.full((), 1 / self.value, device=device)

    def update(self, overflow: bool) -> None:
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value /= 2
        elif self.good_steps == PATIENCE:
            self.value, self.good_steps = min(self.value * 2, MOST), 0

    def state_dict(self) -> ScaleState:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: ScaleState) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]


class DeviceScale:
    """The same on the device, so that the host need not wait to learn of an overflow."""

    def __init__(self, device: torch.device) -> None:
        # These tensors are made once: creating one on a GPU from a Python number waits for the GPU.
        self.device = device
        self.factor = self._good = torch.zeros((), device=device)
        self.load_state_dict(LossScale().state_dict())

    @property
    def value(self) -> float:
        """Waits for the device."""
        return self.factor.item()

    @property
    def good_steps(self) -> int:
        """Waits for the device."""
        return int(self._good.item())

    def inverse(self, device: torch.device) -> torch.Tensor:
        return 1 / self.factor

    def update(self, overflow: torch.Tensor) -> None:
        """`overflow`: a scalar bool tensor on the device."""
        good = (self._good + 1) * ~overflow
        doubled = good == PATIENCE
        self._good = good * ~doubled
        kept = self.factor * (1 - 0.5 * overflow.float())
        self.factor = torch.where(doubled, (kept * 2).clamp(max=MOST), kept)

    def state_dict(self) -> ScaleState:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: ScaleState) -> None:
        self.factor = torch.tensor(state["value"], dtype=torch.float32, device=self.device)
        self._good = torch.tensor(state["good_steps"], dtype=torch.int64, device=self.device)
