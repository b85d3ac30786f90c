"""The strategies of `--sync`, NAME[:ARG]: what each is called, sends and promises.

This is the only list of them. It does not import torch, because the launcher and the report read it
too: how much a strategy sends is defined once, here; the code that sends it is in `tandem/sync/`.
`RULES` maps each name to its entry; a new strategy is one entry here and one class there.

Units: bytes and steps; `world` is the number of participants in an exchange: ranks, or machines.
"""

import math
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

from contract.errors import UserError

# DistributedDataParallel's own bucket_cap_mb.
BUCKET_MB = 25
MIB = 2**20
# Of the learning rate, and so of the exact sums before a strategy that leaves bits out.
WARMUP_EPOCHS = 1.0
# Families of optimizers: those that divide by the root of a running mean of squares, and others.
SGD, ADAM = "sgd", "adam"
# BLOCK values share a scale of 16 bits. Parts are padded to a multiple of UNIT values, which fills
# whole bytes with 1, 2, 3 or 5 values a byte.
BLOCK = 256
UNIT = 15 * BLOCK
# How many values of so many levels are in a byte.
PACKED = {3: 5, 5: 3, 15: 2, 255: 1}
# What a level of `ef` is relative to. peak: the largest value of the block; own: a scale of each
# value's own as well, from what all ranks have received. auto: own for Adam's family.
AUTO, PEAK, OWN = "auto", "peak", "own"
# Bits a value on the wire, by levels and scale, sizes of blocks included, as zstd leaves them: the
# most that codes of real runs took, and of 15 and 255 levels codes of normal numbers.
CODED_BITS = {
    (3, PEAK): 1.06,
    (3, OWN): 1.56,
    (5, PEAK): 1.57,
    (5, OWN): 2.23,
    (15, PEAK): 3.37,
    (15, OWN): 3.63,
    (255, PEAK): 7.53,
    (255, OWN): 7.26,
}


@dataclass(frozen=True)
class Payload:
    """What a step's sums carry: gradients of `bytes` bytes in `width`-byte numbers."""

    bytes: float
    bucket: float = BUCKET_MB * MIB
    width: int = 4

    @property
    def values(self) -> float:
        return self.bytes / self.width

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(self.bytes / self.bucket))


@dataclass(frozen=True)
class Argument:
    """An argument of a strategy; if `default` is None, it must be given."""

    name: str
    choices: Tuple[str, ...]
    default: Optional[str] = None

    def check(self, text: str, usage: str, by: str) -> str:
        """The argument. Raises UserError."""
        if text not in self.choices:
            raise UserError(
                f"{by} {usage}: {self.name} is one of {', '.join(self.choices)}, not {text!r}."
            )
        return text


@dataclass(frozen=True)
class Rule:
    """A registry entry: what all uses of one name have in common.

    `exact`: the result is the sum in the gradients' own precision. `hierarchical`: the ranks of a
    machine first sum among themselves, and machines exchange these sums. `sent`: bytes that each
    participant sends for a payload.
    `bucket_mb`: size of the gradient buckets unless --bucket_mb says otherwise. `warms`: the first
    --sync_warmup epochs are exact. `usual`: the specs that a prediction shows.
    """

    name: str
    text: str
    exact: bool
    sent: Callable[["Strategy", int, Payload], float]
    arguments: Tuple[Argument, ...] = ()
    bucket_mb: int = BUCKET_MB
    hierarchical: bool = False
    warms: bool = False
    usual: Tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        names = [self.name]
        for argument in self.arguments:
            names.append(argument.name if argument.default is None else f"[{argument.name}]")
        return ":".join(names).replace(":[", "[:")


@dataclass(frozen=True)
class Strategy:
    """One `--sync`, parsed: a rule with its arguments."""

    rule: Rule
    arguments: Tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def spec(self) -> str:
        """As a person writes it, without default values."""
        words = list(self.arguments)
        while words and words[-1] == self.rule.arguments[len(words) - 1].default:
            words.pop()
        return ":".join([self.name, *words])

    @property
    def exact(self) -> bool:
        return self.rule.exact

    def of(self, family: Optional[str]) -> "Strategy":
        """The same with the scale that `auto` stands for in a run with such an optimizer; None:
        one of which nothing is known."""
        if SCALE not in self.rule.arguments or self.arguments[1] != AUTO:
            return self
        return Strategy(self.rule, (self.arguments[0], PEAK if family == SGD else OWN))

    def begins_exact(self, family: Optional[str]) -> bool:
        """Whether a run with such an optimizer begins with exact sums unless it is told otherwise:
        not where the pairs of bench/accuracy/PROTOCOL.md hold its rule without them."""
        return self.rule.warms and (family, self.of(family).spec) not in BEGIN_CODED

    def bytes_per_step(self, machines: int, payload: Payload, gpus: int = 1) -> float:
        """Bytes that each machine's network card sends in a step; `gpus`: ranks per machine.
        (A ring over all ranks leaves each machine once, however many ranks it has.)"""
        if machines == 1:
            return 0.0
        return self.rule.sent(self, machines * (1 if self.rule.hierarchical else gpus), payload)


def ring_bytes(world: int, payload: float) -> float:
    """Bytes that each rank sends in a ring all-reduce of `payload` bytes: 2 (N-1)/N x payload.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009. Measured: 153.7 MB for ResNet-50 in fp32 over 4 nodes, where this says
    153.3.
    """
    return 2 * (world - 1) / world * payload


