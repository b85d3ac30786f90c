"""What machines did while the training loop ran: the figures of report/figures.py, of one walk
through the records of each machine; and the memory that its processes had."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from boundary.run_files import MOST_THINGS, Interface, MachineLine, Peer
from boundary.schema import convert_what_fits
from contract.errors import UserError
from report.figures import (
    CPU,
    DISK,
    DISK_BUSY,
    DISK_READ,
    DISK_WRITTEN,
    FIGURES,
    GPU,
    GPU_POWER,
    INTERFACE,
    LEAST,
    MACHINE,
    MEAN,
    MOST,
    QUEUED,
    RANKS_CPU,
    RECEIVED,
    SENT,
    SHARE,
    TOTAL,
    Figure,
    Interval,
    Ratio,
    Sample,
    Thing,
    increase,
    intervals,
    is_oversubscribed,
    sample_of,
)
from report.files import Entry, natural
from report.read import RankRecord, Run
from report.windows import Points, Series, Window, loop_windows, within


@dataclass
class Sum:
    """One figure of one thing, over the intervals of a loop."""

    amount: float = 0.0
    of: float | None = None  # None: of the seconds that were recorded
    least: float | None = None
    most: float | None = None
    series: Series = field(default_factory=Series)  # (seconds since the loop began, value)

    def add(self, since: float, ratio: Ratio, value: float | None, drawn: bool) -> None:
        self.amount += ratio.amount
        if ratio.of is not None:
            self.of = (self.of or 0.0) + ratio.of
        if value is not None:
            self.least = value if self.least is None else min(self.least, value)
            self.most = value if self.most is None else max(self.most, value)
            if drawn:
                self.series.add(since, value)


@dataclass(frozen=True)
class Usage:
    """What a machine, or one disk, network interface, GPU or share of it, did in the loop of one
    attempt: its figures, each by its mean, its most, ..., which are 0 where it is not known."""

    host: str
    attempt: int
    name: str
    recorded: float  # seconds
    loop: float  # seconds that the loop took
    sums: Mapping[Figure, Sum]

    def knows(self, figure: Figure) -> bool:
        return figure in self.sums

    def mean(self, figure: Figure) -> float:
        total = self.sums.get(figure, Sum())
        return figure.of(Ratio(total.amount, total.of), self.recorded) or 0.0

    def most(self, figure: Figure) -> float:
        return self.sums.get(figure, Sum()).most or 0.0

    def words(self, figure: Figure, which: str = MEAN) -> str:
        """The figure's mean, or its most, ..., with its unit."""
        sums = self.sums.get(figure, Sum())
        values = {MEAN: self.mean(figure), MOST: sums.most, LEAST: sums.least, TOTAL: sums.amount}
        return figure.unit.words(values[which] or 0.0)

    def points(self, figure: Figure) -> Points:
        """As they are drawn."""
        points = self.sums.get(figure, Sum()).series.points
        return [(since, value * figure.unit.drawn) for since, value in points]

    @property
    def is_oversubscribed(self) -> bool:
        """Whether all processors are taken, and this run's threads mostly wait for one."""
        return is_oversubscribed(self.mean(CPU), self.mean(QUEUED))

    @property
    def others_busy(self) -> float | None:
        """The part of the processors that other programs kept busy."""
        known = self.knows(RANKS_CPU)
        return max(0.0, self.mean(CPU) - self.mean(RANKS_CPU)) if known else None

    @property
    def joules(self) -> float | None:
        """Energy of a GPU alone, by its own sensor."""
        return self.mean(GPU_POWER) * self.loop if self.knows(GPU_POWER) else None


@dataclass(frozen=True)
class DiskUsage(Usage):
    holds_data: bool | None  # None: the files do not say which disk holds the data


@dataclass(frozen=True)
class NetworkUsage(Usage):
    """`shared_by` nodes send through this interface (nodes that are processes of one machine): its
    bytes are divided by that number."""

    speed_mbit: float | None
    shared_by: int
    sent_per_step: float | None  # bytes of a node, after the warm-up
    # Address of a peer -> own address, bytes sent there, seconds of sending.
    sent_to: Mapping[str, tuple[str, float, float]]


@dataclass(frozen=True)
class ShareUsage(Usage):
    """An NFS or SMB mount."""

    kind: str


@dataclass(frozen=True)
class ResourceUsage:
    """What each kind of thing did, by attempt and machine, in the order of the machines' names."""

    networks: list[NetworkUsage] = field(default_factory=list)
    disks: list[DiskUsage] = field(default_factory=list)
    shares: list[ShareUsage] = field(default_factory=list)
    gpus: list[Usage] = field(default_factory=list)
    machines: list[Usage] = field(default_factory=list)

    def in_attempt(self, attempt: int | None) -> ResourceUsage:
        """Those of one attempt; none where that is None."""
        kinds = {kind.name: getattr(self, kind.name) for kind in fields(self)}
        chosen = {n: [use for use in uses if use.attempt == attempt] for n, uses in kinds.items()}
        return ResourceUsage(**chosen)

    def machine(self, host: str) -> Usage | None:
        return next((use for use in self.machines if use.host == host), None)


