"""One training step as it was measured: the figures on which verdict and predictions rest."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import sub

from boundary.run_files import PlannedProgram, RankStart
from contract.options import OPTIMIZERS
from contract.strategies import EXACT, MIB, SGD, Payload, Phases, Strategy, parse
from contract.text import link_speed, seconds, size
from report import formulas
from report.figures import SENT
from report.read import BETWEEN, RankRecord, Run
from report.usage import NetworkUsage
from report.wait_rules import OWN_WORK, WAIT

# A verdict takes so many measured steps, whose halves agree: until then the device, caches and
# connections may be warming up. In SETTLED_STEPS they weigh little, and steps that still change are
# what the run met.
LEAST_STEPS, SETTLED_STEPS = 20, 200
# The halves' mean steps may differ by this part of the shorter one, or by what is chance: so many
# standard errors. Steps that wait for lost packets are far from equal, and change no more for it.
AGREEMENT, CHANCE = 0.15, 2.0
# Of what a part may be of its whole: the two are not read at the same moment.
MOST_OF_WHOLE = 1.02


@dataclass(frozen=True)
class RankWork:
    """Mean seconds per step of one rank, by category, and its images of a step."""

    host: str
    rank: int
    seconds: dict[str, float]
    images: float = 0.0

    @property
    def own(self) -> float:
        """Seconds of a step without waiting for peers."""
        return sum(self.seconds.get(category, 0.0) for category in OWN_WORK)


@dataclass(frozen=True)
class Step:
    """The mean step of the run's longest attempt, in seconds, over its ranks.

    The first step of the attempt is left out, because it also warms up the device, the loader and
    DDP's buckets. So are the exact steps with which a strategy that leaves bits out begins, unless
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
    strategy: Strategy | None  # None: one that this version does not know
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
    # Seconds per step between epochs, with the waits of other ranks for it; and for how long of it
    # some rank worked while another one waited. Neither is part of the step.
    between: float = 0.0
    rank_work: float = 0.0
    epochs_begun: int = 0  # after the first one
    late_by: str = ""  # the category by which the last rank of a step, whichever it is, is last
    # Seconds of the shortest stall for saving, as of the first, which waits for no other's file.
    least_save: float = math.inf
    measured_steps: int = 0  # of which the figures are the mean
    halves: tuple[float, float] = (0.0, 0.0)  # seconds of a step in each half of these
    halves_error: float = 0.0  # the standard error of their difference
    # As the network cards counted; None where that is not known.
    bytes_sent: float | None = None  # per node
    link_mbit: float | None = None
    rate: float | None = None  # bytes per second that the gradients really achieved
    shared_machine: bool = False  # all nodes are one machine: no cable between them
    pending: Strategy | None = None  # where all steps were its warm-up
    warm_steps: int = 0  # how many were
    warm_seconds: float = 0.0  # a step of the warm-up, where others follow it
    phases: Phases = field(default_factory=lambda: Phases(1, 0))  # of the run
    length: float | None = None  # steps that the run was meant to have
    program: PlannedProgram = field(default_factory=PlannedProgram)
    family: str | None = None  # of its optimizer, where that is known
    contradiction: str | None = None  # a figure that cannot be, and was left out

    @property
    def sample(self) -> str:
        return self.program.sample

    @property
    def samples(self) -> str:
        return f"{self.sample}s"

    @property
    def missing_for_verdict(self) -> str:
        """What these steps lack, in a clause; "" where they can be judged."""
        if self.measured_steps < LEAST_STEPS:
            return f"a verdict takes {LEAST_STEPS} steps, and {self.measured_steps} were measured"
        least, most = sorted(self.halves)
        agree = most - least <= max(AGREEMENT * least, CHANCE * self.halves_error)
        if agree or self.measured_steps >= SETTLED_STEPS:
            return ""
        first, second = map(seconds, self.halves)
        return f"its steps still change: {first} each in the first half, {second} in the second"

    @property
    def before_one_pass(self) -> bool:
        """Whether these steps were fewer than one pass over the data has."""
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
        """Seconds of a step with its part of saving and of work between epochs: the total of all
        shares of a step."""
        return self.seconds + self.checkpoint + self.between

    def payload_for(self, strategy: Strategy) -> Payload:
        """The gradients in buckets of this strategy's default size, unless the run had another."""
        used = self.strategy.rule.bucket_mb * MIB if self.strategy else None
        if self.payload.bucket != used:
            return self.payload
        return replace(self.payload, bucket=strategy.rule.bucket_mb * MIB)

    @property
    def one_machine(self) -> bool:
        return self.nodes == 1 or self.shared_machine

    @property
    def gpus(self) -> int:
        """Ranks per machine, taken to be about the same on all."""
        return max(1, round(self.world / self.nodes))

    def wait(self, strategy: Strategy, machines: int, rate: float) -> float:
        """Seconds per step that the ranks of so many such machines wait for the network."""
        payload = self.payload_for(strategy)
        return formulas.sync_wait(strategy, machines, payload, rate, self.backward, self.gpus)

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def measure_step(run: Run, networks: list[NetworkUsage]) -> Step | None:
    """The mean step of the longest attempt; None where no rank finished two steps."""
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
    step = without_contradiction(step, statistics.fmean(r.clock / steps_of(r) for r in records))
    return replace(step, rate=real_rate(step, used))


