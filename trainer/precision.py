"""Mixed precision by name: fp32, fp64, bf16 and apex's levels O0 to O3.

O0: fp32. O1: autocast to fp16 with a dynamic loss scale. O2: fp16 weights, fp32 batch
normalisation, fp32 master weights, dynamic scale. O3: all fp16, scale 1. step.py calls
`Precision`; apex_amp.py chooses between this class and apex's own amp.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
from typing import Any, ContextManager, Dict, List, Optional, Tuple, TypedDict, Union

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from contract.errors import UserError
from tandem.compat import copy_all, steps_by_itself, unscale

# By level: the type of autocast, and the type of weights that are not fp32.
AUTOCAST_TYPES = {"bf16": torch.bfloat16, "O1": torch.float16}
WEIGHT_TYPES = {"fp64": torch.float64, "O2": torch.float16, "O3": torch.float16}


def refuse_other_apex() -> None:
    """Raise UserError if `apex` is PyPI's package of that name: it hides NVIDIA's."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if spec is not None and not any(pathlib.Path(f, "normalization").is_dir() for f in folders):
        raise UserError(
            "the installed package `apex` is not NVIDIA's: run `pip uninstall apex`. "
            "--precision O0 to O3 work without apex too."
        )


def weights_of(optimizer: torch.optim.Optimizer) -> List[nn.Parameter]:
    """Return the parameters that the optimizer updates, in its order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


# O1 and O2 have apex's schedule of the loss scale. The scale begins at FIRST_SCALE divided by the
# number of ranks, because step.py multiplies the loss by this number. The scale is halved when a
# gradient overflows, and doubled after GROWTH_INTERVAL steps without overflow. torch's GradScaler
# is not used, since it rejects fp16 gradients and, in torch 1.12, any CPU.
#
# The invariant: ranks that sum their gradients have equal scales in each step, though they never
# exchange the scales. They begin with the same scale, and all hold the same sum. The sum is inf or
# NaN if the gradient of any rank was. So either all ranks skip the step and halve the scale, or no
# rank does. Therefore the sum must be checked, and never the gradients of one rank.
FIRST_SCALE, MAX_SCALE, GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000


class ScaleState(TypedDict):
    """The loss scale as a checkpoint holds it."""

    value: float
    good_steps: int  # without overflow, since the scale last changed


@dataclasses.dataclass
class LossScale:
    """The scale on the host, which waits in each step to learn whether a gradient overflowed."""

    value: float = FIRST_SCALE
    good_steps: int = 0

    @property
    def factor(self) -> Union[float, torch.Tensor]:
        """Return the factor by which the loss is multiplied."""
        return self.value

    def inverse(self, device: torch.device) -> torch.Tensor:
        """Return the factor that removes the scale from gradients: a scalar on the device."""
        return torch.full((), 1 / self.value, device=device)

    def update(self, overflow: bool) -> None:
        """Halve the scale after an overflow; double it after GROWTH_INTERVAL steps without one."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value /= 2
        elif self.good_steps == GROWTH_INTERVAL:
            self.value, self.good_steps = min(self.value * 2, MAX_SCALE), 0

    def state_dict(self) -> ScaleState:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: ScaleState) -> None:
        self.value, self.good_steps = state["value"], state["good_steps"]


class DeviceScale:
    """A loss scale on the device, so that the host need not wait to learn of an overflow."""

    def __init__(self, device: torch.device, state: ScaleState) -> None:
        # These tensors are made once: creating one on a GPU from a Python number waits for the GPU.
        self.device = device
        self.factor = self._good = torch.zeros((), device=device)  # load_state_dict sets both
        self.load_state_dict(state)

    @property
    def value(self) -> float:
        """Read the scale. Waits for the device."""
        return self.factor.item()

    @property
    def good_steps(self) -> int:
        """Read the steps since the scale changed. Waits for the device."""
        return int(self._good.item())

    def inverse(self, device: torch.device) -> torch.Tensor:
        return 1 / self.factor

    def update(self, overflow: torch.Tensor) -> None:
        """Adjust the scale after a step. `overflow`: a scalar bool tensor on the device."""
        # This is LossScale.update without a branch, since a branch would wait for the device.
        good = (self._good + 1) * ~overflow
        is_doubled = good == GROWTH_INTERVAL
        self._good = good * ~is_doubled
        factor = self.factor * (1 - 0.5 * overflow.float())
        self.factor = torch.where(is_doubled, (factor * 2).clamp(max=MAX_SCALE), factor)

    def state_dict(self) -> ScaleState:
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: ScaleState) -> None:
        self.factor = torch.tensor(state["value"], dtype=torch.float32, device=self.device)
        self._good = torch.tensor(state["good_steps"], dtype=torch.int64, device=self.device)


class PrecisionState(TypedDict):
    """The precision's state as a checkpoint holds it, next to the model's full state."""

    scale: Optional[ScaleState]


# For each name in a model's state: the dictionary that holds its tensor, and the key there.
Places = Dict[str, Tuple[Dict[str, Any], str]]