def usage_of(run: Run) -> ResourceUsage:
    """All of a run."""
    windows, usage = loop_windows(run), ResourceUsage()
    for host in sorted(run.machines, key=natural):
        with skip_on_error(run, host):
            loops: dict[int, Loop] = {}
            shared_by = run.nodes_per_machine.get(host, 1)
            for window, mono, line in within(run.machines[host], windows.get(host, [])):
                if window.attempt not in loops:
                    loops[window.attempt] = Loop(host, window, shared_by)
                loops[window.attempt].add(mono, line)
            for attempt in sorted(loops):
                loops[attempt].add_usage(usage)
    return replace(usage, machines=on_shared_machines(run, usage.machines))


@contextlib.contextmanager
def skip_on_error(run: Run, host: str) -> Iterator[None]:
    """An error in one machine's records ends its part alone, with a sentence in `run.missing`."""
    try:
        yield
    except (UserError, MemoryError):  # a limit of the report's own
        raise
    except Exception as error:
        kind = type(error).__name__
        run.missing.append(f"{host}: its records cannot be read ({kind}: {error}).")


USUAL = 1.0  # seconds between two lines
SAMPLED = (DISK, GPU)  # which the recorder gives for the time since the line before; else counters


class Loop:
    """One machine's records in the loop of one attempt, folded as they are read."""

    def __init__(self, host: str, window: Window, shared_by: int):
        self.host, self.window, self.shared_by = host, window, shared_by
        self.last: Sample | None = None
        self.ended = window.start
        self.recorded = 0.0  # seconds
        self.seconds: dict[Thing, float] = defaultdict(float)
        self.sums: dict[Thing, dict[Figure, Sum]] = defaultdict(dict)
        # Its interface, with the time: first, first after the warm-up, and last.
        self.cards: dict[str, tuple[float, Interface]] = {}
        self.data_disk: str | None = None
        self.share_kinds: dict[str, str] = {}

    def add(self, mono: float, line: Entry) -> None:
        length = USUAL if self.last is None else mono - self.ended
        if length <= 0:
            return
        sample = sample_of(line)
        self.recorded += length
        for (kind, name), interval in intervals(self.last, sample, length):
            # What counters gave takes two samples.
            if self.last is not None or kind in SAMPLED:
                self.add_interval((kind, name), mono - self.window.start, interval)
        self.note_names(mono, line)
        self.ended, self.last = mono, sample

    def add_interval(self, thing: Thing, since: float, interval: Interval) -> None:
        kind, _ = thing
        if thing not in self.sums and sum(k == kind for k, _ in self.sums) >= MOST_THINGS:
            return
        self.seconds[thing] += interval.seconds
        sums = self.sums[thing]
        for figure in FIGURES[kind]:
            ratio = figure.read(interval)
            if ratio is None:
                continue
            if figure in (SENT, RECEIVED):
                ratio = Ratio(ratio.amount / self.shared_by)
            if figure not in sums:
                sums[figure] = Sum()
            value = figure.of(ratio, interval.seconds)
            sums[figure].add(since, ratio, value, bool(figure.chart))

    def note_names(self, mono: float, line: Entry) -> None:
        """What a line says beside figures."""
        names = convert_what_fits(line, MachineLine)
        self.data_disk = names.data_disk or self.data_disk
        for name, mount in names.mounts.items():
            if mount.type and (SHARE, name) in self.sums:
                self.share_kinds[name] = mount.type
        if names.card is not None:
            seen = mono, names.card
            self.cards.setdefault("first", seen)
            if mono >= self.window.after_warm_up.start:
                self.cards.setdefault("warm", seen)
            self.cards["last"] = seen

    def add_usage(self, usage: ResourceUsage) -> None:
        """What this machine did, to that of all."""
        for kind, uses in ((MACHINE, usage.machines), (GPU, usage.gpus)):
            uses.extend(self.usage_of(thing) for thing in self.things(kind))
        disks = [
            DiskUsage(
                **vars(self.usage_of(thing, self.recorded)),
                holds_data=thing[1] == self.data_disk if self.data_disk else None,
            )
            for thing in self.things(DISK)
        ]
        moved = (DISK_READ, DISK_WRITTEN, DISK_BUSY)
        used = [disk for disk in disks if disk.holds_data or any(map(disk.mean, moved))]
        usage.disks.extend(
            sorted(used, key=lambda disk: (not disk.holds_data, -disk.mean(DISK_READ)))
        )
        usage.shares.extend(
            ShareUsage(**vars(self.usage_of(thing)), kind=self.share_kinds.get(thing[1], "share"))
            for thing in self.things(SHARE)
        )
        usage.networks.extend(map(self.network_usage, self.things(INTERFACE)))

    def things(self, kind: str) -> list[Thing]:
        """Those of a kind of which anything is known."""
        known = [thing for thing, sums in self.sums.items() if thing[0] == kind and sums]
        return sorted(known, key=lambda thing: natural(thing[1]))

    def usage_of(self, thing: Thing, recorded: float | None = None) -> Usage:
        seconds = self.seconds[thing] if recorded is None else recorded
        window = self.window
        return Usage(self.host, window.attempt, thing[1], seconds, window.seconds, self.sums[thing])

    def network_usage(self, thing: Thing) -> NetworkUsage:
        usage, last = self.usage_of(thing), self.cards["last"][1]
        named = replace(usage, name=last.interface or "?")
        return NetworkUsage(
            **vars(named),
            speed_mbit=last.speed_mbit,
            shared_by=self.shared_by,
            sent_per_step=self.sent_per_step(),
            sent_to=peer_traffic(self.cards["first"][1], last),
        )

    def sent_per_step(self) -> float | None:
        """Bytes that a node sent per step after the warm-up; None where too little of it was
        seen."""
        window = self.window.after_warm_up
        if "warm" not in self.cards or window.seconds <= 0:
            return None
        (began, first), (ended, last) = self.cards["warm"], self.cards["last"]
        steps = window.steps * (ended - began) / window.seconds
        sent = increase(first.tx_bytes, last.tx_bytes) / self.shared_by
        return sent / steps if steps >= 1 else None