def without_contradiction(step: Step, loop: float) -> Step:
    """The step without what a card cannot have sent in it. `loop`: seconds of a step with all that
    was beside it, such as evaluation."""
    if step.bytes_sent is None or step.link_mbit is None:
        return step
    least = step.bytes_sent / formulas.line_rate(step.link_mbit)
    if least <= MOST_OF_WHOLE * loop:
        return step
    return replace(
        step,
        bytes_sent=None,
        contradiction=f"By the counters each node sent {size(step.bytes_sent)} per step, which "
        f"takes {seconds(least)} at {link_speed(step.link_mbit)}, and a step took {seconds(loop)} "
        "with all that was beside it: they are wrong, or Tandem is (please tell us), so they are "
        "left out.",
    )


def step_of_ranks(records: list[RankRecord], program: PlannedProgram) -> Step:
    """The mean step by the ranks' own records, without the network cards' counters."""
    later = has_later_steps(records)
    # What ranks wait for another's work between epochs is charged to that, and to no step.
    charged, rank_work = waits_between(records, later)
    counts, between, works = [], 0.0, []
    for record, wait in zip(records, charged):
        places, spent = measured_lines(record, later), steady_seconds(record, later)
        counts.append(count_steps(record, places))
        spent["sync_exposed"] -= wait / counts[-1]
        spent[BETWEEN] = sum(map(record.steps.between.__getitem__, places)) / counts[-1]
        between += (spent[BETWEEN] + wait / counts[-1]) / len(records)
        works.append(RankWork(record.host, record.rank, spent, images_of(record)))
    ranks = tuple(works)
    mean = {
        category: statistics.fmean(rank.seconds.get(category, 0.0) for rank in ranks)
        for category in (*OWN_WORK, "sync_exposed")
    }
    start = records[0].start
    world = int(start.world_size or len(records))
    pending, strategy = None, formulas.strategy_of(start)
    warm = max(map(warm_steps, records))
    if warm and not later:
        pending, strategy = strategy, parse(EXACT)
    network = min(least_wait(records, later), mean["sync_exposed"])
    peers = mean["sync_exposed"] - network
    halves, error = halves_of(records, later)
    return Step(
        attempt=records[0].attempt,
        nodes=len({record.host for record in records}),
        world=world,
        steps=max(map(steps_of, records)),
        # A rank without a file counts as the mean of the others.
        images=world * statistics.fmean(map(images_of, records)),
        payload=formulas.payload_of(start),
        strategy=strategy,
        data=mean["data"],
        h2d=mean["h2d"],
        forward=mean["forward"],
        backward=mean["backward"],
        optimizer=mean["optimizer"],
        other=mean["other"],
        network=network,
        peers=peers,
        checkpoint=statistics.fmean(saved(record) / steps_of(record) for record in records),
        ranks=ranks,
        between=between,
        rank_work=rank_work / min(counts),
        epochs_begun=max(record.epochs_begun for record in records),
        late_by=late_by(records, later) if peers >= WAIT * sum(mean.values()) else "",
        least_save=min(map(least_save, records)),
        measured_steps=min(counts),
        halves=halves,
        halves_error=error,
        pending=pending,
        warm_steps=warm,
        warm_seconds=warm_step(records) if later else 0.0,
        phases=phases_of(start),
        length=length_of(start),
        program=program,
        family=family_of(start),
    )


