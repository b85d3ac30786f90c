"""The progress of a running run, and its words: what `make status` and `make top` show.

Figures come from the same records and functions as those of the report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from boundary.run_files import MachineLine, PlannedProgram, RankStart
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
from report.read import Machine, RankRecord, Reader
from report.verdict import READ_FROM_DISK, not_summed, only_received, step_words, wait_words
from report.view import Column, Item, Paragraph, Section, table, top1
from report.wait_rules import WORDS, find_cause, most_in_excess

# The present state of a run is that of its last seconds, or of its last LEAST_STEPS if they took
# longer. A fault that began a minute ago then shows without any older steps.
RECENT = 40.0
NOW = 5.0  # seconds; the present state of a machine
STALE = 10.0  # seconds without a line after which a machine is called silent


@dataclass(frozen=True)
class MachineNow:
    """A machine in the last seconds. Figures are those of the busiest disk, and the largest of its
    GPUs; unknown ones are absent."""

    host: str
    age: float  # seconds since its last record
    step: int | None
    figures: Mapping[Figure, float] = field(default_factory=dict)
    gpus: Mapping[str, Mapping[Figure, float]] = field(default_factory=dict)  # by their indices
    isolated: list[int] = field(default_factory=list)  # a script's ranks that connected to no other
    only_received: float | None = None  # bytes, if its ranks sent the others nothing of that size


@dataclass(frozen=True)
class Judgement:
    """The bottleneck of a running run."""

    step: measure.Step
    recent: bool  # by the last steps; else by all steps
    kind: str | None  # a wait of wait_rules.py, `compute`, or None for several causes
    # The rank that the others wait for, and the category of work by which it is late.
    slower: int | None = None
    work: str | None = None
    queued: float = 0.0  # fraction of the time in which threads want a processor and have none
    coverage: Coverage = field(default_factory=dict)

    @property
    def cause(self) -> str | None:
        # Waiting for a rank that is late by its images is waiting for images.
        return "data" if self.kind == "straggler" and self.work == "data" else self.kind

    @property
    def runner_up(self) -> Candidate | None:
        """The largest other wait."""
        explained = {"compute", self.kind, *(("straggler",) if self.cause == "data" else ())}
        shares = [item for item in step_shares(self.step).items() if item[0] not in explained]
        second = Candidate(*max(shares, key=lambda item: item[1]))
        return second if second.fraction else None


@dataclass(frozen=True)
class Progress:
    """The present state of a run. Times are in seconds; None: not known yet. `make status JSON=1`
    prints these fields, except `judgement` and `machines`."""

    attempt: int
    unix: float  # when the newest record arrived
    epoch: int | None  # the current one, from 1
    epochs: int | None
    step: int | None
    steps: int | None
    images_per_second: float | None  # of the run, as in its report
    recent_images_per_second: float | None
    left: float | None  # until the end
    loss: float | None
    top1: float | None
    evaluated: Epoch | None  # the newest
    judgement: Judgement | None  # None: too early, because of `missing_for_verdict`
    missing_for_verdict: str
    hang: Hang | None  # None while steps come
    machines: list[MachineNow]
    stands: Sequence[Standing] = ()  # places of silent ranks, unless steps come
    silent: Mapping[str, str] = field(default_factory=dict)  # the same in sentences
    finished: Sequence[tuple[str, int]] = ()  # host and rank of those that exited with code 0
    leaving: bool = False  # a rank has ended its records
    unsummed: int = 0  # the most steps in a row whose gradients DDP did not sum
    samples: str = "images"  # the program's word for them

    @property
    def cause(self) -> str | None:
        return self.judgement.cause if self.judgement else None

    @property
    def from_memory(self) -> bool:
        """True if the run has not read all of its data once, and reads little of it from disks."""
        before_one_pass = (self.step or 0) * (self.epochs or 1) < (self.steps or 0)
        rates = (machine.figures.get(figures.DISK_READ, 0.0) for machine in self.machines)
        return before_one_pass and max(rates, default=0.0) <= READ_FROM_DISK


class Follower:
    """Reads a run's folder repeatedly; each time only what is new."""

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
        # A run that begins its next attempt is judged by that one only.
        attempt = max([*(r.attempt for r in run.ranks), *(e.attempt for e in run.attempts)] or [1])
        records = [record for record in run.ranks if record.attempt == attempt]
        if not run.machines and not records:
            return None
        start = next((record.start for record in records if record.start), RankStart())
        stepped = [record for record in records if len(record.steps)]
        step = max((record.steps.step[-1] for record in stepped), default=None)
        epochs, steps = start.epochs, steps_of_run(start)
        # A hang and a bottleneck can only be judged with the records of all ranks.
        complete = len(records) >= (start.world_size or len(records))
        now = time.time()
        stands = hang.standings(run.machines.values(), attempt)
        sizes = [entry.world_size for entry in run.attempts if entry.attempt == attempt]
        world_size = start.world_size or [*sizes, run.plan.world_size][0] or 0
        missed = hang.find_missed_sum(stands, world_size)
        hung = hang.hang_of(records, run.machines, now, missed) if complete else None
        # If ranks are silent for longer, their last RECENT seconds are not those of the clock.
        is_current = all(
            hang.silence(record, now) <= min(RECENT, max(STALE, 2 * hang.median_step(record)))
            for record in stepped
        )
        finished = [
            (host, rank)
            for host, machine in run.machines.items()
            for line in [*machine.recent][-1:]
            if line.get("attempt") == attempt
            for rank in convert_what_fits(line, MachineLine).finished
        ]
        judgement, missing = None, ""
        if complete:
            queued = max(map(queueing_if_oversubscribed, run.machines.values()), default=0.0)
            judgement, missing = judge(records, queued, run.on_one_machine, run.program)
        if judgement:
            lines = {host: machine.recent for host, machine in run.machines.items()}
            timed = {host for host in lines if any(figures.sample_of(e).ranks for e in lines[host])}
            ranks = {r.rank for r in records}
            known = split(ranks, {r.rank for r in records if r.host in timed})
            covered = {STEPS: split(ranks, ranks), PROCESSORS: known}
            judgement = replace(judgement, coverage=covered)
        # The last recorded steps are then old, and not what the run does now.
        if judgement and not is_current:
            judgement = replace(judgement, recent=False)
        recent = [record.last(RECENT) for record in records]
        recent_speed = measure.images_per_second(recent) if is_current else None
        is_long = any(record.stall.category in hang.LONG for record in records)
        if not (hung or finished or not stepped or not (is_current or is_long)):
            stands = []
        return Progress(
            attempt=attempt,
            unix=run.unix or time.time(),
            epoch=max((r.epoch for r in stepped if r.epoch is not None), default=-1) + 1 or None,
            epochs=int(epochs) if epochs else None,
            step=step,
            steps=steps,
            images_per_second=measure.images_per_second(run.ranks),
            recent_images_per_second=0.0 if hung else recent_speed,
            left=None if hung or finished else seconds_left(stepped, step, steps),
            loss=measure.mean_or_none([record.loss for record in records]),
            top1=measure.mean_or_none([record.top1 for record in records]),
            evaluated=next(reversed(learning_curve(run, newest_only=True)), None),
            judgement=judgement,
            missing_for_verdict=missing,
            hang=hung,
            machines=[
                machine_now(run.machines[host], [r for r in stepped if r.host == host])
                for host in run.hosts
                if host in run.machines
            ],
            stands=stands,
            silent=hang.describe_silent_ranks(stands, world_size, not run.program.times_steps),
            finished=finished,
            leaving=any(record.end for record in records),
            unsummed=measure.unsummed_steps(records),
            samples=run.samples,
        )


