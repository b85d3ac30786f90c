"""Decide which precision the devices of a run support. The launcher applies this rule to the
machines' GPUs before anything starts, and the ranks apply the rule to the devices that they report
to each other. This file does not import torch."""

from typing import Iterable, List, Mapping, NamedTuple, Optional, Sequence

from contract.errors import UserError

# Compute capabilities, as 10 x major + minor: of the first GPUs with tensor cores (fp16), and of
# the first with bf16. CUDA C++ Programming Guide, "Compute Capabilities".
VOLTA, AMPERE = 70, 80
# {precision: bits in which convolutions and matrix products are computed}.
BITS = {"fp32": 32, "fp64": 64, "bf16": 16, "O0": 32, "O1": 16, "O2": 16, "O3": 16}
FP16 = tuple(name for name, bits in BITS.items() if bits == 16 and name != "bf16")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")  # in /proc/cpuinfo, of CPUs with bf16 instructions
# oneDNN may use these instructions if ONEDNN_MAX_CPU_ISA contains one of these words.
BF16_LIMITS = ("BF16", "AMX", "FP16", "AVX10", "ALL", "DEFAULT")


class Device(NamedTuple):
    """Describe the device of a rank in plain values, which ranks send to each other as JSON."""

    host: str
    kind: str  # "cuda" or "cpu"
    name: str
    sm: int = 0  # compute capability of a GPU: 86 is 8.6
    bf16: bool = False  # the CPU has the instructions, and oneDNN may use them
    torch: str = ""
    cuda: Optional[str] = None  # the version that torch was built for

    def __str__(self) -> str:
        return f"the CPU of {self.host}" if self.kind == "cpu" else f"{self.name} ({self.host})"


class Level(NamedTuple):
    """A precision that was decided for a run. `reason`: one clause for people."""

    name: str
    reason: str


def resolve(
    precision: str, devices: Sequence[Device], emulate: bool = False, is_earlier: bool = False
) -> Level:
    """Return the level of a run on the devices of its ranks: `precision`, or for `auto` the best
    level that all devices have in hardware. `emulate`: allow bf16 without hardware support.
    `is_earlier`: the run began with this precision. Raises UserError if a device lacks it."""
    refuse_mixture(devices)
    best = best_level(devices)
    if precision == "auto":
        return best
    for device in devices:
        reason = explain_lack(device, precision, emulate)
        if reason:
            remedy = f"use {best.name}" + (
                ", or add --emulate, which is slow" * (precision == "bf16")
            )
            if is_earlier:
                remedy = f"the run keeps its first precision: omit {device.host}"
            raise UserError(f"--precision {precision}: {reason}; {remedy}.")
    # Without tensor cores, fp16 computes as slowly as fp32. The user may want it for its memory.
    slow = [device for device in devices if precision in FP16 and device.sm < VOLTA]
    return Level(
        precision, f"saves memory, not time, on {list_devices(slow)}" if slow else "as asked"
    )


def refuse_mixture(devices: Sequence[Device]) -> None:
    """Raise UserError if some ranks compute on GPUs and others on CPUs."""
    # NCCL connects GPUs and gloo connects CPUs, so the two groups would wait for each other.
    on_gpu = [device for device in devices if device.kind == "cuda"]
    on_cpu = [device for device in devices if device.kind == "cpu"]
    if on_gpu and on_cpu:
        raise UserError(
            f"GPUs and CPUs cannot train together: {list_devices(on_gpu)} and "
            f"{list_devices(on_cpu)}: omit one kind of machine, or use all CPUs with --device "
            "cpu."
        )


def best_level(devices: Sequence[Device]) -> Level:
    """Return the best level that all devices have in hardware. `devices`: all GPUs, or all CPUs."""
    if any(device.kind == "cpu" for device in devices):
        return Level("fp32", "CPUs compute in fp32")
    without_tensor_cores = [device for device in devices if device.sm < VOLTA]
    if without_tensor_cores:
        return Level("fp32", f"no tensor cores in {list_devices(without_tensor_cores)}")
    only_fp16 = [device for device in devices if not has_bf16(device)]
    if not only_fp16:
        return Level("bf16", "every GPU has it in hardware")
    # The hardware of all these GPUs has bf16, but the torch of some does not.
    if all(device.sm >= AMPERE for device in only_fp16):
        return Level("O1", explain_torch_without_bf16(only_fp16[0]))
    only_fp16 = [device for device in only_fp16 if device.sm < AMPERE]
    return Level(
        "O1", f"these devices have fp16 in hardware, but not bf16: {list_devices(only_fp16)}"
    )


def explain_lack(device: Device, level: str, emulate: bool) -> Optional[str]:
    """Return why this device cannot compute at the level, or None if it can."""
    if device.kind == "cpu":
        if level in FP16:
            return f"it needs GPUs, but {device} computes in fp32"
        if level == "bf16" and not device.bf16 and not emulate:
            return (
                f"{device} has neither AVX512_BF16 nor AMX, so it emulates bf16, which is many "
                "times slower"
            )
    elif level == "bf16" and not torch_has_bf16(device):
        return explain_torch_without_bf16(device)
    elif level == "bf16" and not has_bf16(device) and not emulate:
        return f"{device} has no hardware for this precision and would emulate it slowly"
    return None


def has_bf16(device: Device) -> bool:
    """Return whether a GPU has bf16 in hardware. torch's is_bf16_supported() also counts slow
    emulation."""
    return device.sm >= AMPERE and torch_has_bf16(device)


def torch_has_bf16(device: Device) -> bool:
    """Return whether autocast to bf16 is possible: torch must be built for CUDA 11 or later."""
    major = (device.cuda or "").split(".")[0]
    return not major.isdigit() or int(major) >= 11


def explain_torch_without_bf16(device: Device) -> str:
    return f"torch {device.torch} on {device.host}, built for CUDA {device.cuda}, has no bf16"


def cpu_has_bf16(flags: Iterable[str], environ: Mapping[str, str]) -> bool:
    """Return whether a CPU has bf16 instructions that oneDNN may use. `flags`: from /proc/cpuinfo.
    ONEDNN_MAX_CPU_ISA can disable instructions (oneDNN's guide, "CPU Dispatcher Control")."""
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    allowed = any(word in limit.upper() for word in BF16_LIMITS)
    return allowed and not set(BF16_FLAGS).isdisjoint(flags)


def list_devices(devices: Sequence[Device]) -> str:
    """Return a list for people: each device once, and of many only the first three."""
    names: List[str] = list(dict.fromkeys(map(str, devices)))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
