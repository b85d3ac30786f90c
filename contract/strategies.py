"""Define the strategies of `--sync`, NAME[:ARG]: their names, the bytes that they send, and whether
they are exact.

This is the only list of strategies. It does not import torch, because the launcher and the report
read it, too. `RULES` maps each name to its entry; a new strategy is one entry here and one class in
`tandem/sync/`.

Units: bytes and steps; `world` is the number of participants in an exchange: ranks, or machines.
"""

import math
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

from contract.errors import UserError

# The default bucket_cap_mb of DistributedDataParallel.
BUCKET_MB = 25
MIB = 2**20
# The warm-up of the learning rate, and of exact sums before a strategy that omits bits.
WARMUP_EPOCHS = 1.0
# Families of optimizers: those that divide by the root of a running mean of squares, and others.
SGD, ADAM = "sgd", "adam"
# BLOCK values share a scale of 16 bits. Parts are padded to a multiple of UNIT values, which fills
# whole bytes with 1, 2, 3 or 5 values a byte.
BLOCK = 256
UNIT = 15 * BLOCK
# Values per byte, by the number of levels of a value.
PACKED = {3: 5, 5: 3, 15: 2, 255: 1}
# The scale of the levels of `ef`. peak: the largest value of the block; own: in addition a scale
# for each value, from sums that all ranks received. auto: own for Adam's family.
AUTO, PEAK, OWN = "auto", "peak", "own"
# Bits per value on the wire after zstd, by levels and scale, sizes of blocks included: the largest
# of codes of real runs. For 15 and 255 levels, codes of normal numbers.
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
    """Hold the size of a step's gradients: `bytes` bytes in `width`-byte numbers."""

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
        """Return the text if it is one of the choices. Raises UserError."""
        if text not in self.choices:
            raise UserError(
                f"{by} {usage}: {self.name} is one of {', '.join(self.choices)}, not {text!r}."
            )
        return text


@dataclass(frozen=True)
class Rule:
    """Describe all strategies with one name.

    `exact`: the result is the sum in the gradients' own precision. `hierarchical`: the ranks of a
    machine first sum among themselves, and machines exchange these sums. `sent`: bytes that each
    participant sends for a payload. `bucket_mb`: size of the gradient buckets without --bucket_mb.
    `warms`: the first --sync_warmup epochs are exact. `usual`: the specs that a prediction shows.
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
    """Hold a parsed `--sync`: a rule with its arguments."""

    rule: Rule
    arguments: Tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def spec(self) -> str:
        """Return NAME[:ARG] as a person writes it, without default values."""
        words = list(self.arguments)
        while words and words[-1] == self.rule.arguments[len(words) - 1].default:
            words.pop()
        return ":".join([self.name, *words])

    @property
    def exact(self) -> bool:
        return self.rule.exact

    def of(self, family: Optional[str]) -> "Strategy":
        """Return a copy with the scale that `auto` means with an optimizer of this family (None: of
        an unknown one)."""
        if SCALE not in self.rule.arguments or self.arguments[1] != AUTO:
            return self
        return Strategy(self.rule, (self.arguments[0], PEAK if family == SGD else OWN))

    def begins_exact(self, family: Optional[str]) -> bool:
        """Return whether runs with such an optimizer begin with exact sums by default. They do not
        need them if bench/accuracy/PROTOCOL.md found no loss without them."""
        return self.rule.warms and (family, self.of(family).spec) not in BEGIN_CODED

    def bytes_per_step(self, machines: int, payload: Payload, gpus: int = 1) -> float:
        """Return the bytes that each machine sends to other machines in a step. `gpus`: ranks per
        machine. (A ring over all ranks leaves each machine once, regardless of its ranks.)"""
        if machines == 1:  # its ranks use the PCIe bus, not the network
            return 0.0
        return self.rule.sent(self, machines * (1 if self.rule.hierarchical else gpus), payload)


def ring_bytes(world: int, payload: float) -> float:
    """Return the bytes that each rank sends in a ring all-reduce: 2 (N-1)/N x `payload` bytes.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009. For ResNet-50 in fp32 over 4 nodes this is 153.3 MB; 153.7 were measured.
    """
    return 2 * (world - 1) / world * payload


def _summed_in(width: Optional[int]) -> Callable[[Strategy, int, Payload], float]:
    """Return `sent` of an all-reduce of `width`-byte numbers, or of the payload's width if None."""
    return lambda _, world, payload: ring_bytes(world, payload.values * (width or payload.width))


def shard_size(values: float, world: int) -> int:
    """Return the number of values that each rank owns of a bucket of `values`, with padding."""
    # Whole units, so that every rank packs whole bytes and whole blocks of scales.
    return math.ceil(values / world / UNIT) * UNIT


