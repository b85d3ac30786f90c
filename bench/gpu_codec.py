"""What `ef` costs on this machine's GPU: rows of `make bench-gpu`, bench/performance.md.

One measurement is of the codec alone: each stage of a bucket, as four machines have it. The other
is of whole steps with DDP and the exchange, where sleep stands in for sending at 1 Gbit/s.
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
LINK = 117.5e6  # bytes/s at 1 Gbit/s without the headers of TCP and Ethernet
TURN = 0.16e-3  # s; Gloo takes this long for a turn over loopback, without a switch
MACHINES = Topology(tuple(range(RANKS)), 0)


def finish(device):
    """Wait until everything on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def mean_seconds(call, device, repeats):
    """Return the mean seconds of a call, after three calls that are not counted."""
    for _ in range(3):
        call()
    finish(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    finish(device)
    return (time.perf_counter() - begin) / repeats


def measure_codec(device, scale):
    """Yield a row for each strategy: the time of each stage of a bucket. On a GPU, also with
    Triton's fused kernels."""
    for spec in SHOWN:
        bucket_mb = parse(spec).rule.bucket_mb
        for fused in (False, True) if device.type == "cuda" else (False,):
            stages = bucket_work(spec, RANKS, bucket_mb * MIB // 4, device, fused)
            times = ", ".join(
                f"{name} {mean_seconds(stage, device, scale.repeats) * 1e6:.0f} µs"
                for name, stage in stages.items()
            )
            title = f"{spec}{', fused' if fused else ''}, a bucket of {bucket_mb} MiB"
            yield [f"{title}, {RANKS} machines", times]


def sleep_instead(parts, group, ranks=None):
    """Stand in for all_to_all: take as long as a link of 1 Gbit/s, and return what was sent."""
    sent = carrier.to_host(parts)
    time.sleep((len(parts) - 1) * (TURN + parts.shape[1] / LINK))
    return sent.to(parts.device, non_blocking=True)


def measure_links(device, scale):
    """Yield a row for each of two strategies: the step time with its exchange, and without."""
    model, size, batch = scale.models[0]
    images = torch.randn(batch, 3, size, size, device=device)
    classes = (torch.arange(batch) % 10).to(device)

    def step(net):
        net.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = cross_entropy(net(images), classes)
        loss.backward()

    for spec in ("ef:3:peak", "ef:5:peak"):
        net = build(model, 10, size).to(device)
        alone = mean_seconds(lambda net=net: step(net), device, scale.steps)
        together = seconds_with_exchange(net, spec, step, device, scale.steps)
        name = f"{model}, {batch} x {size} px, bf16, {spec}, 1 Gbit/s played by sleep"
        yield [name, f"{together:.3f} s a step, {alone:.3f} without: {alone / together:.2f}"]


def seconds_with_exchange(net, spec, step, device, steps):
    """Return the mean step time of a model with DDP and a strategy's exchange."""
    sync = make(spec)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(
            net, bucket_cap_mb=parse(spec).rule.bucket_mb, gradient_as_bucket_view=True
        )
        sync.setup(device, MACHINES)
        ddp.register_comm_hook(None, lambda _, bucket: sync.hook(bucket))
        step(ddp)  # with an exact sum, because DDP orders its buckets in the first step

        def step_with_exchange():
            sync.begin(1.0, False)
            step(ddp)

        with (
            mock.patch.object(carrier, "all_to_all", sleep_instead),
            mock.patch.object(feedback, "all_to_all", sleep_instead),
        ):
            return mean_seconds(step_with_exchange, device, steps)
    finally:
        dist.destroy_process_group()
