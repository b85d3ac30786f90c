"""The progress of a running run, and its words: what `make status` and `make top` show. Figures are
those of the report, from the same records by the same functions."""

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
from report.bottleneck import parts
from report.figures import (
    CPU,
    DISK,
    DISK_BUSY,
    DISK_READ,
    FIGURES,
    GPU,
    INTERFACE,
    MACHINE,
    QUEUED,
    Figure,
    Interval,
    Thing,
    intervals,
    is_oversubscribed,
    sample_of,
)
from report.files import Entry, time_of
from report.hang import (
    LONG,
    Hang,
    Standing,
    by_place,
    finished_text,
    hang_of,
    median_step,
    silence,
    standings,
)
from report.measure import (
    LEAST_STEPS,
    Step,
    images_per_second,
    mean_or_none,
    slowest,
    step_of_ranks,
    unsummed_steps,
)
from report.progress import Epoch, learning_curve, steps_of_run, time_left
from report.read import Machine, RankRecord, Reader
from report.verdict import READ_FROM_DISK, not_summed, only_received, step_words, wait_words
from report.view import Column, Item, Paragraph, Section, table, top1
from report.wait_rules import WORDS, most_in_excess, ruling_cause, slower_rank

# Seconds: what a run does now is what it did in them, or in its last LEAST_STEPS where these took
# longer. A fault that began a minute ago is all that is seen in them.
RECENT = 40.0
NOW = 5.0  # of a machine
STALE = 10.0  # seconds without a line after which a machine is called silent


@dataclass(frozen=True)
class MachineNow:
    """A machine in the last seconds: its figures, of its disks the busiest one's, of its GPUs
    the largest. What is not known is absent."""

    host: str
    age: float  # seconds since its last record
    step: int | None
    figures: Mapping[Figure, float] = field(default_factory=dict)
    gpus: Mapping[str, Mapping[Figure, float]] = field(default_factory=dict)  # by their indices
    alone: list[int] = field(default_factory=list)  # ranks of a script that have met no other
    only_received: float | None = None  # bytes, where its ranks sent the others nothing of the kind


@dataclass(frozen=True)
class Ruling:
    """The bottleneck by the last steps, or else by all steps. `kind`: a wait of wait_rules.py,
    `compute`, or None where there is no single one. `slower`: the rank that the others wait for,
    by its `work` of that kind."""

    step: Step
    recent: bool
    kind: str | None
    slower: int | None = None
    work: str | None = None
    queued: float = 0.0  # of the time in which threads want a processor, where none is left

    @property
    def cause(self) -> str | None:
        """Waiting for a rank that is late by its images is waiting for images."""
        return "data" if self.kind == "straggler" and self.work == "data" else self.kind


@dataclass(frozen=True)
class Progress:
    """A run as it stands. Times in seconds; None where nothing is known yet."""

    attempt: int
    unix: float  # when the last record came here
    epoch: int | None  # of the one that is under way, from 1
    epochs: int | None
    step: int | None
    steps: int | None
    images_per_second: float | None  # of the run, as in its report
    recent_images_per_second: float | None
    left: float | None  # until the end
    loss: float | None
    top1: float | None
    evaluated: Epoch | None  # the last one
    ruling: Ruling | None  # None: too early to say, since this is missing
    missing_for_verdict: str
    hang: Hang | None  # None while steps come
    machines: list[MachineNow]
    stands: Sequence[Standing] = ()  # where silent ranks stand, unless steps come
    finished: Sequence[tuple[str, int]] = ()  # ranks that ended with exit code 0
    leaving: bool = False  # a rank has ended its records
    unsummed: int = 0  # steps in a row whose gradients DDP did not sum, where they are many
    samples: str = "images"  # the word for them

    @property
    def cause(self) -> str | None:
        return self.ruling.cause if self.ruling else None

    @property
    def from_memory(self) -> bool:
        """Whether the run has not gone once through its data, and reads little of it from disks."""
        before_one_pass = (self.step or 0) * (self.epochs or 1) < (self.steps or 0)
        read = max((machine.figures.get(DISK_READ, 0.0) for machine in self.machines), default=0.0)
        return before_one_pass and read <= READ_FROM_DISK


