"""Measure the mean training step: the figures on which verdict and predictions are based."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add, sub
from typing import Any, NamedTuple

from boundary.run_files import PlannedProgram, RankStart
from contract.options import OPTIMIZERS
from contract.strategies import EXACT, MIB, SGD, Payload, Phases, Strategy, parse
from contract.text import link_speed, seconds, size
from report import formulas
from report.figures import SENT
from report.read import BETWEEN, RankRecord, RunRecord
from report.usage import NetworkUsage
from report.wait_rules import OWN_WORK, SLOWER

# A verdict needs LEAST_STEPS measured steps whose halves agree: before, the device, caches and
# connections may be warming up. In SETTLED_STEPS a warm-up weighs little, so steps that still
# change are accepted.
LEAST_STEPS, SETTLED_STEPS = 20, 200
# The halves' mean steps may differ by this fraction of the shorter one, or by chance: that many
# standard errors. Steps that wait for lost packets differ a lot without any trend.
AGREEMENT, CHANCE = 0.15, 2.0
# A part may exceed its whole by this factor, because both are not read at the same moment.
MAX_FRACTION = 1.02


@dataclass(frozen=True)
class RankWork:
    """The mean step of one rank: seconds by category, and images."""

    host: str
    rank: int
    seconds: dict[str, float]
    images: float = 0.0

    @property
    def work_seconds(self) -> float:
        """Seconds of a step without waiting for other ranks."""
        return sum(self.seconds.get(category, 0.0) for category in OWN_WORK)


@dataclass(frozen=True)
class Step:
    """The mean step of the run's longest attempt, in seconds, over its ranks.

    The first step of the attempt is omitted, because it also warms up the device, the loader and
    DDP's buckets. The exact steps with which a compressing strategy begins are omitted, too, unless
    the run has no other: then they count as steps of `allreduce`, and `pending` is the strategy
    that never began. `network` is how long even the last rank to arrive waited (the least wait
    among the ranks, step by step); `peers` is how much longer the others waited for that rank.
    Their sum is the mean of `sync_exposed`.
    """

    attempt: int
    nodes: int
    world: int
    steps: int
    images: float  # per step, all ranks
    payload: Payload
    strategy: Strategy | None  # None if this version does not know it
    data: float
    h2d: float
    forward: float
    backward: float
    optimizer: float
    other: float
    network: float
    peers: float
    checkpoint: float  # seconds of saving per step
    ranks: tuple[RankWork, ...]
    # Seconds per step between epochs, with the waits of other ranks for that work; and the seconds
    # in which one rank worked there while another waited. Neither is part of the step.
    between: float = 0.0
    rank_work: float = 0.0
    epochs_begun: int = 0  # after the first one
    late_by: str = ""  # the category by which the last rank of a step is late, whichever it is
    # Seconds of a step of that rank by category: its work, and the wait of even that rank.
    last_rank: dict[str, float] = field(default_factory=dict)
    # Seconds of the shortest stall for saving; the first one, for example, waits for no other file.
    least_save: float = math.inf
    measured_steps: int = 0  # these figures are their mean
    halves: tuple[float, float] = (0.0, 0.0)  # seconds of a step in each half of them
    halves_error: float = 0.0  # the standard error of their difference
    # By the counters of network interfaces; None if they were not recorded.
    bytes_sent: float | None = None  # per node and step
    link_mbit: float | None = None
    rate: float | None = None  # bytes per second that the gradients achieved
    shared_machine: bool = False  # all nodes are one machine: no cable between them
    pending: Strategy | None = None  # if all steps were its warm-up
    warm_steps: int = 0  # steps of the warm-up
    warm_seconds: float = 0.0  # of one such step, if other steps follow
    phases: Phases = field(default_factory=lambda: Phases(1, 0))  # of the run
    length: float | None = None  # planned steps; None if the number of epochs is unknown
    program: PlannedProgram = field(default_factory=PlannedProgram)
    family: str | None = None  # of its optimizer, if a rank recorded it
    contradiction: str | None = None  # a sentence on an impossible figure, which was omitted

    @property
    def sample(self) -> str:
        return self.program.sample

    @property
    def samples(self) -> str:
        return f"{self.sample}s"

    @property
    def missing_for_verdict(self) -> str:
        """A clause on what these steps lack for a verdict; "" if they can be judged."""
        # Few steps are no evidence even if they are equal.
        if self.measured_steps < LEAST_STEPS:
            return (
                f"a verdict needs {LEAST_STEPS} steps, but only {self.measured_steps} were measured"
            )
        shorter, longer = sorted(self.halves)
        agree = longer - shorter <= max(AGREEMENT * shorter, CHANCE * self.halves_error)
        if agree or self.measured_steps >= SETTLED_STEPS:
            return ""
        halves = [seconds(half) for half in self.halves]
        return (
            f"its steps still change: {halves[0]} each in the first half, {halves[1]} in the second"
        )

    @property
    def before_one_pass(self) -> bool:
        """True if the run took fewer steps than one pass over the data has."""
        return self.length is not None and self.steps * self.phases.epochs < self.length

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.optimizer

    @property
    def work(self) -> float:
        """A step without any waiting for other ranks."""
        return self.data + self.h2d + self.compute + self.other

    @property
    def seconds(self) -> float:
        return self.work + self.network + self.peers

    @property
    def training(self) -> float:
        """A step with its share of saving and of work between epochs: the total of all shares."""
        return self.seconds + self.checkpoint + self.between

    def payload_for(self, strategy: Strategy) -> Payload:
        """Return the gradients in `strategy`'s default buckets, unless the run chose a size."""
        default = self.strategy.rule.bucket_mb * MIB if self.strategy else None
        # The user chose a size of buckets, which another strategy would keep.
        if self.payload.bucket != default:
            return self.payload
        return replace(self.payload, bucket=strategy.rule.bucket_mb * MIB)

    @property
    def one_machine(self) -> bool:
        return self.nodes == 1 or self.shared_machine

    @property
    def gpus(self) -> int:
        """Ranks per machine, assumed to be about the same on all."""
        return max(1, round(self.world / self.nodes))

    def wait(self, strategy: Strategy, machines: int, rate: float) -> float:
        """Return the seconds per step that ranks of so many machines wait for the network."""
        payload = self.payload_for(strategy)
        return formulas.sync_wait(strategy, machines, payload, rate, self.backward, self.gpus)

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def measure_step(run: RunRecord, networks: list[NetworkUsage]) -> Step | None:
    """Return the mean step of the longest attempt; None if no rank finished two steps."""
    records = longest_attempt(run.ranks)
    if not records:
        return None
    step = step_of_ranks(records, run.program)
    hosts = {record.host for record in records}
    used = [use for use in networks if use.host in hosts and use.attempt == step.attempt]
    step = replace(
        step,
        bytes_sent=mean_or_none([use.sent_per_step for use in used]),
        link_mbit=min((use.speed_mbit for use in used if use.speed_mbit), default=None),
        shared_machine=len(hosts) > 1 and all(use.shared_by > 1 for use in used) and bool(used),
    )
    if step.bytes_sent is not None and step.link_mbit is not None:
        # The counters cover the whole loop, evaluation included. A count that the link could not
        # have carried in that time is wrong.
        loop = statistics.fmean(record.clock / record.step_count for record in records)
        least = step.bytes_sent / formulas.line_rate(step.link_mbit)
        if least > MAX_FRACTION * loop:
            step = replace(
                step,
                bytes_sent=None,
                contradiction="The network counters say that each node sent "
                f"{size(step.bytes_sent)} per step, which takes {seconds(least)} at "
                f"{link_speed(step.link_mbit)}, but a whole step took only "
                f"{seconds(loop)}. The report ignores the counters. Please report "
                "this as a bug.",
            )
    return replace(step, rate=achieved_rate(step, used))


