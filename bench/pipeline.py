"""A model of one step with `ef` on an office PC's GPU, which nobody here has: when each bucket is
coded, sent, summed, sent again and decoded, and how long the step takes.

    python -m bench.pipeline

Each of the three stages of a bucket (tandem/sync/feedback.py) takes the buckets in their order.
What the model is given stands in the tables below, each with where it is from: what was measured is
so named, all else is assumed. It is no figure of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torchvision

from bench.codec import stages
from contract.strategies import CODED_BITS, UNIT, parse, shard_size
from tandem.sync.codec import CODECS

SPEC, RANKS = "ef:3:peak", 4
LINK = 117.5e6  # bytes/s of payload at 1 Gbit/s: by the headers of TCP and Ethernet
TURN = 0.16e-3  # s, a turn of Gloo's over loopback: measured, without a switch
START = 19e-6  # s from one kernel to the next on a stream that goes first: measured on an H100
PCIE, SYNC = 6e9, 20e-6  # bytes/s, and s to wait for a copy: assumed
FIRST_MIB = 1  # of DDP's first bucket


@dataclass(frozen=True)
class Card:
    """Seconds of forward and backward for ResNet-50 with 64 images (those of the bench; half and a
    quarter of them: assumed), and bytes/s of memory (as published)."""

    name: str
    forward: float
    backward: float
    memory: float


@dataclass(frozen=True)
class Code:
    """Kernels of the three stages and bytes a value, by `bench/codec.py`: counted. `start`:
    seconds from one kernel to the next: assumed. It is that of launching where the stream goes
    first, and longer where each waits for a kernel of backward's."""

    name: str
    kernels: tuple[int, ...]
    traffic: tuple[float, ...]
    start: float = START
    spec: str = SPEC


def todays(spec: str) -> Code:
    values = 20 * RANKS * UNIT
    counts = stages(spec, RANKS, values).values()
    kernels = tuple(sum(count.kernels.values()) for count in counts)
    return Code(f"`{spec}`", kernels, tuple(count.bytes / values for count in counts), spec=spec)


CARDS = (
    Card("2080 Ti", 0.04, 0.08, 616e9),
    Card("3090, half as long", 0.02, 0.04, 936e9),
    Card("a quarter as long", 0.01, 0.02, 936e9),
)
BEFORE = (
    Code("as it was, behind backward", (59, 92, 35), (146, 91, 62), 60e-6),
    Code("as it was, goes first", (59, 92, 35), (146, 91, 62)),
)
TODAYS = ("ef:3:peak", "ef:5:peak", "ef:5:own", "ef:15:peak")


def buckets(mib: int) -> list[tuple[int, float]]:
    """Of each bucket of ResNet-50 (DDP's, last layer first): its values, and the part of backward
    that is over when it is full. Each convolution, and the last layer, takes an equal share."""
    layers: list[int] = []
    for one in torchvision.models.resnet50().parameters():
        layers += [0] if one.dim() > 1 else []
        layers[-1] += one.numel()
    made, values, limit = [], 0, FIRST_MIB
    for number, size in enumerate(reversed(layers), 1):
        values += size
        if values * 4 >= limit << 20 or number == len(layers):
            made.append((values, number / len(layers)))
            values, limit = 0, mib
    return made


def step(card: Card, code: Code, ahead: bool = False) -> float:
    """Seconds of a step. `ahead`: a bucket's parts are sent before the sums of the one before it,
    which are added up meanwhile; in today's order a bucket is done before the next one is sent."""
    made = buckets(parse(SPEC).rule.bucket_mb)
    coded = sent = decoded = 0.0  # when each stage is free again
    waiting: list[tuple[float, int]] = []  # buckets whose sums are still to be sent
    for number, (values, part) in enumerate(made):
        full = card.forward + card.backward * part
        coded = max(full, coded) + coding(card, code, 0, values)
        sent = max(sent, coded) + exchange(code, values)
        waiting.append((sent + coding(card, code, 1, values), values))
        kept_back = ahead and number < len(made) - 1
        while len(waiting) > kept_back:
            ready, values = waiting.pop(0)
            sent = max(sent, ready) + exchange(code, values)
            decoded = max(sent, decoded) + coding(card, code, 2, values)
    return max(decoded, card.forward + card.backward)


def coding(card: Card, code: Code, stage: int, values: int) -> float:
    """Seconds of a stage's kernels: to start them, and to move their bytes."""
    return code.kernels[stage] * code.start + values * code.traffic[stage] / card.memory


def exchange(code: Code, values: int) -> float:
    """Seconds until each rank has sent the others a part of a bucket, and has theirs on its GPU."""
    levels, scale = parse(code.spec).of(None).arguments
    shard = shard_size(values, RANKS)
    sent = shard * CODED_BITS[int(levels), scale] / 8
    copied = CODECS[int(levels)].coded_bytes(shard)
    return (RANKS - 1) * (TURN + sent / LINK) + 2 * (SYNC + RANKS * copied / PCIE)


def main() -> None:
    found = buckets(parse(SPEC).rule.bucket_mb)
    print(f"ef, {RANKS} machines, 1 Gbit/s, ResNet-50 in {len(found)} buckets")
    print("| card | codec | a step | efficiency | next parts before these sums |")
    print("|---|---|---|---|---|")
    codes = [*BEFORE, *map(todays, TODAYS)]
    for card in CARDS:
        for code in codes:
            took, other = step(card, code), step(card, code, ahead=True)
            alone = card.forward + card.backward
            print(
                f"| {card.name} | {code.name} | {took:.3f} s | {alone / took:.2f} | {other:.3f} s |"
            )


if __name__ == "__main__":
    main()
