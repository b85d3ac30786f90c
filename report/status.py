"""Describe the progress of a running run for `make status`, `make top` and the launcher.

A Follower reads the run's folder and returns a Progress; `section_of` puts a Progress into words.
The figures come from the same records and functions as the figures of the report.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from boundary.run_files import MachineLine, PlannedProgram
from boundary.schema import convert_what_fits
from contract.errors import UserError
from contract.text import percent, seconds, three_digits
from report import figures, hang, measure
from report.bottleneck import step_shares
from report.coverage import PROCESSORS, STEPS, Candidate, Coverage, coverage_sentence, split
from report.figures import DISK, FIGURES, GPU, INTERFACE, MACHINE, Figure, Interval, Thing
from report.files import Entry, time_of
from report.hang import Hang, Standing
from report.progress import Epoch, learning_curve, seconds_left, steps_of_run
from report.read import Machine, RankRecord, Reader, first_start
from report.verdict import (
    READ_FROM_DISK,
    UNTIMED,
    describe_missing_gradients,
    describe_unsummed_steps,
    step_words,
    wait_words,
)
from report.view import Column, Item, Paragraph, Section, table, top1
from report.wait_rules import RANK_WAITS, WORDS, find_cause, most_in_excess

# The present state of a run is that of its last RECENT seconds, or of its last measure.LEAST_STEPS
# steps if these steps took longer. A fault that began a minute ago then shows without older steps.
RECENT = 40.0
MACHINE_SECONDS = 5.0  # a machine's present state is that of its last seconds
STALE = 10.0  # seconds without a line after which a machine is called silent


@dataclass(frozen=True)
class MachineNow:
    """A machine in the last seconds. `figures` has the values of the busiest disk, and for each
    figure of GPUs the largest value. Unknown figures are absent."""

    host: str
    age: float  # seconds since its last record
    step: int | None
    figures: Mapping[Figure, float] = field(default_factory=dict)
    gpus: Mapping[str, Mapping[Figure, float]] = field(default_factory=dict)  # by their indices
    isolated: list[int] = field(default_factory=list)  # ranks that connected to no other rank
    # Bytes that its ranks received, if they sent nothing of that size.
    only_received: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The bottleneck of a running run."""

    step: measure.Step
    recent: bool  # True if `step` is the mean of the last steps, False if of all steps
    kind: str | None  # the result of find_cause; None for several causes
    # The rank for which the other ranks wait, and the category of work that makes it late.
    slower: int | None = None
    work: str | None = None
    queued: float = 0.0  # fraction of the time in which threads want a processor and have none
    coverage: Coverage = field(default_factory=dict)

    @property
    def cause(self) -> str | None:
        # If a rank is late because its images are, the wait for that rank is a wait for images.
        return "data" if self.kind == "straggler" and self.work == "data" else self.kind

    @property
    def runner_up(self) -> Candidate | None:
        """The largest wait that `kind` does not explain; None if no other wait takes any time."""
        # A rank that is late by its images makes other ranks wait: both waits have one cause.
        explained = {"compute", self.kind, *(("straggler",) if self.cause == "data" else ())}
        # Crowded processors within one machine make ranks wait for each other, too.
        if self.kind == "cpu_oversubscribed" and self.step.one_machine:
            explained.update(RANK_WAITS)
        shares = {name: s for name, s in step_shares(self.step).items() if name not in explained}
        second = Candidate(*max(shares.items(), key=lambda item: item[1]))
        return second if second.fraction else None


@dataclass(frozen=True)
class Progress:
    """The present state of a run. Times are in seconds; None: not known yet. `make status JSON=1`
    prints these fields, except `judgement` and `machines`."""

    attempt: int
    unix: float  # when the newest record arrived, by this machine's clock
    epoch: int | None  # the current epoch, from 1
    epochs: int | None  # of the whole run, like `steps`
    step: int | None  # the newest step of any rank
    steps: int | None
    images_per_second: float | None  # of the run, as in its report
    recent_images_per_second: float | None
    left: float | None  # seconds until the end
    loss: float | None
    top1: float | None
    evaluated: Epoch | None  # the newest evaluated epoch
    judgement: Judgement | None  # None: too early, because of `missing_for_verdict`
    missing_for_verdict: str
    hang: Hang | None  # None while ranks make steps
    machines: list[MachineNow]
    stands: Sequence[Standing] = ()  # places of silent ranks; empty while ranks make steps
    silent: Mapping[str, str] = field(default_factory=dict)  # `stands` as sentences
    finished: Sequence[tuple[str, int]] = ()  # host and rank of each rank that exited with code 0
    leaving: bool = False  # a rank has ended its records
    unsummed: int = 0  # the most steps in a row whose gradients DDP did not sum
    samples: str = "images"  # the program's word for what it trains on
    untimed: bool = False  # nobody timed the steps of this script, at least so far

    @property
    def cause(self) -> str | None:
        return self.judgement.cause if self.judgement else None

    @property
    def from_memory(self) -> bool:
        """True if the run reads its data from memory, and may have to read other data from disks
        later: the first pass over the data has not ended."""
        before_one_pass = (self.step or 0) * (self.epochs or 1) < (self.steps or 0)
        rates = (machine.figures.get(figures.DISK_READ, 0.0) for machine in self.machines)
        return before_one_pass and max(rates, default=0.0) <= READ_FROM_DISK