def judge(
    records: list[RankRecord], queued: float, one_pc: bool, program: PlannedProgram
) -> tuple[Judgement | None, str]:
    """Return the bottleneck, or None and what is missing before the steps can be judged. `queued`:
    the fraction of time that threads wait if processors are oversubscribed, else 0. `one_pc`: all
    ranks are on it."""
    missing = ""
    recent = [record.last(RECENT, measure.LEAST_STEPS) for record in records]
    for chosen in (recent, records):
        if not chosen or any(len(record.steps) < 2 for record in chosen):
            continue
        # Recent steps first; all steps only if these are too few or still change.
        step = measure.step_of_ranks(chosen, program)
        missing = step.missing_for_verdict
        if missing:
            continue
        slowest = measure.slowest(step)
        rank = slowest.rank
        slower = rank.rank if slowest.is_straggler else None
        late = most_in_excess(rank.seconds, [r.seconds for r in step.ranks])
        kind = find_cause(step_shares(step), slower is not None, step.late_by, queued > 0, one_pc)
        work = None if slower is None else late
        return Judgement(step, chosen is recent, kind, slower, work, queued), ""
    return None, missing


def machine_now(machine: Machine, records: Sequence[RankRecord] = ()) -> MachineNow:
    """Return the state of a machine in its last NOW seconds, from two of its lines."""
    lines = [line for line in machine.recent if time_of(line.get("mono")) is not None] or [{}]
    times = [time_of(line.get("mono")) or 0.0 for line in lines]
    older = [line for line, mono in zip(lines, times) if times[-1] - mono >= NOW]
    newest = lines[-1]
    values: dict[str, dict[str, dict[Figure, float]]] = {kind: {} for kind in FIGURES}
    for (kind, name), interval in intervals_between(older[-1] if older else lines[0], newest):
        read = {figure: figure.value(interval) for figure in FIGURES[kind]}
        values[kind][name] = {f: value for f, value in read.items() if value is not None}
    shown = {**values[MACHINE].get("", {}), **values[INTERFACE].get("", {})}
    if isinstance(newest.get("disks"), dict):
        # A disk without any requests is not recorded, so no disk means that all are idle.
        busy = figures.DISK_BUSY
        idle = {busy: 0.0, figures.DISK_READ: 0.0}
        disks: list[dict[Figure, float]] = [*values[DISK].values(), idle]
        busiest = max(disks, key=lambda disk: disk.get(busy, 0.0))
        shown.update(busiest)
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
    """Return the machine for JSON: figures by name, null if unknown."""
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
    """Yield the intervals between two lines of a machine; without counters if both are one line."""
    passed = (time_of(end.get("mono")) or 0.0) - (time_of(start.get("mono")) or 0.0)
    earlier = figures.sample_of(start) if passed > 0 else None
    return figures.intervals(earlier, figures.sample_of(end), passed or 1.0)