def step_of_ranks(records: list[RankRecord], program: PlannedProgram) -> Step:
    """Return the mean step by the ranks' records, without the counters of network interfaces."""
    later = has_later_steps(records)
    # A wait for another rank's work between epochs counts as that work, not as part of a step.
    epoch_waits = waits_between(records, later)
    counts, between, ranks = [], 0.0, []
    for record, wait in zip(records, epoch_waits.seconds):
        lines, spent = measured_lines(record, later), steady_seconds(record, later)
        count = count_steps(record, lines)
        spent["sync_exposed"] -= wait / count
        spent[BETWEEN] = sum(record.steps.between[line] for line in lines) / count
        between += (spent[BETWEEN] + wait / count) / len(records)
        ranks.append(RankWork(record.host, record.rank, spent, images_of(record)))
        counts.append(count)
    mean = {
        category: statistics.fmean(rank.seconds.get(category, 0.0) for rank in ranks)
        for category in (*OWN_WORK, "sync_exposed")
    }
    start = records[0].start
    pending, strategy = None, formulas.strategy_of(start)
    # A run that never got past the warm-up measured exact sums.
    warm = max(map(warm_steps, records))
    if warm and not later:
        pending, strategy = strategy, parse(EXACT)
    # The network's part: over the pieces of the loop, the wait of the last rank.
    last = last_rank(records, later)
    # Without pieces, no lines of all ranks end at the same step.
    network = last.get("sync_exposed")
    if network is None:
        network = min(steady_seconds(r, later).get("sync_exposed", 0.0) for r in records)
    late_by = max(OWN_WORK, key=lambda name: last.get(name, 0.0) - mean[name])
    # Charged waits were subtracted from the mean, but not from the pieces.
    network = min(network, mean["sync_exposed"])
    peers = mean["sync_exposed"] - network
    # A script chooses its exact steps itself, and does not record its optimizer.
    optimizer = OPTIMIZERS.get(str(start.options.get("optimizer")))
    family = optimizer.family if optimizer else None
    chosen = not start.options or start.options.get("sync_warmup") is not None
    saves = [line.seconds.get("checkpoint", 0.0) for r in records for line in r.other_lines]
    halves = compare_halves(records, later)
    world = int(start.world_size or len(records))
    bucket: dict[str, Any] = {"bucket": start.bucket_mb * MIB} if start.bucket_mb else {}
    return Step(
        attempt=records[0].attempt,
        nodes=len({record.host for record in records}),
        world=world,
        steps=max(record.step_count for record in records),
        # A rank without a file counts as the mean of the others.
        images=world * statistics.fmean(map(images_of, records)),
        payload=Payload(float(start.gradient_bytes or 0.0), **bucket),
        strategy=strategy,
        data=mean["data"],
        h2d=mean["h2d"],
        forward=mean["forward"],
        backward=mean["backward"],
        optimizer=mean["optimizer"],
        other=mean["other"],
        network=network,
        peers=peers,
        checkpoint=statistics.fmean(saved(record) / record.step_count for record in records),
        ranks=tuple(ranks),
        between=between,
        rank_work=epoch_waits.worked_alone / min(counts),
        epochs_begun=max(record.epochs_begun for record in records),
        late_by=late_by if last.get(late_by, 0.0) > mean[late_by] else "",
        last_rank=last,
        least_save=min((stall for stall in saves if stall > 0), default=math.inf),
        measured_steps=min(counts),
        halves=halves.seconds,
        halves_error=halves.error,
        pending=pending,
        warm_steps=warm,
        warm_seconds=warm_step_seconds(records) if later else 0.0,
        phases=Phases(start.epochs or 1, start.warmup or 0, family or SGD, chosen),
        length=planned_steps(start),
        program=program,
        family=family,
    )


