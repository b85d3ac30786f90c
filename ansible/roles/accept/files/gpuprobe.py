#!/usr/bin/env python3
"""Measures a machine's NVIDIA cards; prints JSON.

gpuprobe.py cards                                     [one dictionary a card]
gpuprobe.py allreduce RANK WORLD MASTER PORT BYTES    {"seconds"} by NCCL, on the first card

A figure that is not available is None. Needs the environment's torch (1.12 or newer).
"""

import json
import statistics
import subprocess
import sys
import time
from datetime import timedelta

import torch

SIDE = 8192  # of the square matrices: large enough that launching a kernel takes no time beside it
BLOCK = 256 << 20  # bytes per copy
REPEATS = 10
# Names of nvidia-smi's queries, which exist since driver 440.
QUERIES = (
    *("name", "driver_version", "memory.total", "memory.used", "temperature.gpu"),
    "pcie.link.gen.current",
    *("pcie.link.width.current", "pcie.link.width.max", "clocks_throttle_reasons.active"),
)


def ask(index):
    """What nvidia-smi says of a card: {query: text}."""
    argv = ["nvidia-smi", "--id=%d" % index, "--query-gpu=%s" % ",".join(QUERIES)]
    process = subprocess.run(
        [*argv, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, check=True
    )
    return dict(zip(QUERIES, (word.strip() for word in process.stdout.decode().split(","))))


def number(text):
    """A figure from nvidia-smi, decimal or hexadecimal; None where it says [N/A]."""
    try:
        return int(text, 0)
    except ValueError:
        return None


def seconds(work):
    """Median duration of `work` on the card in seconds, by CUDA events, after three warm-ups."""
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def product(kind):
    """TFLOP/s of matrix products in a data type; each takes 2 n^3 operations."""
    left = torch.randn(SIDE, SIDE, device="cuda", dtype=kind)
    right, out = torch.randn_like(left), torch.empty_like(left)
    return 2 * SIDE**3 / seconds(lambda: torch.mm(left, right, out=out)) / 1e12


def copies():
    """GB/s of copies on the card (each byte is read and written), to it and from it."""
    source, target = (torch.empty(BLOCK, dtype=torch.uint8, device="cuda") for _ in range(2))
    host = torch.empty(BLOCK, dtype=torch.uint8).pin_memory()
    return {
        "copy": 2 * BLOCK / seconds(lambda: target.copy_(source)) / 1e9,
        "to_card": BLOCK / seconds(lambda: source.copy_(host, non_blocking=True)) / 1e9,
        "from_card": BLOCK / seconds(lambda: host.copy_(source, non_blocking=True)) / 1e9,
    }


def busy_state(index):
    """nvidia-smi's answer while the card works: idle cards lower their clocks and link speed."""
    left = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.float16)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(left, left)
        torch.cuda.synchronize()
    for _ in range(200):
        torch.mm(left, left)  # queued, so that they run while nvidia-smi answers
    state = ask(index)
    torch.cuda.synchronize()
    return state


def measure(index):
    """All figures of a card."""
    torch.cuda.set_device(index)
    torch.backends.cuda.matmul.allow_tf32 = False
    before = ask(index)
    figures = {"fp32": product(torch.float32), "fp16": product(torch.float16), **copies()}
    state = busy_state(index)
    return {
        "name": state["name"],
        "driver": state["driver_version"],
        "memory_mib": number(state["memory.total"]),
        "used_mib": number(before["memory.used"]),
        "celsius": number(state["temperature.gpu"]),
        "generation": number(state["pcie.link.gen.current"]),
        "lanes": number(state["pcie.link.width.current"]),
        "most_lanes": number(state["pcie.link.width.max"]),
        "throttled": number(state["clocks_throttle_reasons.active"]),
        **{key: round(value, 1) for key, value in figures.items()},
    }


def cards():
    if not torch.cuda.is_available():
        return [{"error": "torch %s sees no card" % torch.__version__}]
    rows = []
    for index in range(torch.cuda.device_count()):
        try:
            rows.append(measure(index))
        except (RuntimeError, subprocess.CalledProcessError, OSError) as error:
            rows.append({"error": str(error).splitlines()[0]})
    return rows


def allreduce(rank, world, master, port, size):
    """Median seconds of an all-reduce of one buffer over all machines by NCCL."""
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method="tcp://%s:%s" % (master, port),
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=120),
    )
    buffer = torch.zeros(int(size) // 4, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.monotonic()
        dist.all_reduce(buffer)
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    dist.destroy_process_group()
    return {"seconds": statistics.median(times[1:])}


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    print(json.dumps(cards() if verb == "cards" else allreduce(*words)))