class Follower:
    """Reads a run's folder repeatedly, each time only the new lines."""

    def __init__(self, folder: Path):
        self._reader = Reader(folder)
        self.machines: Mapping[str, Machine] = {}  # at the last look

    def look(self) -> Progress | None:
        """Return the present progress; None if nothing is recorded."""
        try:
            run = self._reader.read(recent=True)
        except UserError:
            return None
        self.machines = run.machines
        # Only the newest attempt counts, even if it has just begun.
        attempt = max([*(r.attempt for r in run.ranks), *(e.attempt for e in run.attempts)] or [1])
        records = run.ranks_in(attempt)
        if not run.machines and not records:
            return None
        start = first_start(records)
        stepped = [record for record in records if len(record.steps)]
        step = max((record.steps.step[-1] for record in stepped), default=None)
        epochs, steps = start.epochs, steps_of_run(start)
        # A hang and a bottleneck can only be judged with the records of all ranks.
        is_complete = len(records) >= (start.world_size or len(records))
        now = time.time()
        is_script = not run.program.times_steps
        silent_ranks = hang.standings(run.machines.values(), attempt)
        # The size of the world is in the ranks' records, else in the attempt's, else in the plan.
        sizes = [entry.world_size for entry in run.attempts if entry.attempt == attempt]
        known_sizes = [start.world_size, *sizes, run.plan.world_size]
        world_size = next((size for size in known_sizes if size), 0)
        missed_sum = hang.find_missed_sum(silent_ranks, world_size)
        found_hang = hang.find_hang(records, run.machines, now, missed_sum) if is_complete else None
        # If a rank has been silent for long, its last recorded RECENT seconds are in the past. A
        # rank with long steps may be silent for two steps.
        is_current = all(
            hang.silence(record, now) <= min(RECENT, max(STALE, 2 * hang.median_step(record)))
            for record in stepped
        )
        # The newest line of each machine lists its ranks that exited with code 0.
        newest_lines = {host: m.recent[-1] for host, m in run.machines.items() if m.recent}
        finished = [
            (host, rank)
            for host, line in newest_lines.items()
            if line.get("attempt") == attempt
            for rank in convert_what_fits(line, MachineLine).finished
        ]
        judgement, missing = None, ""
        if is_complete:
            queued = most_queued(run.machines.values())
            judgement, missing = judge(records, queued, run.on_one_machine, run.program)
        if judgement:
            lines = {host: machine.recent for host, machine in run.machines.items()}
            # These machines recorded the processor times of their ranks.
            timed = {host for host in lines if any(figures.sample_of(e).ranks for e in lines[host])}
            ranks = {r.rank for r in records}
            processors = split(ranks, {r.rank for r in records if r.host in timed})
            coverage = {STEPS: split(ranks, ranks), PROCESSORS: processors}
            judgement = replace(judgement, coverage=coverage)
        # The last recorded steps of a silent rank do not show what the run does now.
        if judgement and not is_current:
            judgement = replace(judgement, recent=False)
        recent = [record.cut_to_last(RECENT) for record in records]
        recent_speed = measure.images_per_second(recent) if is_current else None
        # While ranks make steps, or evaluate or save, a silent rank is no trouble.
        is_at_long_work = any(record.stall.category in hang.LONG for record in records)
        if stepped and (is_current or is_at_long_work) and not (found_hang or finished):
            silent_ranks = []
        return Progress(
            attempt=attempt,
            unix=run.unix or time.time(),
            # Records count epochs from 0, people from 1. Without an epoch, -1 + 1 gives None.
            epoch=max((r.epoch for r in stepped if r.epoch is not None), default=-1) + 1 or None,
            epochs=int(epochs) if epochs else None,
            step=step,
            steps=steps,
            images_per_second=measure.images_per_second(run.ranks),
            recent_images_per_second=0.0 if found_hang else recent_speed,
            left=None if found_hang or finished else seconds_left(stepped, step, steps),
            loss=measure.mean_or_none([record.loss for record in records]),
            top1=measure.mean_or_none([record.top1 for record in records]),
            evaluated=next(reversed(learning_curve(run, newest_only=True)), None),
            judgement=judgement,
            missing_for_verdict=missing,
            hang=found_hang,
            machines=[
                machine_now(run.machines[host], [r for r in stepped if r.host == host])
                for host in run.hosts
                if host in run.machines
            ],
            stands=silent_ranks,
            silent=hang.describe_silent_ranks(silent_ranks, world_size, is_script),
            finished=finished,
            leaving=any(record.end for record in records),
            unsummed=measure.unsummed_steps(records),
            samples=run.samples,
            untimed=run.untimed,
        )