def saved(record: RankRecord) -> float:
    """Return the seconds for which saving stalled a rank, except the wait at its end."""
    end = record.other_lines[-1] if record.end.mono is not None and record.other_lines else None
    at_end = end.seconds.get("checkpoint", 0.0) if end else 0.0
    return record.seconds.get("checkpoint", 0.0) - at_end


def longest_attempt(records: list[RankRecord]) -> list[RankRecord]:
    """Return the records with two steps or more of the attempt that spent most time in steps."""
    stepped = [record for record in records if len(record.steps) > 1]
    seconds: dict[int, float] = {}
    for record in stepped:
        spent = sum(record.steps.total)
        seconds[record.attempt] = max(seconds.get(record.attempt, 0.0), spent)
    longest = max(seconds, key=lambda attempt: seconds[attempt], default=None)
    return [record for record in stepped if record.attempt == longest]


def planned_steps(start: RankStart) -> float | None:
    """Return the number of steps of the whole run; None if its epochs are not known."""
    epochs, per_epoch = start.epochs, start.steps_per_epoch
    return epochs * per_epoch if epochs and per_epoch else None


def warm_steps(record: RankRecord) -> int:
    """Return the number of exact steps with which a compressing strategy begins."""
    columns = record.steps
    return sum(steps for steps, exact in zip(columns.count, columns.exact) if exact)


