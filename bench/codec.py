"""Count what coding a bucket of gradients costs a GPU, without a GPU: the kernels that each stage
starts, and the bytes of the tensors that they read and write.

    python -m bench.codec [--sync ef:3] [--ranks 4] [--mib 8]

Each operation, also on a list of tensors, counts as one kernel, which reads and writes its tensors
once. A GPU's caches make some of it cheaper. A broadcast operand counts with the bytes that it has.
Views and reserved memory cost nothing. Sums that Gloo adds up are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import markdown
from contract.strategies import parse, shard_size
from tandem.sync import Topology
from tandem.sync.feedback import BucketState, ErrorFeedback, Job, Squares

SHOWN = ("ef:3:peak", "ef:5:peak", "ef:5:own", "ef:15:peak", "ef:255:peak")
# Beginnings of the names of operations that start no kernel.
FREE = ("view", "slice", "select", "empty", "split", "unsqueeze", "alias", "expand", "detach")


class Counted(TorchDispatchMode):
    """Counts the operations within a `with` block, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.lstrip("_")
        if not name.startswith(FREE):
            self.kernels[name] += 1
            for value in tree_leaves((args, kwargs, result)):
                if isinstance(value, torch.Tensor):
                    self.bytes += value.numel() * value.element_size()
        return result


def bucket_work(
    spec: str, ranks: int, values: int, device: torch.device | None = None, fused: bool = False
) -> dict[str, Callable[[], object]]:
    """Return {stage: call} of what each rank does for a bucket of so many values, in this order.
    `fused`: with Triton's kernels."""
    exchange = ErrorFeedback(parse(spec))
    if fused:
        exchange.try_kernels(device)
    exchange.topology = Topology(tuple(range(ranks)), 0)
    torch.manual_seed(0)
    # The errors of earlier steps: of all values, and of this rank's part of the sum.
    errors = [torch.randn(n, device=device) for n in exchange.error_sizes(torch.empty(values))]
    assert len(errors[1]) == shard_size(values, ranks)
    state, squares = BucketState(errors, [torch.zeros_like(error) for error in errors]), None
    if exchange.learns:
        means = [torch.rand(len(errors[0]), device=device)]
        squares = Squares(means, [torch.zeros_like(means[0])], None)
    job = Job(torch.randn(values, device=device), state, squares)
    sent = exchange._code(job)
    total = exchange._sum(sent.coded, sent)
    received = dataclasses.replace(sent, coded=total.expand(ranks, -1).contiguous())
    return {
        "code": lambda: exchange._code(job),
        "sum": lambda: exchange._sum(sent.coded, sent),
        "take": lambda: exchange._take(received),
    }


def stages(spec: str, ranks: int, values: int) -> dict[str, Counted]:
    """Return {stage: what it costs each rank} for a bucket of so many values."""
    counted = {}
    for name, work in bucket_work(spec, ranks, values).items():
        with Counted() as counted[name]:
            work()
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--sync", nargs="+", default=SHOWN)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=8, help="a bucket's gradients in fp32")
    options = parser.parse_args()
    values = (options.mib << 20) // 4
    rows = []
    for spec in options.sync:
        counted = stages(spec, options.ranks, values)
        kernels = {name: sum(count.kernels.values()) for name, count in counted.items()}
        by_stage = ", ".join(f"{name} {count}" for name, count in kernels.items())
        traffic = sum(count.bytes for count in counted.values()) / values
        rows.append([f"`{spec}`", f"{sum(kernels.values())} ({by_stage})", f"{traffic:.0f}"])
    title = f"{options.ranks} ranks, {options.mib} MiB"
    print(markdown.table([title, "kernels", "bytes a value"], rows))


if __name__ == "__main__":
    main()
