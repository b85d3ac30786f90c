"""Describe a rank's process, its machine and its gradients for the report."""

import contextlib
import os
import pathlib
import platform
import re
import resource
import time
from importlib import metadata
from typing import Any, Dict, Optional

import torch
from torch import nn

from contract.runs import RECORD

from .compat import cpu_capability
from .coordinates import ProcessCoordinates, count_cores


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated on a GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux reports KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_process(
    coordinates: ProcessCoordinates, host: str, device: torch.device, clock_start: float
) -> Dict[str, Any]:
    """Return the fields of the `start` line that describe the process, its machine and its Python.
    `clock_start`: when its clock began, in seconds of time.monotonic()."""
    on_gpu = device.type == "cuda"
    return {
        "record": RECORD,
        "mono_process": process_start_time(),
        "mono": clock_start,
        "unix": time.time(),
        "host": host,
        "rank": coordinates.rank,
        "local_rank": coordinates.local_rank,
        "world_size": coordinates.size,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "versions": read_versions(on_gpu),
        "cpu": _find_in_file(CPU_INFO, r"(?m)^model name\s*:\s*(.+)$") or platform.machine(),
        "cores": count_cores(),
        # oneDNN computes convolutions. It does not report its instructions, only their limit.
        "instructions": {
            "aten": cpu_capability(),
            "onednn_limit": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        },
    }


def describe_gradients(*models: nn.Module) -> Dict[str, Any]:
    """Return the bytes of all gradients that a step sums. Pass a model as often as it is summed."""
    weights = [p for model in models for p in model.parameters() if p.requires_grad]
    return {"gradient_bytes": sum(p.numel() * p.element_size() for p in weights)}


def process_start_time() -> float:
    """Return when this process began, or the guard that started it: seconds of CLOCK_MONOTONIC."""
    if "TANDEM_GUARD_MONO" in os.environ:
        return float(os.environ["TANDEM_GUARD_MONO"])
    # The file is `4711 (python train.py) S 4700 ...`: the name may have spaces and parentheses. The
    # start time is field 22 of proc(5), and so the 20th field after the name.
    _, _, after_name = pathlib.Path("/proc/self/stat").read_text().rpartition(")")
    start_ticks = int(after_name.split()[19])
    start_seconds = start_ticks / os.sysconf("SC_CLK_TCK")  # since the boot
    age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds
    return time.monotonic() - age_seconds


PACKAGES = ("torchvision", "numpy", "pillow")
DRIVER, CPU_INFO = pathlib.Path("/proc/driver/nvidia/version"), pathlib.Path("/proc/cpuinfo")


def read_versions(on_gpu: bool) -> Dict[str, str]:
    """Return the versions of the kernel and of packages. On a GPU also return the versions of the
    driver and of torch's CUDA libraries."""
    versions = {"kernel": platform.release()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if on_gpu:
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        driver = _find_in_file(DRIVER, r"Kernel Module.*?\s(\d[\d.]+)")
        versions["driver"] = driver or "unknown"
    return versions


def _find_in_file(path: pathlib.Path, pattern: str) -> Optional[str]:
    """Return the group of a pattern's first match in a file, or None."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match.group(1).strip() if match else None
