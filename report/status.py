"""The progress of a running run, and its words: what `make status` and `make top` show. Figures are
those of the report, from the same records by the same functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.errors import UserError
from contract.text import percent, seconds, size, three_digits
from report import tables
from report.bottleneck import parts
from report.fields import Fields
from report.fields import ranks as numbers_of_ranks
from report.files import Entry, count, dicts, natural_number, number, only, positive
from report.hang import Hang, hang_of
from report.machines import busy, oversubscribed, schedule
from report.measure import (
    LEAST_STEPS,
    Step,
    images_per_second,
    mean_or_none,
    slowest,
    step_of_ranks,
    unsummed_steps,
)
from report.network import grown, one_machine
from report.progress import Epoch, learning_curve, steps_of_run, time_left
from report.read import Machine, RankRecord, Reader
from report.stacks import Standing, by_place, standings
from report.verdict import READ_FROM_DISK, not_summed, only_received, step_words, wait_words
from report.view import Column, Item, Paragraph, Section, table
from report.wait_rules import WORDS, most_in_excess, ruling_cause, slower_rank
from report.ways import in_samples

# Seconds: what a run does now is what it did in them, or in its last LEAST_STEPS where these took
# longer. A fault that began a minute ago is all that is seen in them.
RECENT = 40.0
NOW = 5.0  # of a machine
STALE = 10.0  # seconds without a line after which a machine is called silent
HOT_GPU, HOT_CPU = 85, 90  # Celsius, from which on they slow themselves down
LOW_DISK = 5e9  # bytes
SWAPS = 256e6  # bytes in use that are worth a word
MEMORY_FULL = 90.0  # percent of the memory


@dataclass(frozen=True)
class Figures:
    """A machine in the last seconds. Parts in percent, rates in bytes a second; None: unknown."""

    host: str
    age: float  # seconds since its last record
    step: int | None
    cpu: float | None = None
    queued: float | None = None  # of the time in which the run's threads wanted a processor
    memory: float | None = None
    swap: float | None = None  # bytes
    temperature: float | None = None  # of the hottest processor
    disk_busy: float | None = None
    disk_read: float | None = None
    disk_free: float | None = None  # bytes, where the run's folder lies
    sent: float | None = None
    received: float | None = None
    again: float | None = None  # TCP segments a second that were sent again
    dropped: float | None = None  # packets a second
    alone: list[int] = field(default_factory=list)  # ranks of a script that have met no other
    only_received: float | None = None  # bytes, where its ranks sent the others nothing of the kind
    gpus: list[list[Any]] = field(
        default_factory=list
    )  # index, percent, bytes, Celsius, watts, MHz


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
    machines: list[Figures]
    stands: Sequence[Standing] = ()  # where silent ranks stand, unless steps come
    leaving: bool = False  # a rank has ended its records
    unsummed: int = 0  # steps in a row whose gradients DDP did not sum, where they are many
    script: bool = False  # of the user's own, which has samples and no images

    @property
    def cause(self) -> str | None:
        return self.ruling.cause if self.ruling else None

    @property
    def from_memory(self) -> bool:
        """Whether the run has not gone once through its data, and reads little of it from disks."""
        before_one_pass = (self.step or 0) * (self.epochs or 1) < (self.steps or 0)
        read = max((machine.disk_read or 0.0 for machine in self.machines), default=0.0)
        return before_one_pass and read <= READ_FROM_DISK * 1e6


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
        attempt = max(
            [*(r.attempt for r in run.ranks), *(e["attempt"] for e in run.attempts)] or [1]
        )
        records = [record for record in run.ranks if record.attempt == attempt]
        if not run.machines and not records:
            return None
        start = next((record.start for record in records if record.start), {})
        recent = [record.last(RECENT) for record in records]
        epochs, steps = start.get("epochs"), steps_of_run(start)
        stepped = [record for record in records if len(record.steps)]
        step = max((record.steps.step[-1] for record in stepped), default=None)
        world = int(number(start.get("world_size")) or len(records))
        machines = [
            figures(run.machines[host], [record for record in stepped if record.host == host])
            for host in run.hosts
            if host in run.machines
        ]
        complete = len(records) >= world
        full = max(map(oversubscription, run.machines.values()), default=0.0)
        hang = hang_of(records, run.machines, time.time()) if complete else None
        ruling, missing = ruling_of(records, full, one_machine(run)) if complete else (None, "")
        return Progress(
            attempt=attempt,
            unix=run.unix or time.time(),
            epoch=max((r.epoch for r in stepped if r.epoch is not None), default=-1) + 1 or None,
            epochs=int(epochs) if epochs else None,
            step=step,
            steps=steps,
            images_per_second=images_per_second(run.ranks),
            recent_images_per_second=0.0 if hang else images_per_second(recent),
            left=None if hang else time_left(stepped, step, steps),
            loss=mean_or_none([record.loss for record in records]),
            top1=mean_or_none([record.top1 for record in records]),
            evaluated=next(reversed(learning_curve(run, last=True)), None),
            ruling=ruling,
            missing_for_verdict=missing,
            hang=hang,
            machines=machines,
            stands=standings(run.machines.values(), attempt) if hang or not stepped else (),
            leaving=any(record.end for record in records),
            unsummed=unsummed_steps(records),
            script=bool(run.plan.get("script")),
        )


def ruling_of(records: list[RankRecord], queued: float, one_pc: bool) -> tuple[Ruling | None, str]:
    """The bottleneck, or else what is missing before the steps can be judged. `queued`: the share
    of time that threads wait where processors are oversubscribed, else 0; `one_pc`: all ranks are
    on it."""
    missing = ""
    recent = [record.last(RECENT, LEAST_STEPS) for record in records]
    for some in (recent, records):
        if not some or any(len(record.steps) < 2 for record in some):
            continue
        step = step_of_ranks(some)
        missing = step.missing_for_verdict
        if missing:
            continue
        own = {rank.rank: rank.own for rank in step.ranks}
        slower = slower_rank(own) if len(own) > 1 else None
        kind = ruling_cause(parts(step), slower is not None, queued > 0, one_pc)
        last, _ = slowest(step)
        work = most_in_excess(last.seconds, [rank.seconds for rank in step.ranks])
        late = work if slower is not None else None
        return Ruling(step, some is recent, kind, slower, late, queued), ""
    return None, missing


def rates_of(value: object) -> list[Entry] | None:
    """Utilisation and read rate of each disk."""
    if not isinstance(value, dict):
        return None
    rates = {"util": number, "rkB/s": number}
    return [only(rates, disk) for disk in value.values() if isinstance(disk, dict)]


CARD = ("tx_bytes", "rx_bytes", "tcp_retransmits", "tx_dropped", "rx_dropped")
GPU = ("utilization", "memory_used", "temperature", "power", "clock_sm")
SAMPLE: Fields = {
    **dict.fromkeys(("mono", "cpu_busy", "swap_total", "swap_free", "temperature"), number),
    **dict.fromkeys(("memory_available", "disk_free", "only_received"), number),
    **{"memory_total": positive, "cores": count, "gpus": dicts, "disks": rates_of},
}


def sample_of(line: Entry) -> Entry:
    """The counters and levels of a line, those of the card among them."""
    card = line.get("card")
    counted = only(dict.fromkeys(CARD, number), card) if isinstance(card, dict) else {}
    lists = {name: line.get(name) for name in ("ranks", "alone")}
    return {**only(SAMPLE, line), **counted, **lists}


def figures(machine: Machine, records: Sequence[RankRecord] = ()) -> Figures:
    """A machine in its last NOW seconds, from two of its lines."""
    samples = [sample_of(line) for line in machine.recent if "mono" in line] or [{}]
    last = samples[-1]
    older = [sample for sample in samples if last.get("mono", 0.0) - sample.get("mono", 0.0) >= NOW]
    first = older[-1] if older else samples[0]
    passed = last.get("mono", 0.0) - first.get("mono", 0.0)

    def rate(name: str) -> float | None:
        return grown(first, last, name) / passed if name in last and passed > 0 else None

    ran, cores, total = rate("cpu_busy"), last.get("cores"), last.get("memory_total")
    used = None if total is None else 1 - last.get("memory_available", total) / total
    disks = last.get("disks")
    swap = (
        last["swap_total"] - last["swap_free"] if {"swap_total", "swap_free"} <= {*last} else None
    )
    lost = rate("tx_dropped"), rate("rx_dropped")
    busiest: Entry = max(disks or [], key=lambda disk: disk.get("util", 0.0), default={})
    return Figures(
        host=machine.host,
        age=max(0.0, time.time() - machine.unix),
        step=max((record.steps.step[-1] for record in records), default=None),
        cpu=100 * busy(ran, 1.0, cores) if ran is not None and cores else None,
        queued=queued(first, last),
        memory=None if used is None else 100 * used,
        swap=swap,
        temperature=last.get("temperature"),
        disk_busy=None if disks is None else busiest.get("util", 0.0),
        disk_read=None if disks is None else busiest.get("rkB/s", 0.0) * 1024,
        disk_free=last.get("disk_free"),
        sent=rate("tx_bytes"),
        received=rate("rx_bytes"),
        again=rate("tcp_retransmits"),
        alone=numbers_of_ranks(last.get("alone")),
        only_received=last.get("only_received"),
        dropped=None if lost == (None, None) else sum(value or 0.0 for value in lost),
        gpus=[
            [natural_number(card.get("index")), *(number(card.get(name)) for name in GPU)]
            for card in last.get("gpus", [])
        ],
    )


def oversubscription(machine: Machine) -> float:
    """`queued` as a share over the last RECENT seconds with ranks, where processors are
    oversubscribed; else 0."""
    samples = [sample_of(line) for line in machine.recent if line.get("ranks")] or [{}]
    first, last = samples[-int(RECENT) :][0], samples[-1]
    passed, share = last.get("mono", 0.0) - first.get("mono", 0.0), queued(first, last) or 0.0
    if passed <= 0 or "cores" not in last:
        return 0.0
    share_busy = busy(grown(first, last, "cpu_busy"), passed, last["cores"])
    return share / 100 if oversubscribed(share_busy, share / 100) else 0.0


def queued(first: Entry, last: Entry) -> float | None:
    """Percent of the time that the run's threads waited for a processor, between two samples."""
    before, now = (schedule(sample.get("ranks")) for sample in (first, last))
    known = [(before[rank], now[rank]) for rank in now if rank in before]
    ran, waited = (sum(grown(*both, of) for both in known) for of in ("ran", "waited"))
    return 100 * waited / (ran + waited) if ran + waited > 0 else None


