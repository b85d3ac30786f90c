"""Measure the mean training step of a run, from the records of its ranks.

The verdict, the advice and `make plan` start from the Step that this module returns. This module
judges and predicts nothing: bottleneck.py, advice.py and predict.py do that.
"""

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
# The mean steps of both halves agree if they differ by this fraction of the shorter mean, or by
# this many standard errors: steps that wait for lost packets differ a lot without any trend.
HALVES_TOLERANCE, HALVES_STANDARD_ERRORS = 0.15, 2.0
# Counters and clocks are read at different moments, so a transfer may seem to take longer than the
# loop that contains it, by this factor.
READING_TOLERANCE = 1.02
# Work that takes less than this factor of other work is called equally long.
NOTICEABLE = 1.1


@dataclass(frozen=True)
class RankWork:
    """The mean step of one rank."""

    host: str
    rank: int
    seconds: dict[str, float]  # by category
    images: float = 0.0  # 0 if the rank could not count them

    @property
    def work_seconds(self) -> float:
        """Seconds of a step without waiting for other ranks."""
        return sum(self.seconds.get(category, 0.0) for category in OWN_WORK)


@dataclass(frozen=True)
class Step:
    """The mean step of the run's longest attempt, in seconds, over its ranks.

    The first step of the attempt is omitted, because it also warms up the device, the loader and
    DDP's buckets. The exact steps with which a compressing strategy begins are omitted, too, unless
    the run has no other steps. Then the exact steps count as steps of `allreduce`, and `pending` is
    the strategy that never began.
    """

    attempt: int
    nodes: int
    world: int
    steps: int  # of the whole attempt, including the omitted steps
    images: float  # per step, all ranks
    payload: Payload
    strategy: Strategy | None  # None if this version does not know it
    # Seconds of the categories in contract/records.py, without `sync_exposed`.
    data: float
    h2d: float
    forward: float
    backward: float
    optimizer: float
    other: float
    # The two parts of `sync_exposed`. In each step the last rank to arrive at the sum waits least:
    # this wait is `network`. `peers` is how much longer the ranks wait for that rank, on average.
    network: float
    peers: float
    checkpoint: float  # seconds of saving per step
    ranks: tuple[RankWork, ...]
    # Not part of the step. `between`: seconds per step in which ranks work between epochs, or wait
    # for ranks that still work. `rank_work`: seconds per step in which one rank works between
    # epochs while another rank waits.
    between: float = 0.0
    rank_work: float = 0.0
    epochs_begun: int = 0  # without the first epoch
    # The rank that arrives last differs from step to step. `last_rank`: the mean seconds of the
    # last rank, by category. `late_by`: the category in which these seconds most exceed the mean
    # of all ranks; "" if the last rank exceeds the mean in no category.
    late_by: str = ""
    last_rank: dict[str, float] = field(default_factory=dict)
    # Seconds of the shortest stall for saving. A stall that also waits for the previous file is
    # longer. The first stall has no previous file.
    least_save: float = math.inf
    measured_steps: int = 0  # the number of steps in these means
    halves: tuple[float, float] = (0.0, 0.0)  # seconds of the mean step in each half of the steps
    halves_error: float = 0.0  # the standard error of the difference of `halves`
    # By the counters of network interfaces; None if they were not recorded.
    bytes_sent: float | None = None  # per node and step
    link_mbit: float | None = None
    rate: float | None = None  # bytes per second that the gradients achieved
    shared_machine: bool = False  # all nodes are one machine: no cable between them
    pending: Strategy | None = None  # the strategy that never began, if all steps were its warm-up
    warm_steps: int = 0  # steps of the warm-up
    warm_seconds: float = 0.0  # of one warm-up step; 0 if no other steps follow the warm-up
    phases: Phases = field(default_factory=lambda: Phases(1, 0))  # epochs and warm-up of the run
    planned_steps: float | None = None  # of the run; None if its number of epochs is unknown
    program: PlannedProgram = field(default_factory=PlannedProgram)
    family: str | None = None  # of the run's optimizer, such as SGD; None if it is not recorded
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
        tolerance = max(HALVES_TOLERANCE * shorter, HALVES_STANDARD_ERRORS * self.halves_error)
        if longer - shorter <= tolerance or self.measured_steps >= SETTLED_STEPS:
            return ""
        halves = [seconds(half) for half in self.halves]
        return (
            f"its steps still change: {halves[0]} each in the first half, {halves[1]} in the second"
        )

    @property
    def before_one_pass(self) -> bool:
        """True if the run took fewer steps than one pass over the data has."""
        # One pass has planned_steps / epochs steps.
        planned = self.planned_steps
        return planned is not None and self.steps * self.phases.epochs < planned

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.optimizer

    @property
    def work(self) -> float:
        """The seconds of a step without any waiting for other ranks."""
        return self.data + self.h2d + self.compute + self.other

    @property
    def seconds(self) -> float:
        return self.work + self.network + self.peers

    @property
    def training_seconds(self) -> float:
        """Seconds of a step with its part of saving and of work between epochs. The fractions of
        `bottleneck.step_shares` are fractions of this time."""
        return self.seconds + self.checkpoint + self.between

    def payload_for(self, strategy: Strategy) -> Payload:
        """Return the gradients in buckets of `strategy`'s default size, or of the user's size."""
        default = self.strategy.rule.bucket_mb * MIB if self.strategy else None
        # A size other than the default is the user's. Each strategy would use that size.
        if self.payload.bucket != default:
            return self.payload
        return replace(self.payload, bucket=strategy.rule.bucket_mb * MIB)

    @property
    def one_machine(self) -> bool:
        return self.nodes == 1 or self.shared_machine

    @property
    def ranks_per_machine(self) -> int:
        """Ranks per machine, assumed to be about the same number on all machines."""
        return max(1, round(self.world / self.nodes))

    @property
    def computed_bytes(self) -> float | None:
        """Bytes per node and step by the strategy's formula, without counters; None if this version
        does not know the strategy."""
        if self.strategy is None:
            return None
        return self.strategy.bytes_per_step(self.nodes, self.payload, self.ranks_per_machine)

    def wait(self, strategy: Strategy, machines: int, rate: float) -> float:
        """Return the seconds per step that ranks of `machines` machines wait for the network, over
        links of `rate` bytes per second."""
        payload, ranks_per_machine = self.payload_for(strategy), self.ranks_per_machine
        return formulas.sync_wait(
            strategy, machines, payload, rate, self.backward, ranks_per_machine
        )

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
    uses = [use for use in networks if use.host in hosts and use.attempt == step.attempt]
    step = replace(
        step,
        bytes_sent=mean_or_none([use.sent_per_step for use in uses]),
        link_mbit=min((use.speed_mbit for use in uses if use.speed_mbit), default=None),
        shared_machine=len(hosts) > 1 and all(use.shared_by > 1 for use in uses) and bool(uses),
    )
    if step.bytes_sent is not None and step.link_mbit is not None:
        # `clock` and the counters cover the whole loop, with evaluation. If the link cannot carry
        # these bytes in that time, the counters are wrong.
        loop_seconds = statistics.fmean(record.clock / record.step_count for record in records)
        transfer_seconds = step.bytes_sent / formulas.line_rate(step.link_mbit)
        if transfer_seconds > READING_TOLERANCE * loop_seconds:
            step = replace(
                step,
                bytes_sent=None,
                contradiction="The network counters say that each node sent "
                f"{size(step.bytes_sent)} per step, which takes {seconds(transfer_seconds)} at "
                f"{link_speed(step.link_mbit)}, but a whole step took only "
                f"{seconds(loop_seconds)}. The report therefore uses no "
                "counters of the network. Please report this as a bug.",
            )
    return replace(step, rate=achieved_rate(step, uses))