def has_later_steps(records: list[RankRecord]) -> bool:
    """Return True if all ranks have steps after a warm-up, the first of all not counted."""
    return all(count_steps(record, measured_lines(record, later=True)) > 1 for record in records)


def measured_lines(record: RankRecord, later: bool) -> list[int]:
    """Return the indices of the lines that count: without the first step, and with `later` without
    the warm-up."""
    exact = record.steps.exact
    return [line for line in range(1, len(exact)) if not (later and exact[line])]


def count_steps(record: RankRecord, lines: list[int]) -> int:
    return sum(record.steps.count[line] for line in lines)


def steady_seconds(record: RankRecord, later: bool) -> dict[str, float]:
    """Return the mean seconds by category of the steps that count."""
    lines = measured_lines(record, later)
    steps = count_steps(record, lines)
    return {
        category: sum(map(values.__getitem__, lines)) / steps
        for category, values in record.steps.seconds.items()
    }


class Halves(NamedTuple):
    seconds: tuple[float, float]  # of a mean step in each half
    error: float  # the standard error of their difference


def compare_halves(records: list[RankRecord], later: bool) -> Halves:
    """Return the mean step in the first and in the second half of the steps that count."""
    # A line belongs to the half that its middle is in. From SETTLED_STEPS on the error is 0,
    # because it no longer decides anything.
    spent, steps, errors = [0.0, 0.0], [0, 0], []
    for record in records:
        lines, columns, totals = measured_lines(record, later), record.steps, record.steps.total
        all_steps, passed = count_steps(record, lines), 0
        means: tuple[list[float], list[float]] = ([], [])  # of each line, by half
        for line in lines:
            count = columns.count[line]
            half = int(2 * passed + count > all_steps)
            spent[half] += totals[line]
            steps[half] += count
            passed += count
            means[half].append(totals[line] / count)
        if all_steps < SETTLED_STEPS and all(len(half) > 1 for half in means):
            errors.append(math.sqrt(sum(statistics.variance(m) / len(m) for m in means)))
    early, late = (spent[half] / max(1, steps[half]) for half in (0, 1))
    # The mean, not less for many ranks: they wait for each other in the same steps.
    return Halves((early, late), statistics.fmean(errors) if errors else 0.0)


def warm_step_seconds(records: list[RankRecord]) -> float:
    """Return the mean seconds of an exact step, the first step not counted; 0 if there is none."""
    seconds = steps = 0.0
    for record in records:
        columns = record.steps
        lines = [line for line in range(1, len(columns)) if columns.exact[line]]
        if not lines:
            return 0.0
        steps += count_steps(record, lines)
        seconds += sum(sum(map(values.__getitem__, lines)) for values in columns.seconds.values())
    return seconds / steps