def saved(record: RankRecord) -> float:
    """Seconds for which saving stalled a rank between its steps: not the wait at its end."""
    ended = record.beside[-1][1] if record.end.mono is not None and record.beside else {}
    return record.seconds.get("checkpoint", 0.0) - ended.get("checkpoint", 0.0)


def least_save(record: RankRecord) -> float:
    """Seconds of a rank's shortest stall for saving; infinite where it saved nothing."""
    stalls = (seconds.get("checkpoint", 0.0) for _, seconds in record.beside)
    return min((stall for stall in stalls if stall > 0), default=math.inf)


def longest_attempt(records: list[RankRecord]) -> list[RankRecord]:
    """The records with at least two steps of the attempt that spent most time in steps."""
    seconds: dict[int, float] = {}
    for record in records:
        if len(record.steps) > 1:
            spent = sum(record.steps.total)
            seconds[record.attempt] = max(seconds.get(record.attempt, 0.0), spent)
    if not seconds:
        return []
    longest = max(seconds, key=lambda attempt: seconds[attempt])
    return [r for r in records if r.attempt == longest and len(r.steps) > 1]


def family_of(start: RankStart) -> str | None:
    """Of its optimizer, where a rank recorded which one it has."""
    optimizer = OPTIMIZERS.get(str(start.options.get("optimizer")))
    return optimizer.family if optimizer else None


def phases_of(start: RankStart) -> Phases:
    """Of a run. A script chooses its exact steps itself, and its optimizer is not known."""
    family = family_of(start) or SGD
    chosen = not start.options or start.options.get("sync_warmup") is not None
    return Phases(start.epochs or 1, start.warmup or 0, family, chosen)


def steps_of(record: RankRecord) -> int:
    """The number of a rank's steps."""
    return sum(record.steps.count)


def warm_steps(record: RankRecord) -> int:
    """The number of a rank's exact steps, with which a strategy that leaves bits out begins."""
    columns = record.steps
    return sum(steps for steps, exact in zip(columns.count, columns.exact) if exact)


def has_later_steps(records: list[RankRecord]) -> bool:
    """Whether all ranks have steps after a warm-up, the first of all left out."""
    return all(count_steps(record, measured_lines(record, later=True)) > 1 for record in records)


def measured_lines(record: RankRecord, later: bool) -> list[int]:
    """Indices of the lines that count: not that of the first step, and with `later` none of the
    warm-up."""
    exact = record.steps.exact
    return [place for place in range(1, len(exact)) if not (later and exact[place])]


def count_steps(record: RankRecord, places: list[int]) -> int:
    """The number of steps in these lines."""
    return sum(record.steps.count[place] for place in places)


def steady_seconds(record: RankRecord, later: bool) -> dict[str, float]:
    """Mean seconds by category of the steps that count."""
    places = measured_lines(record, later)
    steps = count_steps(record, places)
    return {
        category: sum(map(values.__getitem__, places)) / steps
        for category, values in record.steps.seconds.items()
    }