def step_of_ranks(records: list[RankRecord], program: PlannedProgram) -> Step:
    """Return the mean step by the ranks' records, without the counters of network interfaces."""
    skip_warm_up = has_steps_after_warm_up(records)
    # A wait for another rank's work between epochs counts as that work, not as part of a step. The
    # wait is therefore subtracted from `sync_exposed` and added to `between`.
    epoch_waits = waits_between(records, skip_warm_up)
    between = 0.0
    # For each rank: the number of measured steps, the mean step, and seconds of saving per step.
    counts, ranks, saving_seconds = [], [], []
    for record, wait in zip(records, epoch_waits.seconds):
        lines = measured_lines(record, skip_warm_up)
        spent = mean_step_seconds(record, skip_warm_up)
        count = count_steps(record, lines)
        spent["sync_exposed"] -= wait / count
        spent[BETWEEN] = sum(record.steps.between[line] for line in lines) / count
        between += (spent[BETWEEN] + wait / count) / len(records)
        ranks.append(RankWork(record.host, record.rank, spent, images_per_step(record)))
        counts.append(count)
        # If the rank wrote its `end` line (`end.mono` is set), that line is the last of the other
        # lines. Its seconds of saving are the wait for the last file, after training.
        end = record.other_lines[-1] if record.end.mono is not None and record.other_lines else None
        at_end = end.seconds.get("checkpoint", 0.0) if end else 0.0
        in_loop = record.seconds.get("checkpoint", 0.0) - at_end
        saving_seconds.append(in_loop / record.step_count)
    mean = {
        category: statistics.fmean(rank.seconds.get(category, 0.0) for rank in ranks)
        for category in (*OWN_WORK, "sync_exposed")
    }
    start = records[0].start
    pending, strategy = None, formulas.strategy_of(start)
    # A run that never got past the warm-up measured exact sums.
    warm_steps = max(map(count_warm_up_steps, records))
    if warm_steps and not skip_warm_up:
        pending, strategy = strategy, parse(EXACT)
    # Even the last rank waits for the network; the longer waits of other ranks are for that rank.
    last_rank = measure_last_rank(records, skip_warm_up)
    network = last_rank.get("sync_exposed")
    if network is None:
        # No step ends a line on all ranks (joint_pieces), so the last rank of each step is unknown.
        # The rank with the shortest mean wait stands for the last rank.
        network = min(mean_step_seconds(r, skip_warm_up).get("sync_exposed", 0.0) for r in records)
    late_by = max(OWN_WORK, key=lambda name: last_rank.get(name, 0.0) - mean[name])
    # The waits between epochs were subtracted from `mean`, but not from `last_rank`. Without this
    # limit `peers` could be negative.
    network = min(network, mean["sync_exposed"])
    peers = mean["sync_exposed"] - network
    # A script records no optimizer.
    optimizer = OPTIMIZERS.get(str(start.options.get("optimizer")))
    family = optimizer.family if optimizer else None
    # A script, which has no options here, chooses the length of its warm-up itself.
    warm_up_chosen = not start.options or start.options.get("sync_warmup") is not None
    stalls = [line.seconds.get("checkpoint", 0.0) for r in records for line in r.other_lines]
    halves = compare_halves(records, skip_warm_up)
    world = int(start.world_size or len(records))
    bucket: dict[str, Any] = {"bucket": start.bucket_mb * MIB} if start.bucket_mb else {}
    return Step(
        attempt=records[0].attempt,
        nodes=len({record.host for record in records}),
        world=world,
        steps=max(record.step_count for record in records),
        # A rank without a file counts as the mean of the other ranks.
        images=world * statistics.fmean(map(images_per_step, records)),
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
        checkpoint=statistics.fmean(saving_seconds),
        ranks=tuple(ranks),
        between=between,
        rank_work=epoch_waits.worked_alone / min(counts),
        epochs_begun=max(record.epochs_begun for record in records),
        late_by=late_by if last_rank.get(late_by, 0.0) > mean[late_by] else "",
        last_rank=last_rank,
        least_save=min((stall for stall in stalls if stall > 0), default=math.inf),
        measured_steps=min(counts),
        halves=halves.seconds,
        halves_error=halves.error,
        pending=pending,
        warm_steps=warm_steps,
        warm_seconds=measure_warm_up_step(records) if skip_warm_up else 0.0,
        phases=Phases(start.epochs or 1, start.warmup or 0, family or SGD, warm_up_chosen),
        planned_steps=count_planned_steps(start),
        program=program,
        family=family,
    )


