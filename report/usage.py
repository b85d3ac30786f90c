"""Summarize what machines did during the training loop: the figures of report/figures.py, by one
pass through each machine's records, and the memory that its processes had."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from boundary.run_files import MOST_THINGS, Interface, MachineLine, Peer
from boundary.schema import convert_what_fits
from contract.errors import UserError
from report import figures
from report.figures import DISK, FIGURES, GPU, INTERFACE, MACHINE, MEAN, SHARE, Figure, Ratio, Thing
from report.files import Entry, natural
from report.read import RankRecord, RunRecord
from report.view import UNKNOWN
from report.windows import Points, Series, Window, loop_windows, within


@dataclass
class Sum:
    """One figure of one thing, over the intervals of a loop."""

    amount: float = 0.0
    base: float | None = None  # None: the recorded seconds
    minimum: float | None = None
    maximum: float | None = None
    series: Series = field(default_factory=Series)  # (seconds since the loop began, value)

    def add(self, since: float, ratio: Ratio, value: float | None, drawn: bool) -> None:
        self.amount += ratio.amount
        if ratio.base is not None:
            self.base = (self.base or 0.0) + ratio.base
        if value is not None:
            self.minimum = value if self.minimum is None else min(self.minimum, value)
            self.maximum = value if self.maximum is None else max(self.maximum, value)
            if drawn:
                self.series.add(since, value)


@dataclass(frozen=True)
class Usage:
    """The figures of one thing in the loop of one attempt: of a machine, or of one of its disks,
    network interfaces, GPUs or shares. `mean` and `maximum` of a figure that was not recorded are
    0, and its `words` are UNKNOWN."""

    host: str
    attempt: int
    name: str
    recorded: float  # seconds
    loop: float  # seconds of the loop
    sums: Mapping[Figure, Sum]

    def knows(self, figure: Figure) -> bool:
        return figure in self.sums

    def mean(self, figure: Figure) -> float:
        total = self.sums.get(figure, Sum())
        return figure.divide(Ratio(total.amount, total.base), self.recorded) or 0.0

    def maximum(self, figure: Figure) -> float:
        return self.sums.get(figure, Sum()).maximum or 0.0

    def words(self, figure: Figure, which: str = MEAN) -> str:
        """Write the figure's MEAN, MOST, LEAST or TOTAL with its unit."""
        if not self.knows(figure):
            return UNKNOWN
        sums = self.sums[figure]
        values = {
            MEAN: self.mean(figure),
            figures.MOST: sums.maximum,
            figures.LEAST: sums.minimum,
            figures.TOTAL: sums.amount,
        }
        return figure.unit.words(values[which] or 0.0)

    def points(self, figure: Figure) -> Points:
        """Return the points of the figure's chart, in the unit of charts."""
        points = self.sums.get(figure, Sum()).series.points
        return [(since, value * figure.unit.drawn) for since, value in points]

    @property
    def is_oversubscribed(self) -> bool:
        """True if all processors are in use, and this run's threads mostly wait for one."""
        return figures.is_oversubscribed(self.mean(figures.CPU), self.mean(figures.QUEUED))

    @property
    def others_busy(self) -> float | None:
        """The fraction of the processors that other programs kept busy."""
        if not self.knows(figures.RANKS_CPU):
            return None
        return max(0.0, self.mean(figures.CPU) - self.mean(figures.RANKS_CPU))

    @property
    def joules(self) -> float | None:
        """The energy of a GPU, by its own sensor; the rest of the PC is not included."""
        power = figures.GPU_POWER
        return self.mean(power) * self.loop if self.knows(power) else None


@dataclass(frozen=True)
class DiskUsage(Usage):
    holds_data: bool | None  # None: no record says which disk holds the data


class PeerTraffic(NamedTuple):
    """Traffic to one peer. `source`: the sender's address; `busy`: seconds of sending."""

    source: str
    sent: float  # bytes
    busy: float


@dataclass(frozen=True)
class NetworkUsage(Usage):
    """`shared_by` nodes (processes of one machine) send through this interface, so its bytes are
    divided by that number."""

    speed_mbit: float | None
    shared_by: int
    sent_per_step: float | None  # bytes of a node, after the warm-up
    sent_to: Mapping[str, PeerTraffic]  # by the peer's address


@dataclass(frozen=True)
class ShareUsage(Usage):
    """An NFS or SMB mount."""

    kind: str


@dataclass(frozen=True)
class ResourceUsage:
    """The usage of each kind of thing, in the order of the machines' names, then of attempts."""

    networks: list[NetworkUsage] = field(default_factory=list)
    disks: list[DiskUsage] = field(default_factory=list)
    shares: list[ShareUsage] = field(default_factory=list)
    gpus: list[Usage] = field(default_factory=list)
    machines: list[Usage] = field(default_factory=list)

    def in_attempt(self, attempt: int | None) -> ResourceUsage:
        """Return the usage in one attempt; nothing for None."""
        kinds = {kind.name: getattr(self, kind.name) for kind in fields(self)}
        chosen = {n: [use for use in uses if use.attempt == attempt] for n, uses in kinds.items()}
        return ResourceUsage(**chosen)

    def machine(self, host: str) -> Usage | None:
        return next((use for use in self.machines if use.host == host), None)


