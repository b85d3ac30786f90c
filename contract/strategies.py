"""Define the strategies of `--sync`, NAME[:ARG]: their names, the bytes that they send, and whether
they are exact. RULES is the only list of strategies. The sums themselves are in tandem/sync/: a new
strategy is one entry here and one class there.

This file does not import torch, because the launcher and the report read it, too. Units: bytes and
steps. `world` is the number of participants in an exchange: ranks, or machines.
"""

import math
from dataclasses import dataclass
from typing import Callable, Dict, List, Optional, Tuple

from contract.errors import UserError

# The default bucket_cap_mb of DistributedDataParallel.
BUCKET_MB = 25
MIB = 2**20
# By default the learning rate warms up for this long, and the sums are exact for as long before a
# strategy begins that omits bits.
WARMUP_EPOCHS = 1.0
# Families of optimizers. ADAM divides by the root of a running mean of squares, and SGD does not.
SGD, ADAM = "sgd", "adam"
# A strategy with levels, such as ef:5, sends a gradient as a code of one of the levels. A block of
# BLOCK values shares a scale of 16 bits. A shard is padded to a multiple of UNIT values, which fill
# whole bytes with 1, 2, 3 or 5 values a byte (PACKED).
BLOCK = 256
UNIT = 15 * BLOCK
# {number of levels: values per byte}.
PACKED = {3: 5, 5: 3, 15: 2, 255: 1}
# SCALE of `ef`. peak: the scale is the largest value of the block. own: in addition each value has
# a scale of its own, computed from sums that all ranks received. auto: own for ADAM, else peak.
AUTO, PEAK, OWN = "auto", "peak", "own"
# {(levels, scale): bits per value on the wire after zstd}, sizes of blocks included. For 3 and 5
# levels, the largest of the measurements of real runs; for 15 and 255, of normal random numbers.
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
    """Hold the size of a step's gradients. `bytes`: of all gradients, in numbers of `width` bytes.
    `bucket`: bytes of a bucket, whose values are summed together."""

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
    """Describe an argument of a strategy. An argument without `default` must be typed."""

    name: str
    choices: Tuple[str, ...]
    default: Optional[str] = None

    def check(self, text: str, usage: str, by: str) -> str:
        """Return the text if it is a choice. Raises UserError. `by`: the option's name."""
        if text not in self.choices:
            raise UserError(
                f"{by} {usage}: {self.name} is one of {', '.join(self.choices)}, not {text!r}."
            )
        return text


@dataclass(frozen=True)
class Rule:
    """Describe all strategies with one name.

    `text`: a clause on the method, for people. `exact`: the result is the sum in the precision of
    the gradients. `sent`: returns the bytes that each participant of a world sends in a step for a
    payload. `bucket_mb`: the size of a gradient bucket in MiB without --bucket_mb. `hierarchical`:
    the ranks of a machine first sum among themselves, and then machines exchange these sums.
    `warms`: the first --sync_warmup epochs can be exact. `usual`: the specs that a prediction
    compares.
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
        """Return the form of a spec for people: `ef:LEVELS[:SCALE]`."""
        names = [self.name]
        for argument in self.arguments:
            names.append(argument.name if argument.default is None else f"[{argument.name}]")
        # The colon before an optional argument is optional, too.
        return ":".join(names).replace(":[", "[:")


@dataclass(frozen=True)
class Strategy:
    """Hold a parsed `--sync`: a rule with the values of all of its arguments."""

    rule: Rule
    arguments: Tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def levels(self) -> int:
        """Return LEVELS of `ef`. Other strategies have no levels."""
        return int(self.arguments[0])

    @property
    def scale(self) -> str:
        """Return SCALE of `ef`: AUTO, PEAK or OWN. Other strategies have no scale."""
        return self.arguments[1]

    @property
    def spec(self) -> str:
        """Return NAME[:ARG] as a person writes it, without default values: `ef:5`."""
        words = list(self.arguments)
        # `parse` fills in default values from the right, so only the last ones can be omitted.
        while words and words[-1] == self.rule.arguments[len(words) - 1].default:
            words.pop()
        return ":".join([self.name, *words])

    @property
    def exact(self) -> bool:
        return self.rule.exact

    def for_family(self, family: Optional[str]) -> "Strategy":
        """Return a copy with the scale that `auto` means for this family (None: unknown)."""
        if SCALE not in self.rule.arguments or self.scale != AUTO:
            return self
        return Strategy(self.rule, (self.arguments[0], PEAK if family == SGD else OWN))

    def begins_exact(self, family: Optional[str]) -> bool:
        """Return whether runs with this family of optimizers begin with exact sums by default. A
        strategy of BEGIN_CODED does not, because its runs lost nothing without exact sums."""
        return self.rule.warms and (family, self.for_family(family).spec) not in BEGIN_CODED

    def bytes_per_step(self, machines: int, payload: Payload, gpus: int = 1) -> float:
        """Return the bytes that each machine sends to others in a step. `gpus`: its ranks."""
        if machines == 1:  # its ranks use the PCIe bus, not the network
            return 0.0
        # The participants of the exchange are machines, or all ranks. A ring over all ranks leaves
        # each machine once, so in both cases a machine sends as much as one participant.
        world = machines if self.rule.hierarchical else machines * gpus
        return self.rule.sent(self, world, payload)


def ring_bytes(world: int, payload: float) -> float:
    """Return the bytes that each rank sends in a ring all-reduce: 2 (N-1)/N x `payload` bytes.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009. For ResNet-50 in fp32 over 4 nodes this is 153.3 MB; 153.7 were measured.
    """
    return 2 * (world - 1) / world * payload


def _sent_in_16_bits(_: Strategy, world: int, payload: Payload) -> float:
    """Return `sent` of an all-reduce of numbers of 16 bits."""
    return ring_bytes(world, payload.values * 2)


def shard_size(values: float, world: int) -> int:
    """Return the number of values of a bucket that each rank sums: its shard, with padding."""
    # Shards consist of whole units, so that every rank packs whole bytes and whole blocks.
    return math.ceil(values / world / UNIT) * UNIT


def coded_bytes(values: int, levels: int) -> float:
    """Return the bytes of `values` numbers of `levels` levels before entropy coding, including a
    scale of 2 bytes for each block."""
    return values / PACKED[levels] + values / BLOCK * 2


def _sent_as_shards(strategy: Strategy, world: int, payload: Payload) -> float:
    """Return `sent` of `ef`. Each participant sends each other participant the values of the
    receiver's shard, and later the sum of its own shard."""
    # The family is unknown here, so `auto` counts as `own`, which sends more with most levels.
    strategy = strategy.for_family(None)
    bits_per_value = CODED_BITS[strategy.levels, strategy.scale]
    shard = shard_size(payload.values / payload.buckets, world)
    return 2 * (world - 1) * payload.buckets * shard * bits_per_value / 8


