"""Average a model's weights and buffers exponentially, for evaluation and export (--ema)."""

from contextlib import contextmanager
from typing import Dict, Iterator, List, TypedDict

import torch
from torch import nn

from contract.errors import UserError
from tandem.compat import copy_all, lerp_all

State = Dict[str, torch.Tensor]


class AverageState(TypedDict):
    """The average as a checkpoint holds it."""

    updates: int
    average: State


class TensorList:
    """Some entries of a state, as lists that are made once: the keys, and their tensors."""

    def __init__(self, state: State, keys: List[str]) -> None:
        self.keys, self.tensors = keys, [state[key] for key in keys]


class Ema:
    """Averages a model's floating-point state, in fp32 at least, and copies other state.

    Early on, the decay is lower: min(decay, (1 + n) / (10 + n)) at the n-th update. The average
    then soon forgets the random initial weights. `state` is the state of the bare model without
    DDP's wrapper, with master weights instead of half-precision weights.
    """

    def __init__(self, state: State, decay: float) -> None:
        self.decay = decay
        self.begin(state)

    def begin(self, state: State) -> None:
        """Start with `state` as the average, and forget the previous average."""
        self.updates = 0
        self.average = {key: _wide(value).detach().clone() for key, value in state.items()}
        # Counters have no average: they are copied.
        floats = [key for key, value in state.items() if value.is_floating_point()]
        self._averaged = TensorList(self.average, floats)
        self._copied = TensorList(self.average, [key for key in state if key not in set(floats)])

    @torch.no_grad()
    def update(self, state: State) -> None:
        """Move the average towards `state`."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        # One call for all tensors: a loop over hundreds of them would launch as many kernels.
        lerp_all(
            self._averaged.tensors, [_wide(state[key]) for key in self._averaged.keys], 1 - decay
        )
        copy_all(self._copied.tensors, [state[key] for key in self._copied.keys])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averages within the block, and then exactly its previous state."""
        # This works in place, since the optimizer and DDP hold the same tensors.
        model_state = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(self.average)
        try:
            yield
        finally:
            model.load_state_dict(model_state)

    def state_dict(self) -> AverageState:
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state: AverageState) -> None:
        """Load an average in place. Raises UserError for one of another model."""
        average = state["average"]
        for key, value in self.average.items():
            if key not in average or average[key].shape != value.shape:
                raise UserError(f"the checkpoint's average does not belong to this model: {key}.")
            value.copy_(average[key])
        self.updates = state["updates"]


def _wide(value: torch.Tensor) -> torch.Tensor:
    """Convert fp16 and bf16 to fp32: they would lose the small updates of the average."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