class Follower:
    """Reads a run's folder again and again; of it only what is new."""

    def __init__(self, folder: Path):
        self._reader = Reader(folder)
        self.machines: Mapping[str, Machine] = {}  # as they were seen last

    def look(self) -> Progress | None:
        """The progress by now; None where nothing was recorded."""
        try:
            run = self._reader.read(recent=True)
        except UserError:
            return None
        self.machines = run.machines
        attempt = max([*(r.attempt for r in run.ranks), *(e.attempt for e in run.attempts)] or [1])
        records = [record for record in run.ranks if record.attempt == attempt]
        if not run.machines and not records:
            return None
        start = next((record.start for record in records if record.start), RankStart())
        recent = [record.last(RECENT) for record in records]
        epochs, steps = start.epochs, steps_of_run(start)
        stepped = [record for record in records if len(record.steps)]
        step = max((record.steps.step[-1] for record in stepped), default=None)
        world = start.world_size or len(records)
        machines = [
            machine_now(run.machines[host], [record for record in stepped if record.host == host])
            for host in run.hosts
            if host in run.machines
        ]
        complete = len(records) >= world
        full = max(map(oversubscription, run.machines.values()), default=0.0)
        now = time.time()
        hang = hang_of(records, run.machines, now) if complete else None
        # Else the last RECENT seconds of the records are others than those of the clock.
        is_current = all(
            silence(record, now) <= min(RECENT, max(STALE, 2 * median_step(record)))
            for record in stepped
        )
        finished = [
            (host, rank)
            for host, machine in run.machines.items()
            for line in [*machine.recent][-1:]
            if line.get("attempt") == attempt
            for rank in convert_what_fits(line, MachineLine).finished
        ]
        is_long = any(record.stall.category in LONG for record in records)
        is_stuck = hang or finished or not stepped or not (is_current or is_long)
        ruling, missing = None, ""
        if complete:
            ruling, missing = ruling_of(records, full, run.on_one_machine, run.program)
        if ruling and not is_current:
            ruling = replace(ruling, recent=False)
        recent_speed = images_per_second(recent) if is_current else None
        if hang:
            recent_speed = 0.0
        return Progress(
            attempt=attempt,
            unix=run.unix or time.time(),
            epoch=max((r.epoch for r in stepped if r.epoch is not None), default=-1) + 1 or None,
            epochs=int(epochs) if epochs else None,
            step=step,
            steps=steps,
            images_per_second=images_per_second(run.ranks),
            recent_images_per_second=recent_speed,
            left=None if hang or finished else time_left(stepped, step, steps),
            loss=mean_or_none([record.loss for record in records]),
            top1=mean_or_none([record.top1 for record in records]),
            evaluated=next(reversed(learning_curve(run, last=True)), None),
            ruling=ruling,
            missing_for_verdict=missing,
            hang=hang,
            machines=machines,
            stands=standings(run.machines.values(), attempt) if is_stuck else (),
            finished=finished,
            leaving=any(record.end for record in records),
            unsummed=unsummed_steps(records),
            samples=run.samples,
        )


def ruling_of(
    records: list[RankRecord], queued: float, one_pc: bool, program: PlannedProgram
) -> tuple[Ruling | None, str]:
    """The bottleneck, or else what is missing before the steps can be judged. `queued`: the share
    of time that threads wait where processors are oversubscribed, else 0; `one_pc`: all ranks are
    on it."""
    missing = ""
    recent = [record.last(RECENT, LEAST_STEPS) for record in records]
    for some in (recent, records):
        if not some or any(len(record.steps) < 2 for record in some):
            continue
        step = step_of_ranks(some, program)
        missing = step.missing_for_verdict
        if missing:
            continue
        own = {rank.rank: rank.own for rank in step.ranks}
        slower = slower_rank(own) if len(own) > 1 else None
        kind = ruling_cause(parts(step), slower is not None, step.late_by, queued > 0, one_pc)
        last, _ = slowest(step)
        work = most_in_excess(last.seconds, [rank.seconds for rank in step.ranks])
        late = work if slower is not None else None
        return Ruling(step, some is recent, kind, slower, late, queued), ""
    return None, missing