def halves_of(records: list[RankRecord], later: bool) -> tuple[tuple[float, float], float]:
    """Mean seconds of a step in the first and in the second half of the steps that count, and the
    standard error of their difference, 0 where so many decide nothing; a line belongs to the half
    in which its middle lies."""
    spent, steps, errors = [0.0, 0.0], [0, 0], []
    for record in records:
        places, lines = measured_lines(record, later), record.steps
        whole, passed, total = count_steps(record, places), 0, lines.total
        each: tuple[list[float], list[float]] = ([], [])  # of a line the mean step
        for place in places:
            half = int(2 * passed + lines.count[place] > whole)
            spent[half] += total[place]
            steps[half] += lines.count[place]
            passed += lines.count[place]
            each[half].append(total[place] / lines.count[place])
        if whole < SETTLED_STEPS and all(len(some) > 1 for some in each):
            errors.append(math.sqrt(sum(statistics.variance(s) / len(s) for s in each)))
    first, second = (spent[half] / max(1, steps[half]) for half in (0, 1))
    # The mean, not less for many ranks: they wait for each other in the same steps.
    return (first, second), statistics.fmean(errors) if errors else 0.0


def warm_step(records: list[RankRecord]) -> float:
    """Mean seconds of an exact step, the first of all left out; 0 where there is none."""
    seconds = steps = 0.0
    for record in records:
        columns = record.steps
        places = [place for place in range(1, len(columns)) if columns.exact[place]]
        if not places:
            return 0.0
        steps += count_steps(record, places)
        seconds += sum(sum(map(values.__getitem__, places)) for values in columns.seconds.values())
    return seconds / steps


def length_of(start: RankStart) -> float | None:
    """Steps that the run was meant to have; None where its epochs are not known."""
    epochs, each = start.epochs, start.steps_per_epoch
    return epochs * each if epochs and each else None


def joint_lines(
    records: list[RankRecord], later: bool, names: Sequence[str]
) -> Iterator[tuple[float, list[tuple[float, ...]]]]:
    """The steps that count, in pieces that end where lines of all ranks do: a line is of several
    steps. Of each piece the number of steps, and each rank's seconds in the categories `names`."""
    ends = [{r.steps.step[place] for place in measured_lines(r, later)} for r in records]
    common = set.intersection(*ends) if ends else set()
    pieces: dict[int, list[tuple[float, ...]]] = {}
    for record in records:
        columns, places = record.steps, measured_lines(record, later)
        steps = [columns.step[place] for place in places]
        cuts = [cut for cut, step in enumerate(steps) if step in common]
        wanted: list[Sequence[float]] = [columns.count, *map(columns.seconds.__getitem__, names)]
        sums: list[Iterator[float]] = []
        for column in wanted:
            whole = [*accumulate(map(column.__getitem__, places))]
            sums.append(map(sub, map(whole.__getitem__, cuts), [0, *(whole[c] for c in cuts)]))
        for cut, piece in zip(cuts, zip(*sums)):
            pieces.setdefault(steps[cut], []).append(piece)
    for ranks in pieces.values():
        yield max(count for count, *_ in ranks), [piece[1:] for piece in ranks]


def least_wait(records: list[RankRecord], later: bool) -> float:
    """Mean over the steps that count of the least `sync_exposed` among the ranks."""
    least = steps = 0.0
    for count, waits in joint_lines(records, later, ["sync_exposed"]):
        least, steps = least + min(waits)[0], steps + count
    if not steps:  # ranks that never ended a line together
        return min(steady_seconds(record, later).get("sync_exposed", 0.0) for record in records)
    return least / steps


def waits_between(records: Sequence[RankRecord], later: bool = False) -> tuple[list[float], float]:
    """Return the seconds that each rank waited for others which still worked between two epochs,
    and the seconds in which some rank worked there and another one did not."""
    waits, worked_alone = [0.0] * len(records), 0.0
    columns = [record.steps for record in records]
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
        for place, (c, line) in enumerate(lines):
            waited = c.seconds["sync_exposed"][line]
            waits[place] += min(waited, max(worked) - worked[place])
    return waits, worked_alone


def late_by(records: list[RankRecord], later: bool) -> str:
    """The category of own work by which the rank that waits least for the others, be it this one or
    that, exceeds the mean of all; "" where no lines end together."""
    excess = dict.fromkeys(OWN_WORK, 0.0)
    for _, ranks in joint_lines(records, later, ["sync_exposed", *OWN_WORK]):
        last, means = min(ranks), [sum(column) / len(ranks) for column in zip(*ranks)]
        for name, own, mean in zip(OWN_WORK, last[1:], means[1:]):
            excess[name] += own - mean
    most = max(excess, key=lambda name: excess[name])
    return most if excess[most] > 0 else ""


