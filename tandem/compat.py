"""Bridge all differences between torch 1.12.1 with Python 3.9 and the newest versions."""

import contextlib
import importlib
import inspect
import os
import re
from datetime import timedelta
from typing import Any, Callable, Dict, List, Optional, cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))  # (2, 1) for 2.1.0+cu121


def ddp_buffers(at_each_forward: bool) -> Dict[str, Any]:
    """Return DDP's keyword for copying rank 0's buffers; torch 2.13 has renamed the keyword."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    return {name: at_each_forward}


def make_patient_group(connect_timeout: timedelta, timeout: timedelta) -> Any:
    """Make a Gloo group of all ranks whose collectives wait for `timeout`. While Gloo forms the
    group, it waits for five times `connect_timeout`, so that it soon notices a rank that has ended.
    A torch without `set_timeout` uses `timeout` for both. Collective."""
    if not hasattr(dist, "set_timeout"):
        return dist.new_group(backend="gloo", timeout=timeout)
    group: Any = dist.new_group(backend="gloo", timeout=connect_timeout)
    dist.set_timeout(timeout, group)
    return group


def end_group(group: Any) -> None:
    """End the threads and connections of a group, if there is one."""
    if group is not None:
        # The process may have ended all groups with `destroy_process_group` before.
        with contextlib.suppress(ValueError, RuntimeError):
            dist.destroy_process_group(group)


def find_timeout(group: Any, device: torch.device) -> timedelta:
    """Return how long a group's collectives wait on this device, or torch's default if the group
    does not say."""
    backend = group._get_backend(device) if hasattr(group, "_get_backend") else group
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return cast(timedelta, timeout or default_pg_timeout)


def register_step_hook(function: Callable[[Any], None]) -> Any:
    """Call a function with each optimizer that has stepped. Return a handle whose `remove` ends
    these calls, or None before torch 2.0, which has no such hooks."""
    # torch.optim hides its module `optimizer` from type checkers.
    module = importlib.import_module("torch.optim.optimizer")
    register = getattr(module, "register_optimizer_step_post_hook", None)
    return None if register is None else register(lambda optimizer, *_: function(optimizer))


def count_ddp_forwards(model: DistributedDataParallel) -> int:
    """Return for how many forwards DDP has prepared a sum, by DDP's last log; 0 without a log."""
    # DDP logs the first steps, and then one in a hundred.
    log: Callable[[], Any] = getattr(model, "_get_ddp_logging_data", dict)
    return int(log().get("iteration", 0))


def autocast_type(device: torch.device) -> Optional[torch.dtype]:
    """Return the type to which autocast casts operations; None if autocast is off."""
    kind = device.type
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


def cpu_capability() -> Optional[str]:
    """Return the instruction set of torch's CPU kernels, such as AVX2, AVX512 or DEFAULT; None if
    this torch does not report it. ATEN_CPU_CAPABILITY may limit the instruction set."""
    if hasattr(torch.backends, "cpu") and hasattr(torch.backends.cpu, "get_cpu_capability"):
        return torch.backends.cpu.get_cpu_capability()
    match = re.search(r"CPU capability usage: (\w+)", torch.__config__.show())
    return match.group(1) if match else None


# The following functions take lists, because each kernel would take longer to start than to run.


def lerp_all(targets: List[torch.Tensor], values: List[torch.Tensor], weight: float) -> None:
    """Move each target by `weight` of the way to its value, in place."""
    if not targets:  # which torch rejects
        return
    if hasattr(torch, "_foreach_lerp_"):  # torch 2.0
        torch._foreach_lerp_(targets, values, weight)
    else:
        torch._foreach_mul_(targets, 1 - weight)
        torch._foreach_add_(targets, values, alpha=weight)


def copy_all(targets: List[torch.Tensor], values: List[torch.Tensor]) -> None:
    """Copy each value to its target; dtypes may differ."""
    if hasattr(torch, "_foreach_copy_") and targets:  # torch 2.1
        torch._foreach_copy_(targets, values)
    else:
        for target, value in zip(targets, values):
            target.copy_(value)


def unscale(gradients: List[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
    """Multiply gradients by `factor` in place, as GradScaler does. Returns a tensor on the device:
    1.0 if a gradient is not finite, otherwise 0.0."""
    found_inf = torch.zeros_like(factor)
    if not gradients:
        return found_inf
    # torch's norm would start a kernel or two for each gradient; this function starts few for all.
    if gradients[0].is_cuda or TORCH_VERSION >= (2, 3):
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, factor)
        return found_inf
    finite = [gradient.isfinite().all() for gradient in gradients]
    torch._foreach_mul_(gradients, factor.item())
    return (~torch.stack(finite).all()).to(factor.dtype)


def static_graph_accumulates() -> bool:
    """Return whether DDP with a static graph can add up micro-batches: in torch 1.12 an assertion
    fails, in 2.15 none does."""
    return not torch.__version__.startswith("1.")


def steps_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer skips a step if the number `found_inf` on the device is not 0:
    torch's fused optimizers can, SGD since 2.3."""
    supports = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return supports and TORCH_VERSION >= (2, 3)


def nccl_settings() -> Dict[str, str]:
    """Return environment variables with which NCCL prints its errors, and a collective that exceeds
    its timeout ends the process. Variables that the user has set are omitted."""
    settings = {"NCCL_DEBUG": "WARN"}
    # The default since torch 2.2. Before, only torchrun set this variable.
    if TORCH_VERSION < (2, 2):
        settings["NCCL_ASYNC_ERROR_HANDLING"] = "1"
    return {name: value for name, value in settings.items() if name not in os.environ}


def bound_to(device: torch.device) -> Dict[str, Any]:
    """Return init_process_group's keyword that names the GPU. With this keyword NCCL connects, and
    may fail, at once and not in the first step. Returns {} if it does not work in this torch."""
    parameters = inspect.signature(torch.distributed.init_process_group).parameters
    # In some torches (2.4 to 2.7 among them) a later group of some ranks then hangs. Even for a
    # Gloo group, the ranks outside the group split NCCL's group, and the group's members do not.
    # Fixed torches pass the group's backend to this function.
    split_source = getattr(torch.distributed.distributed_c10d, "_get_split_source", None)
    is_fixed = split_source is not None and len(inspect.signature(split_source).parameters) > 1
    return {"device_id": device} if "device_id" in parameters and is_fixed else {}


# The types of weights, buffers, optimizer states and averages. torch also reads types with which it
# cannot compute or copy: types of 4 bits, quantized types.
NUMBERS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def is_plain(value: Any) -> bool:
    """Return whether a file's value is a tensor that can be copied into another one: dense, on the
    CPU, with ordinary numbers."""
    if not isinstance(value, torch.Tensor) or value.dtype not in NUMBERS:
        return False
    if value.layout is not torch.strided or value.device.type != "cpu":
        return False
    # A few bytes can describe a view of any size, so the file must have held all numbers.
    stored = value.untyped_storage() if hasattr(value, "untyped_storage") else value.storage()
    return value.numel() * value.element_size() <= stored.nbytes()