def judge(
    records: list[RankRecord], queued: float, one_pc: bool, program: PlannedProgram
) -> tuple[Judgement | None, str]:
    """Return the bottleneck and "", or None and what the steps lack for a verdict. `queued`: the
    result of `most_queued`. `one_pc`: True if all ranks are on one PC."""
    missing = ""
    recent = [record.cut_to_last(RECENT, measure.LEAST_STEPS) for record in records]
    # All steps are only judged if the recent steps are too few or still change. Measurements omit a
    # rank's first line, so each rank needs two lines.
    for judged in (recent, records):
        if not judged or any(len(record.steps) < 2 for record in judged):
            continue
        step = replace(measure.step_of_ranks(judged, program), shared_machine=one_pc)
        missing = step.missing_for_verdict
        if missing:
            continue
        slowest = measure.find_slowest_rank(step)
        rank = slowest.rank
        slower: int | None = None
        work: str | None = None
        if slowest.is_straggler:
            slower = rank.rank
            work = most_in_excess(rank.seconds, [other.seconds for other in step.ranks])
        kind = find_cause(step_shares(step), slower is not None, step.late_by, queued > 0, one_pc)
        judgement = Judgement(
            step=step, recent=judged is recent, kind=kind, slower=slower, work=work, queued=queued
        )
        return judgement, ""
    return None, missing


def machine_now(machine: Machine, records: Sequence[RankRecord] = ()) -> MachineNow:
    """Return the state of a machine in its last MACHINE_SECONDS, from two of its lines. `records`:
    of its ranks."""
    # Without any valid line, a blank line makes all figures unknown.
    lines = [line for line in machine.recent if time_of(line.get("mono")) is not None] or [{}]
    times = [time_of(line.get("mono")) or 0.0 for line in lines]
    # The interval ends at the newest line. It begins at the last line that is MACHINE_SECONDS
    # older, or at the first line if no line is that old.
    older = [line for line, mono in zip(lines, times) if times[-1] - mono >= MACHINE_SECONDS]
    newest = lines[-1]
    values: dict[str, dict[str, dict[Figure, float]]] = {kind: {} for kind in FIGURES}
    for thing, interval in intervals_between(older[-1] if older else lines[0], newest):
        read = {figure: figure.value(interval) for figure in FIGURES[thing.kind]}
        values[thing.kind][thing.name] = {f: v for f, v in read.items() if v is not None}
    # The name of the machine itself, and of its only interface, is "".
    shown = {**values[MACHINE].get("", {}), **values[INTERFACE].get("", {})}
    if isinstance(newest.get("disks"), dict):
        # The recorder omits a disk without any requests, so no disk means that all disks are idle.
        busy = figures.DISK_BUSY
        idle = {busy: 0.0, figures.DISK_READ: 0.0}
        disks: list[dict[Figure, float]] = [*values[DISK].values(), idle]
        busiest = max(disks, key=lambda disk: disk.get(busy, 0.0))
        shown.update(busiest)
    # A row has one cell for all GPUs of a machine.
    for gpu in values[GPU].values():
        shown |= {figure: max(value, shown.get(figure, value)) for figure, value in gpu.items()}
    notes = convert_what_fits(newest, MachineLine)
    return MachineNow(
        host=machine.host,
        age=max(0.0, time.time() - machine.unix),
        step=max((record.steps.step[-1] for record in records), default=None),
        figures=shown,
        gpus=values[GPU],
        isolated=notes.alone,
        only_received=notes.only_received,
    )