def longest_attempt(records: list[RankRecord]) -> list[RankRecord]:
    """Return the records of the attempt in which a rank spent most time in steps. Records with
    fewer than two lines of steps are absent, because measurements omit the first line."""
    stepped = [record for record in records if len(record.steps) > 1]
    seconds: dict[int, float] = {}
    for record in stepped:
        spent = sum(record.steps.total)
        seconds[record.attempt] = max(seconds.get(record.attempt, 0.0), spent)
    longest = max(seconds, key=lambda attempt: seconds[attempt], default=None)
    return [record for record in stepped if record.attempt == longest]


def count_planned_steps(start: RankStart) -> float | None:
    """Return the number of steps of the whole run; None if its epochs are not known."""
    epochs, per_epoch = start.epochs, start.steps_per_epoch
    return epochs * per_epoch if epochs and per_epoch else None


def count_warm_up_steps(record: RankRecord) -> int:
    """Return the number of exact steps with which a compressing strategy begins."""
    columns = record.steps
    return sum(steps for steps, exact in zip(columns.count, columns.exact) if exact)


def has_steps_after_warm_up(records: list[RankRecord]) -> bool:
    """Return True if all ranks have several measured steps after a strategy's warm-up."""
    return all(count_steps(r, measured_lines(r, skip_warm_up=True)) > 1 for r in records)


