"""Use apex's own amp instead of precision.py. Written for NVIDIA/apex, tags 22.04-dev to 25.05."""

import contextlib
import importlib
from typing import Any, Tuple

import torch
from torch import nn

from contract.errors import UserError
from contract.options import Options

from .precision import LossScale, Precision, PrecisionState, weights_of
from .world import World

# Options that are incompatible with apex: it replaces the model's forward, which neither
# DataParallel's replicas nor torch.compile support, and O1 caches cast weights until backward,
# which a forward that is repeated or aborted leaves behind.
UNSUPPORTED = ("compile", "checkpoint_activations", "auto_batch", "skip_oom")


def choose_precision(options: Options, world: World) -> Precision:
    """Return apex's amp if every rank has apex and apex supports these options. Otherwise return
    our own precision, with the reason in `fallback_reason`. Raises UserError if --amp apex is
    impossible. Collective."""
    amp, reason = _import_apex(options, world) if options.precision.startswith("O") else (None, "")
    reasons = [str(answer) for answer in world.gather(reason) if answer]
    if options.amp == "apex" and (reasons or amp is None):
        raise UserError(f"--amp apex: {(reasons or ['it is for O0 to O3'])[0]}.")
    if amp is not None and not reasons:
        return ApexAmp(amp, options.precision, world.device)
    precision = Precision(options.precision, world.device, world.size)
    precision.fallback_reason = reasons[0] if reasons and options.amp == "auto" else ""
    return precision


def _import_apex(options: Options, world: World) -> Tuple[Any, str]:
    """Return the module apex.amp and "", or None and the reason why this rank cannot use apex."""
    if options.amp == "torch":
        return None, "as asked"
    if world.device.type != "cuda":
        return None, "apex needs CUDA"
    unfit = [f"--{name}" for name in UNSUPPORTED if getattr(options, name)]
    unfit += [f"--parallel {options.parallel}"] * (options.parallel != "ddp")
    if unfit:
        return None, f"apex does not support {unfit[0]}"
    amp: Any = None
    # Extensions that were built for another torch may raise anything.
    with contextlib.suppress(Exception):
        amp = importlib.import_module("apex.amp")
    if amp is None:
        return None, "apex is not installed" + f" on {world.host}" * (world.size > 1)
    # amp_C scales and checks all gradients at once. Without it, apex checks each gradient for
    # overflow on the host (161 times a step with ResNet-50).
    if options.amp == "auto":
        kernels: Any = None
        with contextlib.suppress(Exception):
            kernels = importlib.import_module("amp_C")
        if kernels is None:
            return None, (
                f"apex on {world.host} was built without amp_C, so each gradient would wait "
                "for the GPU. --amp apex uses it anyway"
            )
    return amp, ""


class ApexAmp(Precision):
    """apex keeps the masters and the scale, and skips steps; `scale` and `masters` mirror its
    state, so that checkpoints are the same with and without apex."""

    backend = "apex"

    def __init__(self, amp: Any, level: str, device: torch.device) -> None:
        super().__init__(level, device)
        self.amp = amp
        # apex itself casts the inputs, and the operations that it computes in fp16.
        self.input_type, self.autocast = torch.float32, None

    def cast_weights(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights = weights_of(optimizer)
        self.optimizer = optimizer
        # torch counts the samples of all ranks in the type of the statistics (precision.py).
        wide = self.level == "O3" and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
        settings = {"keep_batchnorm_fp32": True} if wide else {}
        self.amp.initialize(model, optimizer, opt_level=self.level, verbosity=0, **settings)
        optimizer.zero_grad()  # creates apex's masters, which a checkpoint must find
        pairs = zip(weights, weights_of(optimizer))
        self.masters = [(weight, master) for weight, master in pairs if weight is not master]

    def backward(self, loss: torch.Tensor, is_last: bool = True) -> None:
        with self.amp.scale_loss(loss, self.optimizer, delay_unscale=not is_last) as scaled:
            scaled.backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: float) -> bool:
        if clip:
            nn.utils.clip_grad_norm_(weights_of(optimizer), clip)
        optimizer.step()  # apex has patched it to do nothing after an overflow
        # O0 and O3 have no scale that adapts, and skip no step.
        if self.scale is None:
            return False
        scale_before = self.scale.value
        self.scale = LossScale(*self.amp.state_dict()["loss_scaler0"].values())
        return self.scale.value < scale_before

    def load_state_dict(self, state: PrecisionState) -> None:
        super().load_state_dict(state)
        if self.scale is not None:
            names = {"loss_scale": self.scale.value, "unskipped": self.scale.good_steps}
            self.amp.load_state_dict({"loss_scaler0": names})
