"""Computes as training does; prints what was right as JSON, or ends with what was not.

proof.py cards COUNT                           a matrix product in each precision on each card
proof.py sum BACKEND RANK WORLD MASTER PORT    one sum over all machines, by gloo or nccl

Runs on the environment's Python, torch 1.12 or newer.
"""

import json
import sys
from datetime import timedelta

import torch

SIDE = 128  # of matrices of -1, 0 and 1, whose products every precision holds exactly


def precisions(device):
    """{name: type} of those that a device has in hardware; of a CPU only the one that is fast."""
    types = {"fp32": torch.float32}
    if device.type == "cuda":
        types["fp16"] = torch.float16
        if torch.cuda.get_device_capability(device) >= (8, 0):
            types["bf16"] = torch.bfloat16
    return types


def products(device):
    """Names of the precisions in which a product is what the CPU has in whole numbers."""
    left, right = (torch.randint(-1, 2, (SIDE, SIDE)) for _ in range(2))
    exact, sound = left @ right, []
    for name, kind in precisions(device).items():
        product = left.to(device, kind) @ right.to(device, kind)
        if not torch.equal(product.to("cpu", torch.int64), exact):
            raise SystemExit("its product in %s is wrong" % name)
        sound.append(name)
    return sound


def cards(count):
    """{"names", "precisions"} of its first cards, or of its CPU where none takes part."""
    if torch.cuda.device_count() < count:
        visible = torch.cuda.device_count()
        raise SystemExit("torch %s sees %d of %d cards" % (torch.__version__, visible, count))
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    answers = [products(device) for device in devices]
    names = [torch.cuda.get_device_name(number) for number in range(count)] or ["its CPU"]
    common = [name for name in answers[0] if all(name in own for own in answers)]
    return {"names": names, "precisions": common}


def total(backend, rank, world, master, port):
    """{"backend"} where the sum over all machines is right."""
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend,
        init_method="tcp://%s:%s" % (master, port),
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=60),
    )
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