def measured_lines(record: RankRecord, skip_warm_up: bool) -> list[int]:
    """Return the indices of the lines that measurements use: all but the first line. With
    `skip_warm_up`, measurements also omit the lines of a strategy's exact first steps."""
    exact = record.steps.exact
    return [line for line in range(1, len(exact)) if not (skip_warm_up and exact[line])]


def count_steps(record: RankRecord, lines: list[int]) -> int:
    return sum(record.steps.count[line] for line in lines)


def mean_step_seconds(record: RankRecord, skip_warm_up: bool) -> dict[str, float]:
    """Return the mean seconds of a rank's measured steps (measured_lines), by category."""
    lines = measured_lines(record, skip_warm_up)
    steps = count_steps(record, lines)
    return {
        category: sum(map(values.__getitem__, lines)) / steps
        for category, values in record.steps.seconds.items()
    }


class Halves(NamedTuple):
    seconds: tuple[float, float]  # of the mean step of each half
    error: float  # the standard error of the difference of `seconds`


def compare_halves(records: list[RankRecord], skip_warm_up: bool) -> Halves:
    """Return the mean step in the first and in the second half of the measured steps."""
    # The totals of each half over all ranks, and the standard error of each rank's difference.
    spent, steps, errors = [0.0, 0.0], [0, 0], []
    for record in records:
        lines, columns = measured_lines(record, skip_warm_up), record.steps
        totals = columns.total
        all_steps, steps_before = count_steps(record, lines), 0
        means: tuple[list[float], list[float]] = ([], [])  # of each line, by half
        for line in lines:
            count = columns.count[line]
            # A line of several steps belongs to the half (0 or 1) that contains its middle.
            half = int(2 * steps_before + count > all_steps)
            spent[half] += totals[line]
            steps[half] += count
            steps_before += count
            means[half].append(totals[line] / count)
        # From SETTLED_STEPS on the error decides nothing, so it stays 0.
        if all_steps < SETTLED_STEPS and all(len(half) > 1 for half in means):
            errors.append(math.sqrt(sum(statistics.variance(m) / len(m) for m in means)))
    early, late = (spent[half] / max(1, steps[half]) for half in (0, 1))
    # Ranks wait for each other in the same steps, so their errors are not independent. More ranks
    # therefore do not make the error smaller than the mean of the ranks' errors.
    return Halves((early, late), statistics.fmean(errors) if errors else 0.0)