class Piece(NamedTuple):
    """Steps between two at which lines of all ranks end. `ranks`: seconds by category of each."""

    steps: float
    ranks: list[tuple[float, ...]]


def joint_pieces(
    records: list[RankRecord], later: bool, categories: Sequence[str]
) -> Iterator[Piece]:
    """Cut the steps that count into pieces that all ranks have in common: a line may cover several
    steps, and each rank ends its lines itself."""
    ends = [{r.steps.step[line] for line in measured_lines(r, later)} for r in records]
    # Only at these steps can the waits of ranks be compared.
    common = set.intersection(*ends) if ends else set()
    pieces: dict[int, list[tuple[float, ...]]] = {}
    for record in records:
        columns, lines = record.steps, measured_lines(record, later)
        steps = [columns.step[line] for line in lines]
        cuts = [cut for cut, step in enumerate(steps) if step in common]
        summed: list[Sequence[float]] = [
            columns.count,
            *map(columns.seconds.__getitem__, categories),
        ]
        # Differences of running sums: a run has a million lines, and this is done in C.
        sums: list[Iterator[float]] = []
        for column in summed:
            running = [*accumulate(map(column.__getitem__, lines))]
            sums.append(map(sub, map(running.__getitem__, cuts), [0, *(running[c] for c in cuts)]))
        for cut, piece in zip(cuts, zip(*sums)):
            pieces.setdefault(steps[cut], []).append(piece)
    for ranks in pieces.values():
        yield Piece(max(count for count, *_ in ranks), [piece[1:] for piece in ranks])


class EpochWaits(NamedTuple):
    """Waits for ranks that still work between two epochs."""

    seconds: list[float]  # that each rank waited
    worked_alone: float  # seconds in which some rank worked there and another did not


def waits_between(records: Sequence[RankRecord], later: bool = False) -> EpochWaits:
    """Return how long each rank waited for others that still worked between two epochs."""
    waits, worked_alone = [0.0] * len(records), 0.0
    columns = [record.steps for record in records]
    # Any rank may be the one that works between epochs.
    ends = {
        step
        for c in columns
        for step, between, exact in zip(c.step, c.between, c.exact)
        if between and not (later and exact)
    }
    for end in ends:
        lines = [(c, bisect_left(c.step, end)) for c in columns]
        # Work of a second or more ends a line at this step on all ranks.
        if any(line == len(c) or c.step[line] != end for c, line in lines):
            continue
        worked = [c.between[line] for c, line in lines]
        worked_alone += max(worked) - min(worked)
        for rank, (c, line) in enumerate(lines):
            waited = c.seconds["sync_exposed"][line]
            waits[rank] += min(waited, max(worked) - worked[rank])
    return EpochWaits(waits, worked_alone)


def last_rank(records: list[RankRecord], later: bool) -> dict[str, float]:
    """Return the mean seconds of a step of its last rank by category; {} without common pieces."""
    # The last rank is the one that waits least, in each piece another one, so its seconds add up to
    # those of the step.
    categories = ["sync_exposed", *OWN_WORK]
    spent, steps = [0.0] * len(categories), 0.0
    for piece in joint_pieces(records, later, categories):
        spent, steps = [*map(add, spent, min(piece.ranks))], steps + piece.steps
    return {name: value / steps for name, value in zip(categories, spent) if steps}


def images_of(record: RankRecord) -> float:
    """Return a rank's images in its mean step; 0 if they were not counted."""
    return 0.0 if record.is_uncounted else sum(record.steps.samples) / record.step_count


class TrainingTotals(NamedTuple):
    """Training images of all ranks, and seconds of their steps (mean over ranks)."""

    images: float
    seconds: float