def section_of(progress: Progress, running: bool) -> Section:
    """Progress, bottleneck and machines of a run; without current figures where it is over."""
    place, figures = progress_text(progress, running), speed_text(progress, running)
    lines = [*(", ".join(part) for part in (place, figures) if part), verdict(progress, running)]
    lines += [not_summed(progress.unsummed)] if progress.unsummed else []
    lines += by_place(progress.stands).values() if running else []
    section = Section(
        "", [Paragraph(line) for line in lines] + machines_of(progress.machines, running)
    )
    return in_samples(section) if progress.script else section


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
        figures.append(f"{three_digits(progress.images_per_second)} images/s{now}")
    figures += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
    scores = progress.evaluated
    if scores and scores.top1 is not None:
        figures.append(f"top-1 {tables.top1(scores.top1)} after epoch {scores.epoch}")
    elif progress.top1 is not None:
        figures.append(f"top-1 {tables.top1(progress.top1)} of the images trained on")
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
        images = ", by its images" if ruling.cause != kind else ""
        return f"{when}: {WORDS[kind]}: {wait_words(step, kind)}{slow}{images}"
    if kind == "compute":
        return f"{when}: computing, as it should be: {wait_words(step, kind)}"
    if kind == "cpu_oversubscribed":
        share = f"{percent(ruling.queued)} of the time in which they want it"
        return f"{when}: oversubscribed processors: threads wait for one {share}"
    return f"{when}: no single bottleneck in {step_words(step)}"


