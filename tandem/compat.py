"""All differences between torch 1.12.1 with Python 3.9 and the newest versions, in one place."""

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


def ddp_buffers(at_each_forward: bool) -> Dict[str, Any]:
    """DDP's keyword for copying rank 0's buffers; renamed in 2.13."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: at_each_forward}


def patient_group(meeting: timedelta, later: timedelta) -> Any:
    """A Gloo group of all ranks that waits for `later`, but while it is formed for five times
    `meeting` (Gloo's own factor) only: so long does a rank wait for the connection of one that has
    ended meanwhile. Groups of a torch without `set_timeout` have one timeout. Collective."""
    if not hasattr(dist, "set_timeout"):
        return dist.new_group(backend="gloo", timeout=later)
    group: Any = dist.new_group(backend="gloo", timeout=meeting)
    dist.set_timeout(later, group)
    return group


def end_group(group: Any) -> None:
    """Give back the threads and connections of a group, if there is one that the process's own
    `destroy_process_group` has not taken along."""
    if group is not None:
        with contextlib.suppress(ValueError, RuntimeError):
            dist.destroy_process_group(group)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """How long the collectives of a group wait on this device; where it does not say, torch's
    default."""
    backend = group._get_backend(device) if hasattr(group, "_get_backend") else group
    asked = getattr(getattr(backend, "options", None), "_timeout", None)
    return cast(timedelta, asked or default_pg_timeout)


def on_any_step(call: Callable[[Any], None]) -> Any:
    """Call with each optimizer of torch's kind that has stepped; returns what removes that. Since
    2.0: None before."""
    module = importlib.import_module("torch.optim.optimizer")  # of which torch.optim says nothing
    register = getattr(module, "register_optimizer_step_post_hook", None)
    return None if register is None else register(lambda optimizer, *_: call(optimizer))


def ddp_iterations(model: DistributedDataParallel) -> int:
    """How many forwards DDP prepared a sum for, as it logged last; 0 where torch does not say."""
    log: Callable[[], Any] = getattr(model, "_get_ddp_logging_data", dict)
    return int(log().get("iteration", 0))


def autocast_type(device: torch.device) -> Optional[torch.dtype]:
    """What operations are cast to here; None where autocast is off. Since 2.4 by kind of device."""
    kind = device.type
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


def cpu_capability() -> Optional[str]:
    """AVX2, AVX512, DEFAULT, ...: the instructions of torch's own kernels, with
    ATEN_CPU_CAPABILITY taken into account; None where this torch does not say."""
    if hasattr(torch.backends, "cpu") and hasattr(torch.backends.cpu, "get_cpu_capability"):
        return torch.backends.cpu.get_cpu_capability()
    found = re.search(r"CPU capability usage: (\w+)", torch.__config__.show())
    return found.group(1) if found else None


def lerp_all(to: List[torch.Tensor], values: List[torch.Tensor], weight: float) -> None:
    """Move each tensor by `weight` of the way to its value, in place and in few kernels."""
    if not to:
        return
    if hasattr(torch, "_foreach_lerp_"):  # torch 2.0
        torch._foreach_lerp_(to, values, weight)
    else:
        torch._foreach_mul_(to, 1 - weight)
        torch._foreach_add_(to, values, alpha=weight)


def copy_all(to: List[torch.Tensor], values: List[torch.Tensor]) -> None:
    """Copy each value to its tensor, whatever its dtype, in few kernels."""
    if hasattr(torch, "_foreach_copy_") and to:  # torch 2.1
        torch._foreach_copy_(to, values)
    else:
        for tensor, value in zip(to, values):
            tensor.copy_(value)


def unscale(gradients: List[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
    """Multiply all by `factor`, in place and in few kernels; 1.0 on the device where any was not
    finite, else 0.0. As GradScaler does it: torch 1.12's norm would take a kernel or two for each
    gradient."""
    found = torch.zeros_like(factor)
    if not gradients:
        return found
    on_cpus = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 3)
    if gradients[0].is_cuda or on_cpus:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, factor)
        return found
    finite = [gradient.isfinite().all() for gradient in gradients]  # a CPU, by an older torch
    torch._foreach_mul_(gradients, factor.item())
    return (~torch.stack(finite).all()).to(factor.dtype)


def static_graph_accumulates() -> bool:
    """Whether DDP with a static graph can add up micro-batches: torch 1.12 ends in an internal
    assertion of its own, 2.15 does not."""
    return not torch.__version__.startswith("1.")


def steps_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can skip a step depending on a number on the device, `found_inf`, as
    for GradScaler: torch's fused optimizers can, SGD since 2.3."""
    able = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return able and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 3)


def nccl_settings() -> Dict[str, str]:
    """The environment in which NCCL says in words what is wrong, and a collective that exceeds its
    timeout ends the process. The latter is the default since torch 2.2; before that, only torchrun
    set it. Variables that the user has set are kept."""
    wanted = {"NCCL_DEBUG": "WARN"}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 2):
        wanted["NCCL_ASYNC_ERROR_HANDLING"] = "1"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def bound_to(device: torch.device) -> Dict[str, Any]:
    """init_process_group's keyword by which NCCL knows the process's GPU and connects at once, so
    that it fails there and not in the first step. Since torch 2.3; of these, {} for those (2.4 to
    2.7 among them) in which a group of some ranks then hangs: ranks that are not in it take part in
    a split of NCCL's group although it is one of Gloo's, and its members do not."""
    known = inspect.signature(torch.distributed.init_process_group).parameters
    split_from = getattr(torch.distributed.distributed_c10d, "_get_split_source", None)
    heeds = split_from is not None and len(inspect.signature(split_from).parameters) > 1
    return {"device_id": device} if "device_id" in known and heeds else {}


# What a model's weights and buffers, an optimizer's state and an average can be made of. torch also
# reads kinds that nothing can be computed or copied with (of 4 bits, without a device, quantized).
NUMBERS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def is_plain(value: Any) -> bool:
    """Whether what a file gave is a tensor that can be copied into another one: dense, of ordinary
    numbers, all of which the file held. A few bytes can describe a view of any size."""
    if not isinstance(value, torch.Tensor) or value.dtype not in NUMBERS:
        return False
    if value.layout is not torch.strided or value.device.type != "cpu":
        return False
    stored = value.untyped_storage() if hasattr(value, "untyped_storage") else value.storage()
    return value.numel() * value.element_size() <= stored.nbytes()