def images_of(record: RankRecord) -> float:
    """A rank's images in its mean step; 0 where they were not counted."""
    return 0.0 if record.is_uncounted else sum(record.steps.samples) / steps_of(record)


def training_totals(records: Sequence[RankRecord], first: int = 0) -> tuple[float, float]:
    """Training images of all ranks, and seconds of their steps (mean over ranks), over all
    attempts; the lines of each rank and attempt from the `first` on. A rank without a file counts
    as the mean of the others. No images where a rank did not count them."""
    images = seconds = 0.0
    for attempt in {record.attempt for record in records}:
        own = [r for r in records if r.attempt == attempt and len(r.steps) > first]
        if own:
            world = max(len(own), int(own[0].start.world_size or 0))
            images += world * statistics.fmean(sum(record.steps.samples[first:]) for record in own)
            seconds += statistics.fmean(sum(record.steps.total[first:]) for record in own)
            seconds -= statistics.fmean(waits_between(own)[0])
    return (0.0 if any(record.is_uncounted for record in records) else images), seconds


def unsummed_steps(records: Sequence[RankRecord]) -> int:
    """The steps in a row, at most, whose gradients no rank got from another."""
    return max((record.unsummed for record in records), default=0)


def images_per_second(records: Sequence[RankRecord]) -> float | None:
    """Training images of all ranks over the time of their steps, a strategy's warm-up included. The
    first line of each rank and attempt is left out: its step also warms up the device, the loader
    and DDP's buckets. None without other lines. Every speed that is shown is this one."""
    images, seconds = training_totals(records, first=1)
    return images / seconds if images and seconds > 0 else None


def own_speeds(step: Step) -> dict[str, float]:
    """Images/s of each machine by itself, without any waiting for others: those of its ranks in the
    time of its slowest one. None for nodes that share a machine."""
    if step.shared_machine:
        return {}
    ranks: dict[str, list[RankWork]] = {}
    for rank in step.ranks:
        ranks.setdefault(rank.host, []).append(rank)
    images = {host: sum(rank.images for rank in own) for host, own in ranks.items()}
    spent = {host: max(rank.own for rank in own) for host, own in ranks.items()}
    return {host: images[host] / spent[host] for host in ranks if images[host] and spent[host]}


def real_rate(step: Step, used: list[NetworkUsage]) -> float | None:
    """Bytes per second that the gradients achieved, by what a step waited (formulas.transfer_of).

    Never more than the card can do, and never less than the card was seen to send in one second.
    """
    if step.strategy is None or step.network <= 0 or not step.payload.bytes or step.nodes == 1:
        return None
    moved = step.bytes_sent
    if moved is None:
        moved = step.strategy.bytes_per_step(step.nodes, step.payload, step.gpus)
    if not moved:
        return None
    rate = moved / formulas.transfer_of(step.network, step.payload, step.backward)
    if step.link_mbit:
        rate = min(rate, formulas.line_rate(step.link_mbit))
    peaks = [use.most(SENT) for use in used if use.shared_by == 1]
    return max([rate, *peaks])


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def slow_place(step: Step, last: RankWork) -> str:
    """Name what is slow where this rank is: its machine, or, where another rank of that machine is
    not as slow, its own device there."""
    beside = [rank.own for rank in step.ranks if rank.host == last.host and rank is not last]
    if beside and last.own >= 1.1 * min(beside):
        return f"{last.host}'s device of rank {last.rank}"
    return last.host


def slowest(step: Step) -> tuple[RankWork, float]:
    """The rank with the most own work per step, and the median of the other ranks' own work."""
    last = max(step.ranks, key=lambda rank: rank.own)
    others = [rank.own for rank in step.ranks if rank is not last]
    return last, statistics.median(others) if others else last.own