def machine_document(machine: MachineNow) -> dict[str, Any]:
    """Return the machine for `make status JSON=1`: figures by name, null if unknown."""
    kinds = (MACHINE, DISK, INTERFACE)
    shown = [figure for kind in kinds for figure in FIGURES[kind] if figure.status]
    return {
        **{name: getattr(machine, name) for name in ("host", "age", "step")},
        **values_by_name(shown, machine.figures),
        "alone": machine.isolated,
        "only_received": machine.only_received,
        "gpus": [
            {"index": int(index), **values_by_name(FIGURES[GPU], gpu)}
            for index, gpu in machine.gpus.items()
        ],
    }


def values_by_name(
    shown: Sequence[Figure], values: Mapping[Figure, float]
) -> dict[str, float | None]:
    return {f.name: values[f] * f.unit.json if f in values else None for f in shown}


def intervals_between(start: Entry, end: Entry) -> Iterator[tuple[Thing, Interval]]:
    """Yield the interval between two lines of a machine for each thing. If both are the same line,
    the intervals have no start, so that no counter has a growth."""
    passed = (time_of(end.get("mono")) or 0.0) - (time_of(start.get("mono")) or 0.0)
    earlier = figures.sample_of(start) if passed > 0 else None
    return figures.intervals(earlier, figures.sample_of(end), passed or 1.0)


def most_queued(machines: Iterable[Machine]) -> float:
    """Return the largest `queued` of machines with oversubscribed processors; 0 without any."""
    largest = 0.0
    for machine in machines:
        # A machine records a line each second, so these are the lines of RECENT seconds. A blank
        # line stands for a machine without lines.
        lines = [line for line in machine.recent if line.get("ranks")][-int(RECENT) :] or [{}]
        # Each line has figures of the machine itself.
        interval = dict(intervals_between(lines[0], lines[-1]))[figures.THE_MACHINE]
        busy, queued = (f.value(interval) or 0.0 for f in (figures.CPU, figures.QUEUED))
        if figures.is_oversubscribed(busy, queued):
            largest = max(largest, queued)
    return largest


def section_of(progress: Progress, running: bool) -> Section:
    """Show progress, bottleneck and machines of a run. If the run has ended (not `running`), omit
    figures that are only true now."""
    # The first line: `epoch 2 of 90, step 1,200 of 45,000 (2.7 %), 3 h to go`, as far as known.
    course = []
    if progress.epoch is not None:
        total = f" of {progress.epochs}" if progress.epochs else ""
        course.append(f"epoch {progress.epoch}{total}")
    if progress.step is not None and progress.steps:
        share = 100 * progress.step / progress.steps
        course.append(f"step {progress.step:,} of {progress.steps:,} ({share:.1f} %)")
    elif progress.step is not None:
        course.append(f"step {progress.step:,}")
    if progress.left is not None and running:
        course.append(f"{seconds(progress.left)} to go")
    # The second line: `412 images/s (last 40 s: 398), loss 1.2345, top-1 71.20 % after epoch 2`.
    results = []
    if progress.images_per_second:
        recent, recent_words = progress.recent_images_per_second, ""
        if recent is not None and running:
            recent_words = f" (last {RECENT:.0f} s: {three_digits(recent)})"
        speed = three_digits(progress.images_per_second)
        results.append(f"{speed} {progress.samples}/s{recent_words}")
    results += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
    scores = progress.evaluated
    if scores and scores.top1 is not None:
        results.append(f"top-1 {top1(scores.top1)}{scores.part} after epoch {scores.epoch}")
    elif progress.top1 is not None:
        results.append(f"top-1 {top1(progress.top1)} of the images trained on")
    lines = [", ".join(words) for words in (course, results) if words]
    lines.append(describe_bottleneck(progress, running))
    if (judgement := progress.judgement) and not (progress.hang and running):
        second = judgement.runner_up
        sentences = [second.sentence(progress.samples)] if second else []
        # The verdict on a running run uses all signals of its coverage.
        sentences.append(coverage_sentence(judgement.coverage, used=judgement.coverage))
        lines.append(" ".join(sentences))
    lines += [describe_unsummed_steps(progress.unsummed)] if progress.unsummed else []
    lines += [hang.finished_text(progress.finished)] if progress.finished and running else []
    lines += progress.silent.values() if running else []
    machines = machines_of(progress.machines, running)
    return Section("", [*map(Paragraph, lines), *machines])