def measure_warm_up_step(records: list[RankRecord]) -> float:
    """Return the mean seconds of a warm-up step without the first step; 0 if a rank has none."""
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
    """Successive steps of all ranks. `ranks`: for each rank its seconds, in the order of the
    argument `categories` of joint_pieces."""

    steps: float  # how many
    ranks: list[tuple[float, ...]]


def joint_pieces(
    records: list[RankRecord], skip_warm_up: bool, categories: Sequence[str]
) -> Iterator[Piece]:
    """Cut the measured steps into the smallest pieces that end at a line's end on every rank."""
    # Ranks can only be compared over the same steps. A line may cover several steps, and each rank
    # ends its lines itself. Example: if the lines of rank 0 end at steps 2, 4 and 6, and those of
    # rank 1 at 3 and 6, the only piece ends at step 6.
    ends = [{r.steps.step[line] for line in measured_lines(r, skip_warm_up)} for r in records]
    common_ends = set.intersection(*ends) if ends else set()
    pieces: dict[int, list[tuple[float, ...]]] = {}  # by the last step
    for record in records:
        columns, lines = record.steps, measured_lines(record, skip_warm_up)
        steps = [columns.step[line] for line in lines]
        # Indices (in `lines`) of the lines with which pieces end.
        cuts = [cut for cut, step in enumerate(steps) if step in common_ends]
        summed: list[Sequence[float]] = [
            columns.count,
            *map(columns.seconds.__getitem__, categories),
        ]
        # The sum of a piece is the difference of the running sums at both of its ends: at a cut and
        # at the cut before. `map` stops at the last cut. `map` and `accumulate` run in C, which
        # matters for the million lines of a long run.
        sums: list[Iterator[float]] = []
        for column in summed:
            running = [*accumulate(map(column.__getitem__, lines))]
            sums.append(map(sub, map(running.__getitem__, cuts), [0, *(running[c] for c in cuts)]))
        for cut, piece in zip(cuts, zip(*sums)):
            pieces.setdefault(steps[cut], []).append(piece)
    # Each tuple begins with the number of steps; the seconds follow. The first piece may have fewer
    # steps on some ranks, because each rank omits its first line, which may have several steps.
    for ranks in pieces.values():
        yield Piece(max(count for count, *_ in ranks), [piece[1:] for piece in ranks])


class EpochWaits(NamedTuple):
    """Waits for ranks that still work between two epochs."""

    seconds: list[float]  # the wait of each rank
    worked_alone: float  # seconds in which some rank worked between epochs and another did not


def waits_between(records: Sequence[RankRecord], skip_warm_up: bool = False) -> EpochWaits:
    """Return how long each rank waited for ranks that still worked between two epochs."""
    waits, worked_alone = [0.0] * len(records), 0.0
    columns = [record.steps for record in records]
    # The steps before which some rank worked between epochs: it may be any rank.
    ends = {
        step
        for c in columns
        for step, between, exact in zip(c.step, c.between, c.exact)
        if between and not (skip_warm_up and exact)
    }
    for end in ends:
        lines = [(c, bisect_left(c.step, end)) for c in columns]
        # Only work of a second or more ends a line at this step on all ranks.
        if any(line == len(c) or c.step[line] != end for c, line in lines):
            continue
        worked = [c.between[line] for c, line in lines]
        worked_alone += max(worked) - min(worked)
        # A rank waits for the rank that works longest, but no longer than its line recorded.
        for index, (c, line) in enumerate(lines):
            waited = c.seconds["sync_exposed"][line]
            waits[index] += min(waited, max(worked) - worked[index])
    return EpochWaits(waits, worked_alone)


def measure_last_rank(records: list[RankRecord], skip_warm_up: bool) -> dict[str, float]:
    """Return the mean seconds of the last rank of a step, by category; {} without common pieces."""
    # The last rank waits least. `sync_exposed` is the first category, so that `min` finds this rank
    # in each piece. Its seconds of all pieces add up to the time of the steps.
    categories = ["sync_exposed", *OWN_WORK]
    spent, steps = [0.0] * len(categories), 0.0
    for piece in joint_pieces(records, skip_warm_up, categories):
        spent, steps = [*map(add, spent, min(piece.ranks))], steps + piece.steps
    return {name: value / steps for name, value in zip(categories, spent) if steps}