# As many as there is room for. Of disk and network in MB/s.
MACHINES = (
    Column("machine", lambda machine: machine.host),
    Column("step", lambda machine: as_integer(machine.step)),
    Column("GPU%", lambda machine: as_integer(max_over_gpus(machine.gpus, 1))),
    Column("GPU C", lambda machine: as_integer(max_over_gpus(machine.gpus, 3))),
    Column("CPU%", lambda machine: as_integer(machine.cpu)),
    Column("queue%", lambda machine: as_integer(machine.queued)),
    Column("mem%", lambda machine: as_integer(machine.memory)),
    Column("swap", lambda machine: bytes_of(machine.swap)),
    Column("disk%", lambda machine: as_integer(machine.disk_busy)),
    Column("MB/s read", lambda machine: megabytes(machine.disk_read)),
    Column("sent", lambda machine: megabytes(machine.sent)),
    Column("got", lambda machine: megabytes(machine.received)),
    Column("CPU C", lambda machine: as_integer(machine.temperature)),
    Column("free", lambda machine: bytes_of(machine.disk_free)),
    Column("again/s", lambda machine: as_integer(machine.again)),
    Column("drops/s", lambda machine: as_integer(machine.dropped)),
    Column("GPU mem", lambda machine: bytes_of(max_over_gpus(machine.gpus, 2))),
    Column("GPU W", lambda machine: as_integer(max_over_gpus(machine.gpus, 4))),
    Column("GPU MHz", lambda machine: as_integer(max_over_gpus(machine.gpus, 5))),
)