def describe_bottleneck(progress: Progress, running: bool = True) -> str:
    """Write the hang, else the bottleneck, else what is missing for a diagnosis."""
    if progress.hang is not None and running:
        return progress.hang.sentence
    judgement = progress.judgement
    # Ranks that never timed a step can only be judged by their silence.
    if judgement is None and progress.stands and running:
        silent = min(standing.seconds for standing in progress.stands)
        # If a rank counts its sums, its silence is the time without a sum, whatever it prints.
        counts_sums = any(standing.sums is not None for standing in progress.stands)
        action = "entered a sum" if counts_sums else "timed a step or printed anything"
        return f"no rank has {action} for {seconds(silent)}"
    # While a script runs, it may still begin to time its steps.
    if judgement is None and progress.untimed and not running:
        return f"{UNTIMED.headline[:1].lower()}{UNTIMED.headline[1:]}".rstrip(".")
    if judgement is None:
        early = "too early to judge" if running else "too short to judge"
        missing = "no step was timed yet" if progress.untimed else progress.missing_for_verdict
        return ": ".join(filter(None, (early, missing)))
    step, kind = judgement.step, judgement.kind
    period = "now" if judgement.recent and running else "so far" if running else "at its end"
    if progress.from_memory and judgement.cause != "data":
        period += ", from memory"  # data in memory hides a slow disk
    if kind in WORDS:
        rank = judgement.slower if kind == "straggler" else None
        slow = "" if rank is None else f", rank {rank}"
        late = f", measured by its {progress.samples}" if judgement.cause != kind else ""
        wait = WORDS[kind].format(progress.samples)
        return f"{period}: {wait}: {wait_words(step, kind)}{slow}{late}"
    if kind == "compute":
        return f"{period}: computing, as it should be: {wait_words(step, kind)}"
    if kind == "cpu_oversubscribed":
        share = f"{percent(judgement.queued)} of the time in which they want it"
        return f"{period}: oversubscribed processors: threads wait for a processor {share}"
    return f"{period}: no single bottleneck in {step_words(step)}"


def machines_of(machines: list[MachineNow], running: bool) -> list[Item]:
    """Show a row of figures for each machine, and its warnings."""
    columns = [Column("machine", lambda machine: machine.host)]
    if any(machine.step is not None for machine in machines):
        columns.append(Column("step", lambda m: "-" if m.step is None else f"{m.step}"))

    def cell(figure: Figure, machine: MachineNow) -> str:
        value = machine.figures.get(figure)
        return "-" if value is None else figure.unit.cell(value)

    # Many machines have no GPU or sensor, so a column is only shown if some machine recorded it.
    recorded = {figure for machine in machines for figure in machine.figures}
    columns += [Column(f.status, partial(cell, f)) for f in IN_STATUS if f in recorded]
    # The last figures of a silent machine would look like present figures.
    rows = [
        MachineNow(host=machine.host, age=machine.age, step=machine.step)
        if running and machine.age > STALE
        else machine
        for machine in machines
    ]
    problems = [
        Paragraph(f"{machine.host}: {warning}")
        for machine in machines
        for warning in warnings(machine, running)
    ]
    return [table("Machines", columns, rows, names=1), *problems]


# The figures with a column. A narrow terminal omits the last columns.
IN_STATUS = sorted(
    (f for kind in (MACHINE, DISK, INTERFACE, GPU) for f in FIGURES[kind] if f.status),
    key=lambda figure: figure.priority,
)


def warnings(machine: MachineNow, running: bool = True) -> list[str]:
    """Return short sentences on the problems of a machine. `running`: False after the end of the
    run, when its machines may be silent."""
    problems = []
    if running and machine.age > STALE:
        problems.append(f"silent for {seconds(machine.age)}")
    # Isolated ranks are a mistake in the script: each of them trains a separate model.
    if running and machine.isolated:
        ranks = ", ".join(map(str, machine.isolated[:5]))
        plural = "s" * (len(machine.isolated) > 1)
        problems.append(
            f"rank{plural} {ranks} never connected to other ranks: the script made no process group"
        )
    if running and machine.only_received:
        problems.append(describe_missing_gradients(machine.only_received))
    sentences = (figure.warning(machine.figures) for figure in IN_STATUS)
    return problems + [sentence for sentence in sentences if sentence]
