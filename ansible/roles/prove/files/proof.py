"""Compute as training does. Prints the results as JSON if they are correct, or exits with an error.

proof.py cards COUNT                           a matrix product in each precision on each GPU
proof.py sum BACKEND RANK WORLD MASTER PORT    one sum over all machines, by gloo or nccl

Role prove runs this file on the environment's Python, with torch 1.12 or newer, after it has
installed everything. planning/reading.py reads the result of `cards`.
"""

import json
import sys
from datetime import timedelta

import torch

SIDE = 128  # of matrices of -1, 0 and 1: every precision can represent their products exactly


def precisions(device):
    """Return {name: type} of the precisions that a device has in hardware; only fp32 for a CPU."""
    types = {"fp32": torch.float32}
    if device.type == "cuda":
        types["fp16"] = torch.float16
        if torch.cuda.get_device_capability(device) >= (8, 0):
            types["bf16"] = torch.bfloat16
    return types


def products(device):
    """Return the names of the precisions, if a matrix product in each is exact. Exits otherwise."""
    left, right = (torch.randint(-1, 2, (SIDE, SIDE)) for _ in range(2))
    exact = left @ right  # on the CPU, in whole numbers
    types = precisions(device)
    for name, kind in types.items():
        product = left.to(device, kind) @ right.to(device, kind)
        if not torch.equal(product.to("cpu", torch.int64), exact):
            raise SystemExit("its product in %s is wrong" % name)
    return list(types)


def cards(count):
    """Return {"names", "precisions"} of the first GPUs, or of the CPU if `count` is 0."""
    if torch.cuda.device_count() < count:
        visible = torch.cuda.device_count()
        raise SystemExit("torch %s sees %d of %d cards" % (torch.__version__, visible, count))
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    answers = [products(device) for device in devices]
    names = [torch.cuda.get_device_name(number) for number in range(count)] or ["its CPU"]
    common = [name for name in answers[0] if all(name in answer for answer in answers)]
    return {"names": names, "precisions": common}


def total(backend, rank, world, master, port):
    """Return {"backend"} if the sum over all machines is right. Exits otherwise."""
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend,
        init_method="tcp://%s:%s" % (master, port),
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
    # Rank 0 has ones, rank 1 twos, and so on. float32 represents their sum exactly.
    values = torch.full((1 << 20,), int(rank) + 1.0, device=device)
    dist.all_reduce(values)
    expected = int(world) * (int(world) + 1) / 2
    if not bool((values == expected).all()):
        raise SystemExit("its sum is %s instead of %s" % (values[0].item(), expected))
    dist.destroy_process_group()
    return {"backend": backend}


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    print(json.dumps(cards(int(words[0])) if verb == "cards" else total(*words)))