def machine_now(machine: Machine, records: Sequence[RankRecord] = ()) -> MachineNow:
    """A machine in its last NOW seconds, from two of its lines."""
    lines = [line for line in machine.recent if time_of(line.get("mono")) is not None] or [{}]
    last, times = lines[-1], [time_of(line.get("mono")) or 0.0 for line in lines]
    older = [line for line, mono in zip(lines, times) if times[-1] - mono >= NOW]
    values: dict[str, dict[str, dict[Figure, float]]] = {kind: {} for kind in FIGURES}
    for (kind, name), interval in between(older[-1] if older else lines[0], last):
        known = {figure: figure.value(interval) for figure in FIGURES[kind]}
        values[kind][name] = {f: value for f, value in known.items() if value is not None}
    figures = {**values[MACHINE].get("", {}), **values[INTERFACE].get("", {})}
    disks = list(values[DISK].values())
    if isinstance(last.get("disks"), dict):
        idle = {DISK_BUSY: 0.0, DISK_READ: 0.0}  # where none did anything
        busiest: dict[Figure, float] = max(
            [*disks, idle], key=lambda disk: disk.get(DISK_BUSY, 0.0)
        )
        figures |= busiest
    for gpu in values[GPU].values():
        figures |= {figure: max(value, figures.get(figure, value)) for figure, value in gpu.items()}
    notes = convert_what_fits(last, MachineLine)
    return MachineNow(
        host=machine.host,
        age=max(0.0, time.time() - machine.unix),
        step=max((record.steps.step[-1] for record in records), default=None),
        figures=figures,
        gpus=values[GPU],
        alone=notes.alone,
        only_received=notes.only_received,
    )


def machine_document(machine: MachineNow) -> dict[str, Any]:
    """For JSON: figures by name, null where one is not known."""
    kinds = (MACHINE, DISK, INTERFACE)
    shown = [figure for kind in kinds for figure in FIGURES[kind] if figure.status]
    return {
        **{name: getattr(machine, name) for name in ("host", "age", "step")},
        **values_by_name(shown, machine.figures),
        "alone": machine.alone,
        "only_received": machine.only_received,
        "gpus": [
            {"index": int(index), **values_by_name(FIGURES[GPU], gpu)}
            for index, gpu in machine.gpus.items()
        ],
    }


def values_by_name(
    figures: Sequence[Figure], values: Mapping[Figure, float]
) -> dict[str, float | None]:
    return {f.name: values[f] * f.unit.json if f in values else None for f in figures}


def between(first: Entry, last: Entry) -> Iterator[tuple[Thing, Interval]]:
    """What came between two lines of a machine's records. Of a single line only what is no rate."""
    passed = (time_of(last.get("mono")) or 0.0) - (time_of(first.get("mono")) or 0.0)
    return intervals(sample_of(first) if passed > 0 else None, sample_of(last), passed or 1.0)


def oversubscription(machine: Machine) -> float:
    """`queued` over the last RECENT seconds with ranks, where processors are oversubscribed; else
    0."""
    lines = [line for line in machine.recent if line.get("ranks")] or [{}]
    interval = dict(between(lines[-int(RECENT) :][0], lines[-1]))[MACHINE, ""]
    busy, queued = (figure.value(interval) or 0.0 for figure in (CPU, QUEUED))
    return queued if is_oversubscribed(busy, queued) else 0.0


def section_of(progress: Progress, running: bool) -> Section:
    """Progress, bottleneck and machines of a run; without current figures where it is over."""
    place, figures = progress_text(progress, running), speed_text(progress, running)
    lines = [*(", ".join(part) for part in (place, figures) if part), verdict(progress, running)]
    lines += [not_summed(progress.unsummed)] if progress.unsummed else []
    lines += [finished_text(progress.finished)] if progress.finished and running else []
    lines += by_place(progress.stands).values() if running else []
    machines = machines_of(progress.machines, running)
    return Section("", [*map(Paragraph, lines), *machines])


def progress_text(progress: Progress, running: bool) -> list[str]:
    epochs = f" of {progress.epochs}" if progress.epochs else ""
    place = [] if progress.epoch is None else [f"epoch {progress.epoch}{epochs}"]
    if progress.step is not None and progress.steps:
        part = 100 * progress.step / progress.steps
        place.append(f"step {progress.step:,} of {progress.steps:,} ({part:.1f} %)")
    elif progress.step is not None:
        place.append(f"step {progress.step:,}")
    if progress.left is not None and running:
        place.append(f"{seconds(progress.left)} to go")
    return place


