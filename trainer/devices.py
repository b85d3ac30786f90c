"""What the ranks compute on. They exchange this before they form a group, as JSON over the store,
since NCCL and Gloo cannot talk to each other.
"""

import json
import os
import pathlib
import platform
import re
from typing import Tuple

import torch
import torch.distributed as dist

from contract.levels import Device, cpu_has_bf16, refuse_mixture
from contract.options import Options


def own_device(device: torch.device, host: str, options: Options) -> Device:
    """This rank's device; with --parallel dp, the weakest of the process's GPUs."""
    version, cuda = str(torch.__version__), torch.version.cuda
    if device.type == "cpu":
        found = re.findall(r"^flags\s*:(.*)", _cpuinfo(), re.MULTILINE)
        bf16 = cpu_has_bf16(found[0].split() if found else (), os.environ)
        return Device(host, "cpu", platform.machine(), 0, bf16, version, cuda)
    every = range(torch.cuda.device_count()) if options.parallel != "ddp" else [device.index]
    weakest = min(every, key=torch.cuda.get_device_capability)
    major, minor = torch.cuda.get_device_capability(weakest)
    name = torch.cuda.get_device_name(weakest)
    return Device(host, "cuda", name, 10 * major + minor, False, version, cuda)


def _cpuinfo() -> str:
    return pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")


def all_devices(own: Device, rank: int, size: int, store: dist.Store) -> Tuple[Device, ...]:
    """In rank order, before the group is formed. Raises UserError on all ranks when GPUs and CPUs
    are mixed."""
    store.set(f"device/{rank}", json.dumps(own))
    devices = tuple(Device(*json.loads(store.get(f"device/{other}"))) for other in range(size))
    store.set(f"device/read/{rank}", "1")
    if rank == 0:
        # This process may host the store, so it must not exit before all ranks have read.
        store.wait([f"device/read/{other}" for other in range(size)])
    refuse_mixture(devices)
    return devices
