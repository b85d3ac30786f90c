"""Which precision the devices of a run have: the one rule. The launcher asks it of the machines'
cards before anything starts, ranks started by hand of what they tell each other. No torch here.
"""

from typing import Iterable, List, Mapping, NamedTuple, Optional, Sequence

from .errors import UserError

# Compute capabilities, as 10 x major + minor: the first with tensor cores (fp16), the first whose
# tensor cores take bf16. CUDA C++ Programming Guide, "Compute Capabilities".
VOLTA, AMPERE = 70, 80
HALF = ("O1", "O2", "O3")
BF16_FLAGS = ("avx512_bf16", "amx_bf16")  # of /proc/cpuinfo
# Words in the values of ONEDNN_MAX_CPU_ISA that leave oneDNN these instructions.
BF16_LIMITS = ("BF16", "AMX", "FP16", "AVX10", "ALL", "DEFAULT")


class Device(NamedTuple):
    """What one rank computes on, in plain values that travel as JSON."""

    host: str
    kind: str  # "cuda" or "cpu"
    name: str
    sm: int = 0  # compute capability of a GPU: 86 is 8.6
    bf16: bool = False  # of a CPU: it has the instructions, and oneDNN may use them
    torch: str = ""
    cuda: Optional[str] = None  # the version that torch was built for

    def __str__(self) -> str:
        return f"the CPU of {self.host}" if self.kind == "cpu" else f"{self.name} ({self.host})"


class Level(NamedTuple):
    """`why` is one clause for people."""

    name: str
    why: str


def resolve(
    asked: str, devices: Sequence[Device], emulate: bool = False, kept: bool = False
) -> Level:
    """The level of a run on these devices, one for each rank: what was `asked`, or for `auto` the
    best that all have in hardware. `emulate`: bf16 also without its instructions; `kept`: the run
    began with this level. Raises UserError, naming the device that lacks it."""
    refuse_mixture(devices)
    best = best_level(devices)
    if asked == "auto":
        return best
    for device in devices:
        reason = lacks(device, asked, emulate)
        if reason:
            remedy = f"use {best.name}" + (", or --emulate if you mean it" * (asked == "bf16"))
            if kept:
                remedy = f"the run keeps the precision it began with: leave {device.host} out"
            raise UserError(f"--precision {asked}: {reason}; {remedy}.")
    slow = [device for device in devices if asked in HALF and device.sm < VOLTA]
    return Level(asked, f"saves memory, not time, on {named(slow)}" if slow else "as asked")


def refuse_mixture(devices: Sequence[Device]) -> None:
    """GPUs and CPUs meet over different backends and would wait for each other. Raises UserError"""
    on_gpu = [device for device in devices if device.kind == "cuda"]
    on_cpu = [device for device in devices if device.kind == "cpu"]
    if on_gpu and on_cpu:
        raise UserError(
            f"GPUs and CPUs cannot train together: {named(on_gpu)} and {named(on_cpu)}: leave "
            "one kind out, or let all compute on their CPUs with --device cpu."
        )


def best_level(devices: Sequence[Device]) -> Level:
    """The best that all of these have in hardware; all GPUs, or all CPUs."""
    if any(device.kind == "cpu" for device in devices):
        return Level("fp32", "CPUs compute in fp32")
    old = [device for device in devices if device.sm < VOLTA]
    if old:
        return Level("fp32", f"{named(old)} has no tensor cores")
    half = [device for device in devices if not has_bf16(device)]
    if not half:
        return Level("bf16", "every GPU has it in hardware")
    if all(device.sm >= AMPERE for device in half):
        return Level("O1", without_bf16(half[0]))
    half = [device for device in half if device.sm < AMPERE]
    return Level("O1", f"{named(half)} has fp16 in hardware, but not bf16")


def lacks(device: Device, level: str, emulate: bool) -> Optional[str]:
    """Why this device is not fit for the level, or None."""
    if device.kind == "cpu":
        if level in HALF:
            return f"it computes in fp16 on GPUs, and {device} computes in fp32"
        if level == "bf16" and not device.bf16 and not emulate:
            return f"{device} has neither AVX512_BF16 nor AMX, and emulates it many times slower"
    elif level == "bf16" and not torch_has_bf16(device):
        return without_bf16(device)
    elif level == "bf16" and not has_bf16(device) and not emulate:
        return f"{device} has it not in hardware, and only emulates it, slowly"
    return None


def has_bf16(device: Device) -> bool:
    """In hardware; is_bf16_supported() of torch counts slow emulation."""
    return device.sm >= AMPERE and torch_has_bf16(device)


def torch_has_bf16(device: Device) -> bool:
    """torch's autocast refuses bf16 on the GPU where it was built for CUDA before 11."""
    major = (device.cuda or "").split(".")[0]
    return not major.isdigit() or int(major) >= 11


def without_bf16(device: Device) -> str:
    return f"torch {device.torch} of {device.host} for CUDA {device.cuda} has no bf16"


def cpu_has_bf16(flags: Iterable[str], environ: Mapping[str, str]) -> bool:
    """`flags`: those of /proc/cpuinfo. ONEDNN_MAX_CPU_ISA takes instructions away (oneDNN's guide,
    "CPU Dispatcher Control")."""
    limit = environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    allowed = any(word in limit.upper() for word in BF16_LIMITS)
    return allowed and not set(BF16_FLAGS).isdisjoint(flags)


def named(devices: Sequence[Device]) -> str:
    """Each once; of many the first three."""
    names: List[str] = list(dict.fromkeys(map(str, devices)))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
