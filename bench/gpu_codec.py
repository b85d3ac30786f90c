"""What `ef` costs on this machine's GPU: rows of `make bench-gpu`, bench/performance.md.

The codec alone: each stage of a bucket, as four machines have it. And whole steps by DDP with the
trainer's exchange, where sleep stands in for a link of 1 Gbit/s: all is done but what a card sends.
"""

from __future__ import annotations

import time
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.codec import SHOWN, bucket_work
from contract.strategies import MIB, parse
from tandem.sync import Topology, carrier, feedback, make
from trainer.models import build

RANKS = 4
LINK = 117.5e6  # bytes/s of payload at 1 Gbit/s: by the headers of TCP and Ethernet
TURN = 0.16e-3  # s, a turn of Gloo's over loopback: measured, without a switch
MACHINES = Topology(tuple(range(RANKS)), 0)


def seconds(call, device, repeats):
    """Of one call, in the mean, everything on the device done."""
    for _ in range(3):
        call()
    finish(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    finish(device)
    return (time.perf_counter() - begin) / repeats


def finish(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def codec(device, scale):
    """Rows for each strategy: the stages of a bucket, by plain operations and fused."""
    for spec in SHOWN:
        for fused in (False, True)[: 1 + (device.type == "cuda")]:
            values = parse(spec).rule.bucket_mb * MIB // 4
            spent = {
                name: f"{seconds(call, device, scale.repeats) * 1e6:.0f} µs"
                for name, call in bucket_work(spec, RANKS, values, device, fused).items()
            }
            stages = ", ".join(f"{name} {one}" for name, one in spent.items())
            name = f"{spec}{', fused' * fused}, a bucket of {parse(spec).rule.bucket_mb} MiB"
            yield [f"{name}, {RANKS} machines", stages]


def asleep(parts, group, ranks=None):
    """In the place of all_to_all: as long as a link of 1 Gbit/s takes; what was sent comes back."""
    sent = carrier.to_host(parts)
    time.sleep((len(parts) - 1) * (TURN + parts.shape[1] / LINK))
    return sent.to(parts.device, non_blocking=True)


def linked(device, scale):
    """A row for each of two strategies: steps with the exchange, beside steps without one."""
    for spec in ("ef:3:peak", "ef:5:peak"):
        yield linked_by(spec, device, scale)


def linked_by(spec, device, scale):
    model, size, batch = scale.models[0]
    net = build(model, 10, size).to(device)
    images, classes = torch.randn(batch, 3, size, size, device=device), torch.arange(batch) % 10
    classes, sync = classes.to(device), make(spec)

    def step(called):
        net.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(called(images), classes)
        loss.backward()

    alone = seconds(lambda: step(net), device, scale.steps)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(
            net, bucket_cap_mb=parse(spec).rule.bucket_mb, gradient_as_bucket_view=True
        )
        sync.setup(device, MACHINES)
        ddp.register_comm_hook(None, lambda _, bucket: sync.hook(bucket))
        step(ddp)  # an exact sum: DDP orders its buckets

        def exchanged():
            sync.begin(1.0, False)
            step(ddp)

        with (
            mock.patch.object(carrier, "all_to_all", asleep),
            mock.patch.object(feedback, "all_to_all", asleep),
        ):
            together = seconds(exchanged, device, scale.steps)
    finally:
        dist.destroy_process_group()
    name = f"{model}, {batch} x {size} px, bf16, {spec}, 1 Gbit/s played by sleep"
    return [name, f"{together:.3f} s a step, {alone:.3f} without: {alone / together:.2f}"]
