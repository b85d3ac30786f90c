"""What coding costs a GPU, counted without one: the kernels that each stage of a bucket starts, and
the bytes of the tensors that they read and write.

    python -m tests.bench.codec [--sync ef:1.6] [--ranks 4] [--mib 8]

Each operation counts as one kernel, and its tensors as read and written once. A GPU's caches make
some of it cheaper; a broadcast operand counts with the bytes that it has, not those that it stands
for. Views, and what only reserves memory, cost nothing.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contract.strategies import parse, part_of
from trainer.sync import Machines
from trainer.sync.feedback import BucketState, ErrorFeedback

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
    parts.machines = Machines(tuple(range(ranks)), 0)
    torch.manual_seed(0)
    kept = [torch.randn(size) for size in parts.sizes(torch.empty(values), 0)]
    state = BucketState(kept, [torch.zeros_like(one) for one in kept])
    counted = {name: Counted() for name in ("code", "sum", "take")}
    parts.codec.decode(torch.zeros(1, parts.codec.coded_bytes(1280), dtype=torch.uint8), 1280)
    gradients = torch.randn(values)
    with counted["code"]:
        bucket = parts._code((gradients, 0, state))
    with counted["sum"]:
        total = parts._sum(bucket.coded, state)
    bucket.coded = total.expand(ranks, -1).contiguous()
    with counted["take"]:
        parts._take(bucket)
    assert len(kept[1]) == part_of(values, ranks)
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", nargs="+", default=["ef:1.6", "ef:2", "ef:4", "ef:8"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=8, help="a bucket's gradients in fp32")
    options = parser.parse_args()
    values = (options.mib << 20) // 4
    print(f"| {options.ranks} ranks, {options.mib} MiB | kernels | bytes a value |\n|---|---|---|")
    for spec in options.sync:
        counted = stages(spec, options.ranks, values)
        each = ", ".join(f"{name} {sum(one.kernels.values())}" for name, one in counted.items())
        kernels = sum(sum(one.kernels.values()) for one in counted.values())
        size = sum(one.bytes for one in counted.values()) / values
        print(f"| `{spec}` | {kernels} ({each}) | {size:.0f} |")


if __name__ == "__main__":
    main()
