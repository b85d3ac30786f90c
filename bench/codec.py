"""What coding costs.

A GPU, counted without one: the kernels that each stage of a bucket starts, and the bytes of the
tensors that they read and write. A link: bytes a step. This machine's processor: one core's time a
step of ResNet-50, beside that of the first strategy.

    python -m bench.codec [--sync ef:3] [--ranks 4] [--mib 8]

Each operation counts as one kernel, and its tensors as read and written once. A GPU's caches make
some of it cheaper; a broadcast operand counts with the bytes that it has, not those that it stands
for. Views, and what only reserves memory, cost nothing. An operation on a list of tensors counts as
one. Sums that Gloo adds up are not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contract.strategies import MIB, Payload, parse, shard_size
from report.published_speeds import PARAMETERS
from tandem.sync import Topology
from tandem.sync.feedback import BucketState, ErrorFeedback, Job, Squares

SHOWN = ("ef:3:peak", "ef:5:peak", "ef:5:own", "ef:15:peak", "ef:255:peak")
PEERS = ("bf16",)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
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


def bucket_work(
    spec: str, ranks: int, values: int, device: torch.device | None = None, fused: bool = False
) -> dict[str, Callable[[], object]]:
    """What each rank does for a bucket of so many values, stage by stage, in this order. `fused`:
    by Triton's kernels."""
    parts = ErrorFeedback(parse(spec))
    if fused:
        parts.try_kernels(device)
    parts.topology = Topology(tuple(range(ranks)), 0)
    torch.manual_seed(0)
    kept = [torch.randn(n, device=device) for n in parts.error_sizes(torch.empty(values))]
    state, squares = BucketState(kept, [torch.zeros_like(one) for one in kept]), None
    if parts.learns:
        known = [torch.rand(len(kept[0]), device=device)]
        squares = Squares(known, [torch.zeros_like(known[0])], None)
    job = Job(torch.randn(values, device=device), state, squares)
    sent = parts._code(job)
    total = parts._sum(sent.coded, sent)
    came = dataclasses.replace(sent, coded=total.expand(ranks, -1).contiguous())
    assert len(kept[1]) == shard_size(values, ranks)
    return {
        "code": lambda: parts._code(job),
        "sum": lambda: parts._sum(sent.coded, sent),
        "take": lambda: parts._take(came),
    }


def stages(spec: str, ranks: int, values: int) -> dict[str, Counted]:
    """What the stages of one bucket of so many values cost on each of so many ranks."""
    counted = {}
    for name, work in bucket_work(spec, ranks, values).items():
        with Counted() as counted[name]:
            work()
    return counted


def rank_work(spec: str, ranks: int, values: int) -> tuple[Callable[[], object], float]:
    """What each rank's processor does, but for sums that Gloo adds up, and how often in a step of
    ResNet-50."""
    often = PARAMETERS["resnet50"] / values
    if spec in DTYPES:
        gradients = torch.randn(values)
        return lambda: gradients.copy_(gradients.to(DTYPES[spec])), often
    work = bucket_work(spec, ranks, values).values()
    return lambda: [stage() for stage in work], often


def cpu_seconds(specs: Sequence[str], ranks: int, values: int, rounds: int) -> dict[str, list]:
    """By strategy, for each round one core's seconds a step of ResNet-50. In a round all are
    measured one after the other, since what else a machine does changes what they take."""
    works = {spec: rank_work(spec, ranks, values) for spec in specs}
    spent: dict[str, list] = {spec: [] for spec in specs}
    for again in range(rounds + 1):
        for spec, (work, often) in works.items():
            began = time.thread_time()
            work()
            if again:  # the first finds no memory that it may use again
                spent[spec].append((time.thread_time() - began) * often)
    return spent


def sent(spec: str, ranks: int) -> float:
    """Bytes that each machine sends in a step of ResNet-50."""
    strategy = parse(spec)
    payload = Payload(4 * PARAMETERS["resnet50"], strategy.rule.bucket_mb * MIB)
    return strategy.bytes_per_step(ranks, payload)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", nargs="+", default=[*SHOWN, *PEERS])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=8, help="a bucket's gradients in fp32")
    parser.add_argument("--rounds", type=int, default=9, help="of the processor's seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = (options.mib << 20) // 4
    spent = cpu_seconds(options.sync, options.ranks, values, options.rounds)
    heads = ["kernels", "bytes a value", "sent a step", f"one core, beside {options.sync[0]}"]
    print(f"| {options.ranks} ranks, {options.mib} MiB | {' | '.join(heads)} |")
    print("|" + "---|" * (len(heads) + 1))
    for spec in options.sync:
        cells = [*kernels(spec, options.ranks, values), f"{sent(spec, options.ranks) / 1e6:.1f} MB"]
        cells.append(beside(spent[spec], spent[options.sync[0]]))
        print(f"| `{spec}` | {' | '.join(cells)} |")


def kernels(spec: str, ranks: int, values: int) -> list[str]:
    """Of a bucket, and the bytes a value."""
    if spec in DTYPES:
        return ["-", "-"]
    counted = stages(spec, ranks, values)
    by_stage = {name: sum(count.kernels.values()) for name, count in counted.items()}
    each = ", ".join(f"{name} {number}" for name, number in by_stage.items())
    traffic = sum(count.bytes for count in counted.values()) / values
    return [f"{sum(by_stage.values())} ({each})", f"{traffic:.0f}"]


def beside(spent: list[float], base: list[float]) -> str:
    """Milliseconds a step, and by how much more than the base's in the same round: medians."""
    times = statistics.median(own / other for own, other in zip(spent, base))
    return f"{1e3 * statistics.median(spent):.0f} ms, {times:.2f} x"


if __name__ == "__main__":
    main()