def usage_of(run: RunRecord) -> ResourceUsage:
    """Read the records of all machines of a run."""
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
    # Nodes that are processes of one machine share its processors, so each one's ranks are those
    # of all of them.
    shared, cpu = run.nodes_per_machine, figures.RANKS_CPU
    ranks_cpu = defaultdict[int, float](float)
    for use in usage.machines:
        ranks_cpu[use.attempt] += use.mean(cpu) * (use.host in shared)
    machines = [
        replace(use, sums={**use.sums, cpu: Sum(ranks_cpu[use.attempt], 1.0)})
        if use.host in shared and use.knows(cpu)
        else use
        for use in usage.machines
    ]
    return replace(usage, machines=machines)


@contextlib.contextmanager
def skip_on_error(run: RunRecord, host: str) -> Iterator[None]:
    """Turn an error in one machine's records into a sentence in `run.missing`."""
    try:
        yield
    except (UserError, MemoryError):  # a limit of the report itself
        raise
    except Exception as error:
        kind = type(error).__name__
        run.missing.append(f"{host}: its records cannot be read ({kind}: {error}).")


USUAL = 1.0  # seconds between two lines
# The recorder gives values of these for the time since the line before; others are counters.
SAMPLED = (DISK, GPU)


class TimedInterface(NamedTuple):
    mono: float
    counters: Interface


class Loop:
    """One machine's records in the loop of one attempt, folded as they are read."""

    def __init__(self, host: str, window: Window, shared_by: int):
        self.host, self.window, self.shared_by = host, window, shared_by
        self.sample: figures.Sample | None = None  # the newest, taken at `mono`
        self.mono = window.start
        self.recorded = 0.0  # seconds
        self.seconds: dict[Thing, float] = defaultdict(float)
        self.sums: dict[Thing, dict[Figure, Sum]] = defaultdict(dict)
        # The run's interface: at the `start` of the loop, after the warm-up (`warm`), at the `end`.
        self.interface: dict[str, TimedInterface] = {}
        self.data_disk: str | None = None
        self.share_kinds: dict[str, str] = {}

    def add(self, mono: float, line: Entry) -> None:
        """Add one line of the machine."""
        # The first line has no earlier one to measure its interval by.
        length = USUAL if self.sample is None else mono - self.mono
        if length <= 0:
            return
        sample = figures.sample_of(line)
        self.recorded += length
        for (kind, name), interval in figures.intervals(self.sample, sample, length):
            # The growth of a counter needs two samples.
            if self.sample is not None or kind in SAMPLED:
                self.add_interval((kind, name), mono - self.window.start, interval)
        names = convert_what_fits(line, MachineLine)
        self.data_disk = names.data_disk or self.data_disk
        for name, mount in names.mounts.items():
            if mount.type and (SHARE, name) in self.sums:
                self.share_kinds[name] = mount.type
        if names.interface is not None:
            timed = TimedInterface(mono, names.interface)
            self.interface.setdefault("start", timed)
            # In the warm-up a strategy sends more, so its bytes per step are counted after it.
            if mono >= self.window.after_warm_up.start:
                self.interface.setdefault("warm", timed)
            self.interface["end"] = timed
        self.mono, self.sample = mono, sample

    def add_interval(self, thing: Thing, since: float, interval: figures.Interval) -> None:
        kind, _ = thing
        # A machine may record any number of new names, so those of each kind are limited.
        if thing not in self.sums and sum(k == kind for k, _ in self.sums) >= MOST_THINGS:
            return
        self.seconds[thing] += interval.seconds
        sums = self.sums[thing]
        for figure in FIGURES[kind]:
            ratio = figure.read(interval)
            if ratio is None:
                continue
            if figure in (figures.SENT, figures.RECEIVED):
                # The counters are those of all nodes on this machine.
                ratio = Ratio(ratio.amount / self.shared_by)
            if figure not in sums:
                sums[figure] = Sum()
            value = figure.divide(ratio, interval.seconds)
            sums[figure].add(since, ratio, value, bool(figure.chart))

    def add_usage(self, usage: ResourceUsage) -> None:
        """Add the usage of this machine to that of all."""
        for kind, uses in ((MACHINE, usage.machines), (GPU, usage.gpus)):
            uses.extend(self.usage_of(thing) for thing in self.things(kind))
        disks = [
            DiskUsage(
                **vars(self.usage_of(thing, self.recorded)),
                holds_data=thing[1] == self.data_disk if self.data_disk else None,
            )
            for thing in self.things(DISK)
        ]
        activity = (figures.DISK_READ, figures.DISK_WRITTEN, figures.DISK_BUSY)
        # Idle disks are left out, except the one with the data: that it was idle is a finding.
        used = [disk for disk in disks if disk.holds_data or any(map(disk.mean, activity))]
        usage.disks.extend(
            sorted(used, key=lambda disk: (not disk.holds_data, -disk.mean(figures.DISK_READ)))
        )
        usage.shares.extend(
            ShareUsage(**vars(self.usage_of(thing)), kind=self.share_kinds.get(thing[1], "share"))
            for thing in self.things(SHARE)
        )
        usage.networks.extend(map(self.network_usage, self.things(INTERFACE)))

    def things(self, kind: str) -> list[Thing]:
        """Return the things of a kind that have a figure, sorted by name."""
        things = [thing for thing, sums in self.sums.items() if thing[0] == kind and sums]
        return sorted(things, key=lambda thing: natural(thing[1]))

    def usage_of(self, thing: Thing, recorded: float | None = None) -> Usage:
        seconds = self.seconds[thing] if recorded is None else recorded
        window = self.window
        return Usage(self.host, window.attempt, thing[1], seconds, window.seconds, self.sums[thing])

    def network_usage(self, thing: Thing) -> NetworkUsage:
        """Summarize the run's interface."""
        start, end = self.interface["start"].counters, self.interface["end"].counters
        traffic = {}
        for address, peer in end.peers.items():
            if peer.source is not None and peer.sent is not None and peer.busy is not None:
                earlier = start.peers.get(address, Peer(sent=0.0, busy=0.0))
                sent = figures.increase(earlier.sent, peer.sent)
                busy = figures.increase(earlier.busy, peer.busy)
                traffic[address] = PeerTraffic(peer.source, sent, busy)
        return NetworkUsage(
            **vars(replace(self.usage_of(thing), name=end.name or "?")),
            speed_mbit=end.speed_mbit,
            shared_by=self.shared_by,
            sent_per_step=self.sent_per_step(),
            sent_to=traffic,
        )

    def sent_per_step(self) -> float | None:
        """Return the bytes that a node sent per step after the warm-up; None if less than one step
        was recorded."""
        # The counters at two lines stand for the share of steps between them.
        window = self.window.after_warm_up
        if "warm" not in self.interface or window.seconds <= 0:
            return None
        start, end = self.interface["warm"], self.interface["end"]
        steps = window.steps * (end.mono - start.mono) / window.seconds
        sent = figures.increase(start.counters.tx_bytes, end.counters.tx_bytes) / self.shared_by
        return sent / steps if steps >= 1 else None


