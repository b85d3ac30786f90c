"""What a rank says of its machine and software at the start, so that runs can be told apart."""

import contextlib
import os
import pathlib
import platform
import re
from importlib import metadata
from typing import Any, Dict, Optional

import torch

from .compat import cpu_capability
from .data.workers import cores

PACKAGES = ("torchvision", "numpy", "pillow")
DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def versions(on_gpu: bool) -> Dict[str, str]:
    """Of everything that computes, beside Python and torch: the kernel, and what torch was built
    with where it is used."""
    found = {"kernel": platform.release()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if on_gpu:
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _first(DRIVER, r"Kernel Module.*?\s(\d[\d.]+)") or "unknown"
    return found


def machine() -> Dict[str, Any]:
    """Its processor and how many of its cores this process may use."""
    name = _first(pathlib.Path("/proc/cpuinfo"), r"(?m)^model name\s*:\s*(.+)$")
    return {"cpu": name or platform.machine(), "cores": cores()}


def instructions() -> Dict[str, Optional[str]]:
    """The CPU instructions in use. `aten`: the level that torch chose for its own kernels;
    `onednn_limit`: the environment's limit for oneDNN, which computes convolutions (None: it uses
    the best that the CPU has, and has no way to ask which that is)."""
    return {"aten": cpu_capability(), "onednn_limit": os.environ.get("ONEDNN_MAX_CPU_ISA")}


def _first(path: pathlib.Path, pattern: str) -> Optional[str]:
    """What the group of a pattern first matches in a file; None where it does not, or there is no
    such file."""
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found.group(1).strip() if found else None