def images_per_step(record: RankRecord) -> float:
    """Return a rank's images in its mean step; 0 if they were not counted."""
    return 0.0 if record.is_uncounted else sum(record.steps.samples) / record.step_count


class TrainingTotals(NamedTuple):
    """Training images of all ranks, and seconds of their steps (mean over ranks)."""

    images: float
    seconds: float


def training_totals(records: Sequence[RankRecord], skipped: int = 0) -> TrainingTotals:
    """Return the totals over all attempts, without the first `skipped` lines of each rank. If a
    rank did not count its images, `images` is 0."""
    images = seconds = 0.0
    for attempt in {record.attempt for record in records}:
        stepped = [r for r in records if r.attempt == attempt and len(r.steps) > skipped]
        if stepped:
            # A rank without a file counts as the mean of the other ranks.
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
    # `make status`, `make top` and the report all show this speed. It omits the first line of each
    # rank and attempt, which also warms up the device, the loader and DDP's buckets.
    total = training_totals(records, skipped=1)
    return total.images / total.seconds if total.images and total.seconds > 0 else None


def machine_speeds(step: Step) -> dict[str, float]:
    """Return the images/s of each machine without its waits for other machines, by the work of its
    slowest rank. Machines without counted images are absent."""
    # Nodes that share a machine slow each other down: none of them has a speed.
    if step.shared_machine:
        return {}
    by_host: dict[str, list[RankWork]] = {}
    for rank in step.ranks:
        by_host.setdefault(rank.host, []).append(rank)
    images = {host: sum(rank.images for rank in ranks) for host, ranks in by_host.items()}
    spent = {host: max(rank.work_seconds for rank in ranks) for host, ranks in by_host.items()}
    return {host: images[host] / spent[host] for host in by_host if images[host] and spent[host]}


def achieved_rate(step: Step, uses: list[NetworkUsage]) -> float | None:
    """Return the bytes per second that the gradients achieved; None if that is unknown."""
    if step.strategy is None or step.network <= 0 or not step.payload.bytes or step.nodes == 1:
        return None
    # Without counters the bytes follow from the strategy.
    sent_bytes = step.computed_bytes if step.bytes_sent is None else step.bytes_sent
    if not sent_bytes:
        return None
    # The wait is only the part of the transfer that backward does not hide.
    rate = sent_bytes / formulas.transfer_of(step.network, step.payload, step.backward)
    # The rate is at most what the link carries. It is at least the most that an interface sent in a
    # recorded second. Interfaces that several nodes share are ignored.
    if step.link_mbit:
        rate = min(rate, formulas.line_rate(step.link_mbit))
    peaks = [use.maximum(SENT) for use in uses if use.shared_by == 1]
    return max([rate, *peaks])


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


class SlowestRank(NamedTuple):
    """The rank with the most work per step, and the median seconds of the other ranks' work."""

    rank: RankWork
    median: float
    location: str  # `node3` if the machine is slow, `node3's device of rank 5` if the device is

    @property
    def delay(self) -> float:
        """Seconds by which the work of this rank exceeds `median`."""
        return self.rank.work_seconds - self.median

    @property
    def is_straggler(self) -> bool:
        return self.rank.work_seconds > SLOWER * self.median


def find_slowest_rank(step: Step) -> SlowestRank:
    """Return the slowest rank. In a run of one rank, `median` is the work of that rank."""
    rank = max(step.ranks, key=lambda rank: rank.work_seconds)
    work = [faster.work_seconds for faster in step.ranks if faster is not rank]
    median = statistics.median(work) if work else rank.work_seconds
    # If another rank of that machine is noticeably faster, the machine is not to blame.
    neighbours = [r.work_seconds for r in step.ranks if r.host == rank.host and r is not rank]
    if neighbours and rank.work_seconds >= NOTICEABLE * min(neighbours):
        return SlowestRank(rank, median, f"{rank.host}'s device of rank {rank.rank}")
    return SlowestRank(rank, median, rank.host)