def speed_text(progress: Progress, running: bool) -> list[str]:
    figures = []
    if progress.images_per_second:
        recent = progress.recent_images_per_second
        now = ""
        if recent is not None and running:
            now = f" (last {RECENT:.0f} s: {three_digits(recent)})"
        speed = three_digits(progress.images_per_second)
        figures.append(f"{speed} {progress.samples}/s{now}")
    figures += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
    scores = progress.evaluated
    if scores and scores.top1 is not None:
        figures.append(f"top-1 {top1(scores.top1)}{scores.part} after epoch {scores.epoch}")
    elif progress.top1 is not None:
        figures.append(f"top-1 {top1(progress.top1)} of the images trained on")
    return figures


def verdict(progress: Progress, running: bool = True) -> str:
    """The bottleneck in words."""
    if progress.hang is not None and running:
        return progress.hang.sentence
    ruling = progress.ruling
    if ruling is None and progress.stands and running:
        silent = min(standing.seconds for standing in progress.stands)
        return f"no rank has timed a step or printed anything for {seconds(silent)}"
    if ruling is None:
        early = (
            "too early to say what holds it up" if running else "too short to say what held it up"
        )
        return ": ".join(filter(None, (early, progress.missing_for_verdict)))
    step, kind = ruling.step, ruling.kind
    when = "now" if ruling.recent and running else "so far" if running else "at its end"
    if progress.from_memory and ruling.cause != "data":
        when += ", from memory"  # which hides a slow disk
    if kind in WORDS:
        rank = ruling.slower if kind == "straggler" else None
        slow = "" if rank is None else f", rank {rank}"
        late = f", by its {progress.samples}" if ruling.cause != kind else ""
        wait = WORDS[kind].format(progress.samples)
        return f"{when}: {wait}: {wait_words(step, kind)}{slow}{late}"
    if kind == "compute":
        return f"{when}: computing, as it should be: {wait_words(step, kind)}"
    if kind == "cpu_oversubscribed":
        share = f"{percent(ruling.queued)} of the time in which they want it"
        return f"{when}: oversubscribed processors: threads wait for one {share}"
    return f"{when}: no single bottleneck in {step_words(step)}"


def machines_of(machines: list[MachineNow], running: bool) -> list[Item]:
    """A row a machine, with as many columns as there is room for, and a line for each thing that is
    wrong with one."""
    known = {figure for machine in machines for figure in machine.figures}  # no GPU, no sensor
    columns = [
        Column("machine", lambda machine: machine.host),
        *([STEP] if any(machine.step is not None for machine in machines) else []),
        *(Column(figure.status, partial(cell, figure)) for figure in IN_STATUS if figure in known),
    ]
    # What is old is not shown as if it were of now.
    now = [
        MachineNow(machine.host, machine.age, machine.step)
        if running and machine.age > STALE
        else machine
        for machine in machines
    ]
    wrong = [
        Paragraph(f"{machine.host}: {text}")
        for machine in machines
        for text in warnings(machine, running)
    ]
    return [table("Machines", columns, now, 1), *wrong]


STEP = Column("step", lambda machine: "-" if machine.step is None else f"{machine.step}")
# The first ones first where a terminal has too few columns.
IN_STATUS = sorted(
    (
        figure
        for kind in (MACHINE, DISK, INTERFACE, GPU)
        for figure in FIGURES[kind]
        if figure.status
    ),
    key=lambda figure: figure.place,
)


def cell(figure: Figure, machine: MachineNow) -> str:
    return figure.unit.cell(machine.figures[figure]) if figure in machine.figures else "-"


def named_ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:5]))}"


def warnings(machine: MachineNow, running: bool = True) -> list[str]:
    """Short sentences on what is wrong with a machine."""
    problems = []
    if running and machine.age > STALE:
        problems.append(f"silent for {seconds(machine.age)}")
    if running and machine.alone:
        problems.append(
            f"{named_ranks(machine.alone)} met no other: no process group was made there"
        )
    if running and machine.only_received:
        problems.append(only_received(machine.only_received))
    sentences = (figure.warning(machine.figures) for figure in IN_STATUS)
    return problems + [sentence for sentence in sentences if sentence]