def queueing_if_oversubscribed(machine: Machine) -> float:
    """Return `queued` over the last RECENT lines with ranks if processors are oversubscribed, else
    0."""
    lines = [line for line in machine.recent if line.get("ranks")] or [{}]
    interval = dict(intervals_between(lines[-int(RECENT) :][0], lines[-1]))[MACHINE, ""]
    busy, queued = (f.value(interval) or 0.0 for f in (figures.CPU, figures.QUEUED))
    return queued if figures.is_oversubscribed(busy, queued) else 0.0


def section_of(progress: Progress, running: bool) -> Section:
    """Show progress, bottleneck and machines of a run; if it has ended, without current figures."""
    facts = (progress_text(progress, running), speed_text(progress, running))
    lines = [*(", ".join(words) for words in facts if words), verdict(progress, running)]
    if (judged := progress.judgement) and not (progress.hang and running):
        second = [judged.runner_up.sentence(progress.samples)] if judged.runner_up else []
        lines.append(" ".join([*second, coverage_sentence(judged.coverage, judged.coverage)]))
    lines += [not_summed(progress.unsummed)] if progress.unsummed else []
    lines += [hang.finished_text(progress.finished)] if progress.finished and running else []
    lines += progress.silent.values() if running else []
    machines = machines_of(progress.machines, running)
    return Section("", [*map(Paragraph, lines), *machines])