def machines_of(machines: list[Figures], running: bool) -> list[Item]:
    """A row a machine, and a line for each thing that is wrong with one."""
    shown = [
        column
        for column in MACHINES  # no GPU, no sensor
        if any(column.words(machine) != "-" for machine in machines)
    ]
    # What is old is not shown as if it were of now.
    now = [
        Figures(machine.host, machine.age, machine.step)
        if running and machine.age > STALE
        else machine
        for machine in machines
    ]
    wrong = [
        Paragraph(f"{machine.host}: {text}")
        for machine in machines
        for text in warnings(machine, running)
    ]
    return [table("Machines", shown, now, 1), *wrong]


def max_over_gpus(gpus: list[list[Any]], place: int) -> float | None:
    """The largest figure of a machine's GPUs."""
    return max((gpu[place] for gpu in gpus if gpu[place] is not None), default=None)


def as_integer(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def bytes_of(value: float | None) -> str:
    return "-" if value is None else "0" if not value else size(value).replace(" ", "")


def megabytes(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e6:.1f}"


def named_ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:5]))}"


def warnings(machine: Figures, running: bool = True) -> list[str]:
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
    hot = max_over_gpus(machine.gpus, 3)
    if hot is not None and hot >= HOT_GPU:
        problems.append(f"a GPU has {hot:.0f} C and may slow down: clean fans, give it air")
    if machine.temperature is not None and machine.temperature >= HOT_CPU:
        problems.append(f"its processor has {machine.temperature:.0f} C and may slow down")
    if (
        machine.swap is not None
        and machine.swap >= SWAPS
        and (machine.memory or 0.0) >= MEMORY_FULL
    ):
        problems.append(
            f"short of memory: {size(machine.swap)} swapped; fewer loaders (--workers) need less"
        )
    if machine.disk_free is not None and machine.disk_free < LOW_DISK:
        problems.append(f"{size(machine.disk_free)} free on its disk: remove old runs there")
    if (machine.dropped or 0.0) >= 1:
        problems.append(f"its network card drops {machine.dropped:.0f} packets a second")
    return problems