def training_totals(records: Sequence[RankRecord], skipped: int = 0) -> TrainingTotals:
    """Return the totals over all attempts, without the first `skipped` lines of each rank. A rank
    without a file counts as the mean of the others. 0 images if a rank did not count them."""
    images = seconds = 0.0
    for attempt in {record.attempt for record in records}:
        stepped = [r for r in records if r.attempt == attempt and len(r.steps) > skipped]
        if stepped:
            world = max(len(stepped), int(stepped[0].start.world_size or 0))
            images += world * statistics.fmean(sum(r.steps.samples[skipped:]) for r in stepped)
            seconds += statistics.fmean(sum(r.steps.total[skipped:]) for r in stepped)
            # Waits for another rank's work between epochs are no part of the steps' speed.
            seconds -= statistics.fmean(waits_between(stepped).seconds)
    if any(record.is_uncounted for record in records):
        images = 0.0
    return TrainingTotals(images, seconds)


def unsummed_steps(records: Sequence[RankRecord]) -> int:
    """Return the most steps in a row whose gradients were not summed."""
    return max((record.unsummed for record in records), default=0)


def images_per_second(records: Sequence[RankRecord]) -> float | None:
    """Return the training images of all ranks over the time of their steps, warm-up included."""
    # The first line of each rank and attempt is omitted: its step also warms up the device, the
    # loader and DDP's buckets. None without other lines. All views show this speed.
    total = training_totals(records, skipped=1)
    return total.images / total.seconds if total.images and total.seconds > 0 else None


def machine_speeds(step: Step) -> dict[str, float]:
    """Return the images/s of each machine without others, by the work of its slowest rank."""
    # Nodes that share a machine slow each other down: none of them has a speed.
    if step.shared_machine:
        return {}
    by_host: dict[str, list[RankWork]] = {}
    for rank in step.ranks:
        by_host.setdefault(rank.host, []).append(rank)
    images = {host: sum(rank.images for rank in ranks) for host, ranks in by_host.items()}
    spent = {host: max(rank.work_seconds for rank in ranks) for host, ranks in by_host.items()}
    return {host: images[host] / spent[host] for host in by_host if images[host] and spent[host]}


def achieved_rate(step: Step, used: list[NetworkUsage]) -> float | None:
    """Return the bytes per second that the gradients achieved, by the wait of a step."""
    # It is at most what the link carries, and at least what the interface sent in some second.
    if step.strategy is None or step.network <= 0 or not step.payload.bytes or step.nodes == 1:
        return None
    moved = step.bytes_sent
    # Without counters the bytes follow from the strategy.
    if moved is None:
        moved = step.strategy.bytes_per_step(step.nodes, step.payload, step.gpus)
    if not moved:
        return None
    # The wait is only the part of the transfer that backward does not hide.
    rate = moved / formulas.transfer_of(step.network, step.payload, step.backward)
    if step.link_mbit:
        rate = min(rate, formulas.line_rate(step.link_mbit))
    peaks = [use.maximum(SENT) for use in used if use.shared_by == 1]
    return max([rate, *peaks])


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


class Slowest(NamedTuple):
    """The rank with the most work per step, and the median seconds of the other ranks' work."""

    rank: RankWork
    median: float
    place: str  # what is slow: its machine, or its device there

    @property
    def delay(self) -> float:
        """Seconds by which its work takes longer."""
        return self.rank.work_seconds - self.median

    @property
    def is_straggler(self) -> bool:
        return self.rank.work_seconds > SLOWER * self.median


def slowest(step: Step) -> Slowest:
    """Find the slowest rank. If it is the only one, the median is that of its work."""
    rank = max(step.ranks, key=lambda rank: rank.work_seconds)
    work = [faster.work_seconds for faster in step.ranks if faster is not rank]
    median = statistics.median(work) if work else rank.work_seconds
    # If another rank of that machine is not as slow, the machine is not to blame.
    neighbours = [r.work_seconds for r in step.ranks if r.host == rank.host and r is not rank]
    if neighbours and rank.work_seconds >= 1.1 * min(neighbours):
        return Slowest(rank, median, f"{rank.host}'s device of rank {rank.rank}")
    return Slowest(rank, median, rank.host)
