"""How a run introduces itself: the `start` line of the report and the first line on the screen."""

import contextlib
import dataclasses
import os
import pathlib
import platform
import re
import time
from importlib import metadata
from typing import Any, Dict, Optional, Tuple

import torch

from contract import prices
from contract.runs import RECORD
from contract.strategies import parse
from contract.text import counted
from tandem.compat import cpu_capability
from tandem.sync import carried_out

from .build import Job
from .data.workers import cores, worker_count

Cost = Tuple[int, Optional[int]]  # parameters, and operations of one forward where countable


def start_line(job: Job, cost: Cost, resumed_samples: int) -> Dict[str, Any]:
    """The fields of the `start` line, described in docs/run-directory.md."""
    world, options = job.world, job.options
    on_gpu = world.device.type == "cuda"
    return {
        "record": RECORD,
        "mono_process": process_start(),
        "mono": job.clock.started,
        "unix": time.time(),
        **{name: getattr(world, name) for name in ("host", "rank", "local_rank", "node_rank")},
        "world_size": world.size,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else platform.machine(),
        "versions": versions(on_gpu),
        **machine(),
        "instructions": instructions(),
        "options": dataclasses.asdict(options),
        **{name: getattr(options, name) for name in ("model", "epochs", "precision", "sync")},
        "parameters": cost[0],
        "gradient_bytes": job.gradient_bytes,
        "bucket_mb": options.bucket_size,
        "matrices": job.matrices,
        "flops_per_image": cost[1],
        "global_batch": world.global_batch,
        "rank_batch": world.batches[world.rank],
        "accumulate": job.micro_batches,
        "workers": workers(job),
        "train_images": len(job.train_set),
        "eval_images": len(job.eval_set),
        "steps_per_epoch": job.steps_per_epoch,
        "warmup": options.phases.warmup,
        "image_size": job.image_size,
        "resumed_samples": resumed_samples,
    }


def workers(job: Job) -> int:
    """Loader processes of this rank in training."""
    if job.options.generated:
        return 0
    images = len(job.train_set) // job.world.size
    return worker_count(job.options, job.world, job.image_size, images)


def sentences(job: Job, cost: Cost) -> str:
    """What is about to be trained, in sentences for people."""
    world, options, size = job.world, job.options, job.image_size
    count, flops = cost
    work = "FLOPs unknown" if flops is None else amount(flops, "FLOP") + " an image"
    ranks = counted(world.size, "rank")
    level = options.precision
    if level.startswith("O"):
        why = f" ({job.precision.why})" if job.precision.why else ""
        level += f" by {job.precision.backend}{why}"
    level += ", channels last" if options.channels_last else ""
    parts = f" ({' + '.join(map(str, world.batches))})" if options.balance else ""
    parts += f" in {job.micro_batches} micro-batches" if job.micro_batches > 1 else ""
    if world.size > 1 and carried_out(options.sync, world.nodes) != options.sync:
        parts += f"\n--sync {options.sync} is between machines: on this one sums are exact"
    if world.size > 1:
        strategy = parse(carried_out(options.sync, world.nodes))
        steps = options.epochs * job.steps_per_epoch
        warm_up = options.phases.all_warm_up(strategy)
        for told in [warm_up, *prices.caveats(strategy, options.optimizer, steps)]:
            parts += f"\n{told}" if told else ""
    saved = "" if options.output else "; nothing is saved: no --output"
    return (
        f"{options.model}: {amount(count, ' parameters')}, {work} of {size} px, {level}\n"
        f"{counted(len(job.train_set), 'image')} of "
        f"{counted(len(job.train_set.classes), 'class')}{saved}\n"
        f"{counted(job.steps_per_epoch, 'step')} an epoch; "
        f"batch {world.global_batch} over {ranks}{parts}"
    )


def amount(number: int, unit: str) -> str:
    """Three digits and a unit with its letter: 25.6 M parameters (" parameters"), 3.65 GFLOP."""
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {letter}{unit}"
    return f"{number} {unit.strip()}"


def process_start() -> float:
    """When this process, or the guard that started it, began: CLOCK_MONOTONIC in seconds."""
    if "TANDEM_GUARD_MONO" in os.environ:
        return float(os.environ["TANDEM_GUARD_MONO"])
    # After the name in parentheses, which may hold spaces, starttime is the 20th field.
    fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    return time.monotonic() - age


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