def progress_text(progress: Progress, running: bool) -> list[str]:
    words = []
    if progress.epoch is not None:
        total = f" of {progress.epochs}" if progress.epochs else ""
        words.append(f"epoch {progress.epoch}{total}")
    if progress.step is not None and progress.steps:
        share = 100 * progress.step / progress.steps
        words.append(f"step {progress.step:,} of {progress.steps:,} ({share:.1f} %)")
    elif progress.step is not None:
        words.append(f"step {progress.step:,}")
    if progress.left is not None and running:
        words.append(f"{seconds(progress.left)} to go")
    return words


def speed_text(progress: Progress, running: bool) -> list[str]:
    words = []
    if progress.images_per_second:
        recent, recent_words = progress.recent_images_per_second, ""
        if recent is not None and running:
            recent_words = f" (last {RECENT:.0f} s: {three_digits(recent)})"
        speed = three_digits(progress.images_per_second)
        words.append(f"{speed} {progress.samples}/s{recent_words}")
    words += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
    scores = progress.evaluated
    if scores and scores.top1 is not None:
        words.append(f"top-1 {top1(scores.top1)}{scores.part} after epoch {scores.epoch}")
    elif progress.top1 is not None:
        words.append(f"top-1 {top1(progress.top1)} of the images trained on")
    return words


def verdict(progress: Progress, running: bool = True) -> str:
    """Write the bottleneck as a sentence."""
    if progress.hang is not None and running:
        return progress.hang.sentence
    judgement = progress.judgement
    # Ranks that never timed a step can only be judged by their silence.
    if judgement is None and progress.stands and running:
        silent = min(standing.seconds for standing in progress.stands)
        # Of ranks that count their sums, printed lines are no sign of life.
        counts = any(standing.sums is not None for standing in progress.stands)
        action = "entered a sum" if counts else "timed a step or printed anything"
        return f"no rank has {action} for {seconds(silent)}"
    if judgement is None:
        early = "too early for a diagnosis" if running else "too short for a diagnosis"
        return ": ".join(filter(None, (early, progress.missing_for_verdict)))
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
    """Show a row for each machine, with as many columns as there is room for, and its warnings."""
    recorded = {figure for machine in machines for figure in machine.figures}
    # A column is only shown if some machine recorded it: many have no GPU or sensor.
    columns = [
        Column("machine", lambda machine: machine.host),
        *([STEP] if any(machine.step is not None for machine in machines) else []),
        *(Column(f.status, partial(figure_cell, f)) for f in IN_STATUS if f in recorded),
    ]
    # A silent machine's figures are left out: they would look like present ones.
    rows = [
        MachineNow(machine.host, machine.age, machine.step)
        if running and machine.age > STALE
        else machine
        for machine in machines
    ]
    problems = [
        Paragraph(f"{machine.host}: {warning}")
        for machine in machines
        for warning in warnings(machine, running)
    ]
    return [table("Machines", columns, rows, 1), *problems]


STEP = Column("step", lambda machine: "-" if machine.step is None else f"{machine.step}")
# A terminal with too few columns cuts the last ones.
IN_STATUS = sorted(
    (f for kind in (MACHINE, DISK, INTERFACE, GPU) for f in FIGURES[kind] if f.status),
    key=lambda figure: figure.priority,
)


def figure_cell(figure: Figure, machine: MachineNow) -> str:
    return figure.unit.cell(machine.figures[figure]) if figure in machine.figures else "-"


def warnings(machine: MachineNow, running: bool = True) -> list[str]:
    """Return short sentences on the problems of a machine."""
    problems = []
    if running and machine.age > STALE:
        problems.append(f"silent for {seconds(machine.age)}")
    # Such ranks are a mistake in the script, and train copies of their own.
    if running and machine.isolated:
        ranks = ", ".join(map(str, machine.isolated[:5]))
        plural = "s" * (len(machine.isolated) > 1)
        problems.append(
            f"rank{plural} {ranks} never connected to other ranks: the script made no process group"
        )
    if running and machine.only_received:
        problems.append(only_received(machine.only_received))
    sentences = (figure.warning(machine.figures) for figure in IN_STATUS)
    return problems + [sentence for sentence in sentences if sentence]