def gpu_joules(run: RunRecord, uses: list[Usage]) -> float | None:
    """Return the energy of all GPUs in all attempts."""
    # None if a GPU did not report it, or a machine's records are missing: its images would count
    # without its energy.
    trained = {record.attempt for record in run.ranks}
    required = {
        (host, entry.attempt)
        for entry in run.attempts
        if entry.attempt in trained
        for host in entry.nodes
    }
    required |= {(record.host, record.attempt) for record in run.ranks}
    joules = {(use.host, use.attempt, use.name): use.joules for use in uses}
    measured = [energy for energy in joules.values() if energy is not None]
    recorded = {(host, attempt) for host, attempt, _ in joules}
    # A sum over some of the GPUs would look like the energy of all.
    complete = len(measured) == len(joules) and required <= recorded
    return sum(measured) if measured and complete else None


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of one machine in the last attempt."""

    host: str
    device: str
    ranks: int
    peak_memory: float | None  # bytes of the rank that used most
    bad_images: float | None  # images that could not be used


def memory_usage(run: RunRecord) -> list[MemoryUsage]:
    """Return the memory of each machine of the last attempt whose ranks ended in order."""
    if run.untimed:
        # A script's ranks write no `end` line, but their guards recorded the memory of processes.
        newest = max((attempt for _, attempt in run.exits), default=0)
        return [
            MemoryUsage(host, "host", len(entry.ranks), max(entry.peak_memory_bytes.values()), None)
            for (host, attempt), entry in run.exits.items()
            if attempt == newest and entry.peak_memory_bytes
        ]
    newest = max((record.attempt for record in run.ranks), default=0)
    by_host: dict[str, list[RankRecord]] = {}
    for record in run.ranks:
        if record.attempt == newest and record.end:
            by_host.setdefault(record.host, []).append(record)
    uses = []
    for host, records in by_host.items():
        ends = [record.end for record in records]
        peaks = [end.peak_memory_bytes for end in ends if end.peak_memory_bytes is not None]
        bad = [end.bad_images for end in ends if end.bad_images is not None]
        device = records[0].start.device or "?"
        peak = max(peaks, default=None)
        uses.append(MemoryUsage(host, device, len(records), peak, sum(bad) if bad else None))
    return uses