class Precision:
    """Our own levels, on torch's autocast. apex_amp.ApexAmp replaces some of the methods."""

    backend = "torch"
    fallback_reason = ""  # for the screen: the reason why apex is not used

    def __init__(self, level: str, device: torch.device, ranks: int = 1) -> None:
        self.level, self.device = level, device
        self.input_type = WEIGHT_TYPES.get(level, torch.float32)  # of normalised images
        self.autocast = AUTOCAST_TYPES.get(level)
        self.scale: Union[LossScale, DeviceScale, None] = None
        if level in ("O1", "O2"):
            # Divided by the next power of two: 4 for three ranks. A scale stays a power of two.
            self.scale = LossScale(FIRST_SCALE / 2 ** (ranks - 1).bit_length())
        # Half-precision weights, and the fp32 copies that the optimizer updates instead: in the
        # weights themselves, small updates would round to zero.
        self.masters: List[Tuple[nn.Parameter, nn.Parameter]] = []
        self._places: Optional[Places] = None  # of the tensors that `live_state` returns

    def get_scale(self) -> float:
        """Return the scale of the next loss. tandem.sync calls this method, which GradScaler has,
        too. May wait for the device."""
        return 1.0 if self.scale is None else self.scale.value

    def cast_weights(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Cast the weights and give the optimizer its masters, in place; called before DDP."""
        # A fused optimizer decides on the device whether it skips a step: the host need not wait.
        if self.scale is not None and steps_by_itself(optimizer):
            self.scale = DeviceScale(self.device, self.scale.state_dict())
        if self.level in WEIGHT_TYPES:
            model.to(WEIGHT_TYPES[self.level])
        # An fp16 SyncBatchNorm would count the samples of all ranks in fp16, which ends at 65,504.
        fp32_type = {"O2": _BatchNorm, "O3": nn.SyncBatchNorm}.get(self.level)
        for module in model.modules():
            if fp32_type is not None and isinstance(module, fp32_type):
                module.float()
        if self.level != "O2":
            return
        # Batch normalisation stayed fp32, and needs no master.
        for group in optimizer.param_groups:
            for position, weight in enumerate(group["params"]):
                if weight.dtype is torch.float16:
                    master = nn.Parameter(weight.detach().float())
                    group["params"][position] = master
                    self.masters.append((weight, master))

    def computing(self) -> ContextManager[Any]:
        """Return the context for each forward."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def backward(self, loss: torch.Tensor, is_last: bool = True) -> None:
        """Run backward of the scaled loss. `is_last`: `step` comes next, not another backward. Only
        apex needs to know."""
        (loss if self.scale is None else loss * self.scale.factor).backward()

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> Union[bool, torch.Tensor]:
        """Unscale the gradients, clip them to the norm `clip` (0: do not clip), and step. Return
        whether a gradient overflowed: then only the scale has changed, equally on all ranks. With a
        DeviceScale the result stays on the device; only reading it as a bool waits."""
        for weight, master in self.masters:
            master.grad = None if weight.grad is None else weight.grad.float()
        weights = weights_of(optimizer)
        overflow: Union[bool, torch.Tensor] = False
        if self.scale is not None:
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            # A scalar on the device: 1.0 if a gradient overflowed, otherwise 0.0.
            found_inf = unscale(gradients, self.scale.inverse(self.device))
        if clip:
            nn.utils.clip_grad_norm_(weights, clip)
        if isinstance(self.scale, DeviceScale):
            overflow = found_inf > 0
            self.scale.update(overflow)
            # The fused SGD makes its momentum buffers in the first step. If the optimizer skipped
            # this step, the buffers would stay uninitialised.
            for group in optimizer.param_groups:
                first_weight = group["params"][0]
                if group.get("momentum") and "momentum_buffer" not in optimizer.state[first_weight]:
                    for weight in group["params"]:
                        if weight.grad is not None:
                            buffer = torch.zeros_like(weight)
                            optimizer.state[weight]["momentum_buffer"] = buffer
            # torch's fused optimizers skip their step if this is not zero.
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        elif self.scale is not None:
            overflow = bool(found_inf)
            self.scale.update(overflow)
        # A tensor is never `True` itself: the fused optimizer decides on the device.
        if overflow is not True:
            optimizer.step()
            if self.masters:
                halves, masters = zip(*self.masters)
                copy_all(list(halves), list(masters))
        return overflow

    def full_state(self, model: nn.Module) -> Dict[str, torch.Tensor]:
        """Return the model's state dict, with masters in place of half-precision weights."""
        masters = dict(self.masters)
        parameters = model.named_parameters()
        replaced = {name: masters[weight] for name, weight in parameters if weight in masters}
        return {**model.state_dict(), **replaced}

    def live_state(self, model: nn.Module) -> Dict[str, torch.Tensor]:
        """Return the same as `full_state`, but fast enough for each step."""
        # The first call finds the dictionary of each tensor. The tensors themselves are not cached,
        # since batch normalisation in torch 1.12 replaces its counter by a new tensor.
        if self._places is None:
            state, masters = self.full_state(model), dict(self.masters)
            places: Places = {}
            for prefix, module in model.named_modules(remove_duplicate=False):
                for tensors in (module._parameters, module._buffers):
                    for key, value in tensors.items():
                        name = f"{prefix}.{key}" if prefix else key
                        if name in state and value in masters:
                            places[name] = ({key: masters[value]}, key)
                        elif name in state:
                            places[name] = (tensors, key)
            # A model with its own `state_dict` may have other names: then {} says "use full_state".
            is_complete = places.keys() == state.keys()
            self._places = {name: places[name] for name in state} if is_complete else {}
        if not self._places:
            return self.full_state(model)
        return {name: tensors[key] for name, (tensors, key) in self._places.items()}

    @torch.no_grad()
    def renew_masters(self, model: nn.Module, state: Dict[str, torch.Tensor]) -> None:
        """Copy `state` into the masters. The model has loaded this state before, but its
        half-precision weights have rounded the values."""
        masters = dict(self.masters)
        for name, weight in model.named_parameters():
            if weight in masters and name in state:
                masters[weight].copy_(state[name])

    def state_dict(self) -> PrecisionState:
        """Return the state that `full_state` does not hold."""
        return {"scale": None if self.scale is None else self.scale.state_dict()}

    def load_state_dict(self, state: PrecisionState) -> None:
        if self.scale is not None and state["scale"] is not None:
            self.scale.load_state_dict(state["scale"])