# As SCALE, AUTO depends on the optimizer. `--sync auto` is another word: see decisions.py.
SCALE = Argument("SCALE", (AUTO, PEAK, OWN), default=AUTO)

RULES: Dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule(
            "allreduce",
            "the sum in the gradients' own precision",
            exact=True,
            sent=lambda _, world, payload: ring_bytes(world, payload.bytes),
            usual=("allreduce",),
        ),
        Rule(
            "bf16",
            "gradients are sent and summed as bf16",
            exact=False,
            sent=_sent_in_16_bits,
            usual=("bf16",),
        ),
        Rule(
            "fp16",
            "gradients are sent and summed as fp16",
            exact=False,
            sent=_sent_in_16_bits,
            usual=("fp16",),
        ),
        Rule(
            "ef",
            "each gradient value is rounded to one of a few levels, and the rounding error "
            "is added to the next step",
            exact=False,
            sent=_sent_as_shards,
            arguments=(Argument("LEVELS", tuple(map(str, sorted(PACKED)))), SCALE),
            bucket_mb=8,  # stages of several small buckets overlap (tandem/sync/carrier.py)
            hierarchical=True,
            warms=True,
            usual=tuple(f"ef:{levels}" for levels in sorted(PACKED, reverse=True)),
        ),
    )
}
EXACT = "allreduce"
# {(family of optimizers, spec)} of runs that lost nothing although they began without exact sums
# (bench/accuracy).
BEGIN_CODED = {(SGD, "ef:5:peak")}
# The first key of the state that tandem.sync.attach saves for a rank. A file with only this state
# is not a checkpoint that a script could resume from.
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
        """Return the number of epochs that begin with exact sums."""
        begins_exact = strategy.begins_exact(self.family)
        if self.chosen:
            begins_exact = strategy.rule.warms
        return self.warmup if begins_exact else 0.0

    def exact_share(self, strategy: Strategy) -> float:
        """Return the share of the run's steps that is warm-up, from 0 to 1."""
        return min(1.0, self.exact_epochs(strategy) / self.epochs)

    def mean(self, strategy: Strategy, seconds: float, exact_seconds: float) -> float:
        """Return the mean seconds of a step over the whole run. `seconds`: of a step after the
        warm-up; `exact_seconds`: of a step within the warm-up."""
        share = self.exact_share(strategy)
        return share * exact_seconds + (1 - share) * seconds

    def warn_if_all_warm_up(self, strategy: Strategy) -> Optional[str]:
        """Return a sentence if the run ends before the strategy begins, otherwise None."""
        if self.exact_share(strategy) < 1:
            return None
        return (
            f"--sync {strategy.spec}: this run is all warm-up (epochs {self.epochs:g}, exact sums "
            f"in the first {self.warmup:g}), so it sends as much as {EXACT} and is as slow: train "
            "more epochs, or add --sync_warmup 0"
        )


def parse(spec: str, by: str = "--sync") -> Strategy:
    """Parse NAME[:ARG]. `by`: the name of the option, for errors. Raises UserError, also for
    `auto`, which is not a strategy."""
    name, *words = spec.split(":")
    if name == AUTO:
        raise UserError(
            f"{by} auto: only make train supports auto, because it uses the results of make "
            f"plan. Use one of {list_usages()}."
        )
    if name not in RULES:
        raise UserError(f"{by} {spec}: choose one of {list_usages()}.")
    rule = RULES[name]
    # Arguments with a default may be omitted. They come after the required arguments.
    required_count = sum(argument.default is None for argument in rule.arguments)
    if not required_count <= len(words) <= len(rule.arguments):
        raise UserError(f"{by} {spec}: write {rule.usage}.")
    values = [argument.check(word, rule.usage, by) for argument, word in zip(rule.arguments, words)]
    values += [str(argument.default) for argument in rule.arguments[len(values) :]]
    return Strategy(rule, tuple(values))


def parse_or_none(spec: object) -> Optional[Strategy]:
    """Parse NAME[:ARG]. Returns None if it is invalid, as a field of a machine's file may be."""
    try:
        return parse(spec) if isinstance(spec, str) else None
    except UserError:
        return None


def list_usages() -> str:
    """Return all names with their arguments, for a sentence."""
    return ", ".join(rule.usage for rule in RULES.values())


def list_usual() -> List[Strategy]:
    """Return the strategies that a prediction compares, in the order of RULES."""
    return [parse(spec) for rule in RULES.values() for spec in rule.usual]
