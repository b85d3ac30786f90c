"""What coding costs a GPU, counted without one: the kernels that each stage of a bucket starts, and
the bytes of the tensors that they read and write.

    python -m bench.codec [--sync ef:3] [--ranks 4] [--mib 8]

Each operation counts as one kernel, and its tensors as read and written once. A GPU's caches make
some of it cheaper; a broadcast operand counts with the bytes that it has, not those that it stands
for. Views, and what only reserves memory, cost nothing. An operation on a list of tensors counts as
one. For `powersgd` it is a step of ResNet-50, in buckets as DDP makes them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from typing import Any
from unittest import mock

import torch
import torchvision
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contract.strategies import BUCKET_MB, UNIT, parse, shard_size
from tandem.sync import Topology, powersgd
from tandem.sync.feedback import BucketState, ErrorFeedback, Squares
from tandem.sync.powersgd import PowerSGD

SHOWN = ("ef:3:peak", "ef:5:peak", "ef:5:own", "ef:15:peak", "ef:255:peak")
FREE = ("view", "slice", "select", "empty", "split", "unsqueeze", "alias", "expand", "detach")


class Counted(TorchDispatchMode):
    """Counts the operations within, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.lstrip("_")
        if not name.startswith(FREE):
            self.kernels[name] += 1
            touched = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            touched += [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in touched)
        return made


def stages(spec: str, ranks: int, values: int) -> dict[str, Counted]:
    """What the stages of one bucket of so many values cost on each of so many ranks."""
    parts = ErrorFeedback(parse(spec), lambda: None)
    parts.topology = Topology(tuple(range(ranks)), 0)
    torch.manual_seed(0)
    kept = [torch.randn(size) for size in parts.sizes(torch.empty(values), 0)]
    state, squares = BucketState(kept, [torch.zeros_like(one) for one in kept]), None
    if parts.learns:
        known = [torch.rand(len(kept[0]))]
        squares = Squares(known, [torch.zeros_like(known[0])], None)
    counted = {name: Counted() for name in ("code", "sum", "take")}
    for own in (None, torch.ones(1, UNIT)):  # what is made once is not of a bucket
        parts.codec.decode(parts.codec.encode(torch.zeros(1, UNIT), own), UNIT, own)
    gradients = torch.randn(values)
    with counted["code"]:
        bucket = parts._code((gradients, 0, (state, squares)))
    with counted["sum"]:
        total = parts._sum(bucket.coded, bucket)
    bucket.coded = total.expand(ranks, -1).contiguous()
    with counted["take"]:
        parts._take(bucket)
    assert len(kept[1]) == shard_size(values, ranks)
    return counted


def powersgd_step(spec: str) -> Counted:
    """All buckets of a step of ResNet-50."""
    sync = PowerSGD(parse(spec), lambda: None)
    sync.shapes, limit, counted = {0: []}, 1 << 20, Counted()
    for one in reversed(list(torchvision.models.resnet50().parameters())):
        sync.shapes[len(sync.shapes) - 1].append(one.shape)
        if sum(4 * shape.numel() for shape in sync.shapes[len(sync.shapes) - 1]) >= limit:
            sync.shapes[len(sync.shapes)], limit = [], BUCKET_MB << 20
    with mock.patch.object(powersgd.dist, "all_reduce"), torch.no_grad():
        for again in range(2):  # noise is drawn in the first step
            for index, shapes in sync.shapes.items():
                buffer = torch.randn(sum(shape.numel() for shape in shapes))
                kept = [torch.zeros(size) for size in sync.sizes(buffer, index)]
                job = (buffer, index, BucketState(kept, [torch.zeros_like(one) for one in kept]))
                with counted if again else contextlib.nullcontext():
                    for stage in sync.stages():
                        job = stage.work(job, *((None,) if stage.sends else ()))
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", nargs="+", default=[*SHOWN, "powersgd:4"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=8, help="a bucket's gradients in fp32")
    options = parser.parse_args()
    values = (options.mib << 20) // 4
    print(f"| {options.ranks} ranks, {options.mib} MiB | kernels | bytes a value |\n|---|---|---|")
    for spec in options.sync:
        if spec.startswith("powersgd"):
            step = powersgd_step(spec)
            parameters = sum(p.numel() for p in torchvision.models.resnet50().parameters())
            kernels, size = sum(step.kernels.values()), step.bytes / parameters
            print(f"| `{spec}`, a step of ResNet-50 | {kernels} | {size:.0f} |")
            continue
        counted = stages(spec, options.ranks, values)
        each = ", ".join(f"{name} {sum(one.kernels.values())}" for name, one in counted.items())
        kernels = sum(sum(one.kernels.values()) for one in counted.values())
        size = sum(one.bytes for one in counted.values()) / values
        print(f"| `{spec}` | {kernels} ({each}) | {size:.0f} |")


if __name__ == "__main__":
    main()