def _summed_in(width: Optional[int]) -> Callable[[Strategy, int, Payload], float]:
    """An all-reduce of `width`-byte numbers, or of the payload's own width if it is None."""
    return lambda _, world, payload: ring_bytes(world, payload.values * (width or payload.width))


def shard_size(values: float, world: int) -> int:
    """The number of values that each rank owns of a bucket of `values`, with padding."""
    return math.ceil(values / world / UNIT) * UNIT


def coded_bytes(values: int, levels: int) -> float:
    """Bytes of `values` numbers of so many levels each, including the scales of their blocks,
    before entropy coding."""
    return values / PACKED[levels] + values / BLOCK * 2


def _exchanged_parts(strategy: Strategy, world: int, payload: Payload) -> float:
    """Each rank sends every other rank the values of that rank's part, and later the sum of its own
    part to every other rank."""
    levels, scale = strategy.of(None).arguments
    part = shard_size(payload.values / payload.buckets, world)
    return 2 * (world - 1) * payload.buckets * part * CODED_BITS[int(levels), scale] / 8


# As a strategy, AUTO is only for the launcher, which replaces it before anything starts.
SCALE = Argument("SCALE", (AUTO, PEAK, OWN), default=AUTO)

RULES: Dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "allreduce",
            "the sum in the gradients' own precision",
            exact=True,
            sent=_summed_in(None),
            usual=("allreduce",),
        ),
        Rule(
            "bf16",
            "gradients travel as bf16 and are summed in it",
            exact=False,
            sent=_summed_in(2),
            usual=("bf16",),
        ),
        Rule(
            "fp16",
            "gradients travel as fp16 and are summed in it",
            exact=False,
            sent=_summed_in(2),
            usual=("fp16",),
        ),
        Rule(
            "ef",
            "gradients in so many levels a value, errors kept for the next step",
            exact=False,
            sent=_exchanged_parts,
            arguments=(Argument("LEVELS", tuple(map(str, sorted(PACKED)))), SCALE),
            bucket_mb=8,
            hierarchical=True,
            warms=True,
            usual=tuple(f"ef:{levels}" for levels in sorted(PACKED, reverse=True)),
        ),
    )
}
EXACT = "allreduce"
# Strategies, by the family of the optimizer, that lose nothing without exact first steps.
BEGIN_CODED = {(SGD, "ef:5:peak")}
# The first key of what tandem.sync.attach keeps for a rank: no script goes on from that alone.
ATTACHED = "tandem.sync.attach"


@dataclass(frozen=True)
class Phases:
    """The phases of a run of `epochs` with an optimizer of `family`. The first `warmup` epochs are
    sums of all bits, and cost what `allreduce` does, with strategies that begin so; where that was
    `chosen` (the trainer's --sync_warmup), with all that leave bits out."""

    epochs: float
    warmup: float = WARMUP_EPOCHS
    family: str = SGD
    chosen: bool = False

    def exact_epochs(self, strategy: Strategy) -> float:
        exact = strategy.rule.warms if self.chosen else strategy.begins_exact(self.family)
        return self.warmup if exact else 0.0

    def exact_share(self, strategy: Strategy) -> float:
        """Of the steps of such a run, the part that is warm-up."""
        return min(1.0, self.exact_epochs(strategy) / self.epochs)

    def mean(self, strategy: Strategy, seconds: float, exact_seconds: float) -> float:
        """Seconds of a mean step over the whole run; `seconds`: of a step after the warm-up,
        `exact_seconds`: of one within."""
        share = self.exact_share(strategy)
        return share * exact_seconds + (1 - share) * seconds

    def all_warm_up(self, strategy: Strategy) -> Optional[str]:
        """A sentence where the run ends before the strategy begins, else None."""
        if self.exact_share(strategy) < 1:
            return None
        return (
            f"--sync {strategy.spec}: this run is all warm-up (epochs {self.epochs:g}, exact sums "
            f"in the first {self.warmup:g}), so it sends as much as {EXACT} and is as slow: train "
            "more epochs, or add --sync_warmup 0"
        )


def parse(spec: str, by: str = "--sync") -> Strategy:
    """What NAME[:ARG] means; `by`: what it was given to. Raises UserError."""
    name, *words = spec.split(":")
    if name == AUTO:
        raise UserError(
            f"{by} auto: make train chooses by what make plan says; here name one of {usages()}."
        )
    if name not in RULES:
        raise UserError(f"{by} {spec}: choose one of {usages()}.")
    rule = RULES[name]
    least = sum(argument.default is None for argument in rule.arguments)
    if not least <= len(words) <= len(rule.arguments):
        raise UserError(f"{by} {spec}: write {rule.usage}.")
    given = [argument.check(word, rule.usage, by) for argument, word in zip(rule.arguments, words)]
    given += [str(argument.default) for argument in rule.arguments[len(given) :]]
    return Strategy(rule, tuple(given))


def known(spec: object) -> Optional[Strategy]:
    """Like `parse`, but None for what it refuses, such as a field in a file of a machine."""
    try:
        return parse(spec) if isinstance(spec, str) else None
    except UserError:
        return None


def usages() -> str:
    """All names with their arguments, for a sentence."""
    return ", ".join(rule.usage for rule in RULES.values())


def usual() -> List[Strategy]:
    """The strategies that a prediction compares, in the registry's order."""
    return [parse(spec) for rule in RULES.values() for spec in rule.usual]