def coded_bytes(values: int, levels: int) -> float:
    """Return the bytes of `values` numbers of `levels` levels, including the scales of their
    blocks, before entropy coding."""
    return values / PACKED[levels] + values / BLOCK * 2


def _exchanged_shards(strategy: Strategy, world: int, payload: Payload) -> float:
    """Return `sent` of `ef`: each rank sends every other rank the values of that rank's shard, and
    later the sum of its own shard."""
    levels, scale = strategy.of(None).arguments
    shard = shard_size(payload.values / payload.buckets, world)
    return 2 * (world - 1) * payload.buckets * shard * CODED_BITS[int(levels), scale] / 8


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
            "each gradient value is rounded to one of a few levels, and the rounding error "
            "is added to the next step",
            exact=False,
            sent=_exchanged_shards,
            arguments=(Argument("LEVELS", tuple(map(str, sorted(PACKED)))), SCALE),
            bucket_mb=8,
            hierarchical=True,
            warms=True,
            usual=tuple(f"ef:{levels}" for levels in sorted(PACKED, reverse=True)),
        ),
    )
}
EXACT = "allreduce"
# Strategies that lose nothing without exact first steps, with the family of the optimizer.
BEGIN_CODED = {(SGD, "ef:5:peak")}
# The first key of a rank's state that tandem.sync.attach saves. A file with nothing else is not a
# checkpoint that a script could resume from.
ATTACHED = "tandem.sync.attach"


@dataclass(frozen=True)
class Phases:
    """Hold the phases of a run of `epochs` with an optimizer of `family`. In the first `warmup`
    epochs, strategies that begin with exact sums send as much as `allreduce`. `chosen`: the user
    set the warm-up (--sync_warmup), so every strategy that can begin with exact sums does."""

    epochs: float
    warmup: float = WARMUP_EPOCHS
    family: str = SGD
    chosen: bool = False

    def exact_epochs(self, strategy: Strategy) -> float:
        exact = strategy.rule.warms if self.chosen else strategy.begins_exact(self.family)
        return self.warmup if exact else 0.0

    def exact_share(self, strategy: Strategy) -> float:
        """Return the share of the run's steps that is warm-up, from 0 to 1."""
        return min(1.0, self.exact_epochs(strategy) / self.epochs)

    def mean(self, strategy: Strategy, seconds: float, exact_seconds: float) -> float:
        """Return the mean seconds of a step over the whole run. `seconds`: of a step after the
        warm-up; `exact_seconds`: of a step within it."""
        share = self.exact_share(strategy)
        return share * exact_seconds + (1 - share) * seconds

    def all_warm_up(self, strategy: Strategy) -> Optional[str]:
        """Return a sentence if the run ends before the strategy begins, otherwise None."""
        if self.exact_share(strategy) < 1:
            return None
        return (
            f"--sync {strategy.spec}: this run is all warm-up (epochs {self.epochs:g}, exact sums "
            f"in the first {self.warmup:g}), so it sends as much as {EXACT} and is as slow: train "
            "more epochs, or add --sync_warmup 0"
        )


def parse(spec: str, by: str = "--sync") -> Strategy:
    """Parse NAME[:ARG]. `by`: the option's name, for errors. Raises UserError."""
    name, *words = spec.split(":")
    if name == AUTO:
        raise UserError(
            f"{by} auto: only make train supports auto, because it uses the results of make "
            f"plan. Use one of {usages()}."
        )
    if name not in RULES:
        raise UserError(f"{by} {spec}: choose one of {usages()}.")
    rule = RULES[name]
    # Arguments with a default may be omitted. They come after the others.
    least = sum(argument.default is None for argument in rule.arguments)
    if not least <= len(words) <= len(rule.arguments):
        raise UserError(f"{by} {spec}: write {rule.usage}.")
    values = [argument.check(word, rule.usage, by) for argument, word in zip(rule.arguments, words)]
    values += [str(argument.default) for argument in rule.arguments[len(values) :]]
    return Strategy(rule, tuple(values))


def parse_or_none(spec: object) -> Optional[Strategy]:
    """Parse NAME[:ARG], or return None if it is invalid, as a field of a machine's file may be."""
    try:
        return parse(spec) if isinstance(spec, str) else None
    except UserError:
        return None


def usages() -> str:
    """Return all names with their arguments, for a sentence."""
    return ", ".join(rule.usage for rule in RULES.values())


def usual() -> List[Strategy]:
    """Return the strategies that a prediction compares, in the registry's order."""
    return [parse(spec) for rule in RULES.values() for spec in rule.usual]