def peer_traffic(first: Interface, last: Interface) -> dict[str, tuple[str, float, float]]:
    """NetworkUsage.sent_to, from the samples at both ends of the loop."""
    traffic = {}
    for address, now in last.peers.items():
        if now.source is not None and None not in (now.sent, now.busy):
            before = first.peers.get(address, Peer(sent=0.0, busy=0.0))
            sent, busy = increase(before.sent, now.sent), increase(before.busy, now.busy)
            traffic[address] = (now.source, sent, busy)
    return traffic


def on_shared_machines(run: Run, machines: list[Usage]) -> list[Usage]:
    """Nodes that are processes of one machine have its processors in common: its ranks are those of
    all of them."""
    shared, ran = run.nodes_per_machine, defaultdict[int, float](float)
    for use in machines:
        ran[use.attempt] += use.mean(RANKS_CPU) * (use.host in shared)
    return [
        replace(use, sums={**use.sums, RANKS_CPU: Sum(ran[use.attempt], 1.0)})
        if use.host in shared and use.knows(RANKS_CPU)
        else use
        for use in machines
    ]


def gpu_joules(run: Run, uses: list[Usage]) -> float | None:
    """Energy of all GPUs in all attempts; None where one did not report it or a machine's records
    are missing: its images would count without its energy."""
    trained = {record.attempt for record in run.ranks}
    wanted = {
        (host, entry.attempt)
        for entry in run.attempts
        if entry.attempt in trained
        for host in entry.nodes
    }
    wanted |= {(record.host, record.attempt) for record in run.ranks}
    joules = {(use.host, use.attempt, use.name): use.joules for use in uses}
    measured = [energy for energy in joules.values() if energy is not None]
    complete = len(measured) == len(joules) and wanted <= {
        (host, which) for host, which, _ in joules
    }
    return sum(measured) if measured and complete else None


@dataclass(frozen=True)
class MemoryUsage:
    """One machine in the last attempt: its device, its ranks, the peak bytes of the rank that used
    most, and the number of images that could not be used."""

    host: str
    device: str
    ranks: int
    peak_memory: float | None
    bad_images: float | None


def memory_usage(run: Run) -> list[MemoryUsage]:
    """The machines of the last attempt whose ranks wrote an `end` line; of a script whose steps
    nobody timed all, by what its processes had of the machine's memory."""
    if run.untimed:
        return _of_guards(run)
    last = max((record.attempt for record in run.ranks), default=0)
    ended: dict[str, list[RankRecord]] = {}
    for record in run.ranks:
        if record.attempt == last and record.end:
            ended.setdefault(record.host, []).append(record)
    return [_of_machine(host, records) for host, records in ended.items()]


def _of_guards(run: Run) -> list[MemoryUsage]:
    last = max((attempt for _, attempt in run.exits), default=0)
    ended = {host: entry for (host, which), entry in run.exits.items() if which == last}
    return [
        MemoryUsage(host, "host", len(entry.ranks), max(peaks), None)
        for host, entry in ended.items()
        if (peaks := entry.peak_memory_bytes.values())
    ]


def _of_machine(host: str, records: list[RankRecord]) -> MemoryUsage:
    ends = [record.end for record in records]
    peaks = [end.peak_memory_bytes for end in ends if end.peak_memory_bytes is not None]
    bad = [end.bad_images for end in ends if end.bad_images is not None]
    device = records[0].start.device or "?"
    return MemoryUsage(
        host, device, len(records), max(peaks, default=None), sum(bad) if bad else None
    )
