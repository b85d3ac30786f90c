"""Sum up what machines did during the training loop, by one pass through each machine's records.

`usage_of` returns the figures of report/figures.py for each machine, disk, network interface, GPU
and share; `memory_usage` returns the memory of processes. analysis.py and measurements.py call
them. This module concludes nothing from the figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from boundary.run_files import MOST_DEVICES, Interface, MachineLine, Peer
from boundary.schema import convert_what_fits
from report import figures
from report.figures import DISK, FIGURES, GPU, INTERFACE, MACHINE, MEAN, SHARE, Figure, Ratio, Thing
from report.files import Entry, natural
from report.read import RankRecord, RunRecord, skip_damaged_records
from report.view import UNKNOWN
from report.windows import Points, Series, Window, loop_windows, within


@dataclass
class Sum:
    """A figure of a machine, or of one of its things, over the intervals of a loop. `amount` and
    `base` are the sums of these fields of figures.Ratio."""

    amount: float = 0.0
    base: float | None = None  # None: the recorded seconds
    minimum: float | None = None
    maximum: float | None = None
    series: Series = field(default_factory=Series)  # (seconds since the loop began, value)

    def add(self, since: float, ratio: Ratio, value: float | None, drawn: bool) -> None:
        """Add an interval that ended `since` seconds after the loop began. With `drawn`, the value
        becomes a point of the chart."""
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
    """The figures of a machine, or of one of its disks, network interfaces, GPUs or shares, in the
    loop of one attempt. If a figure was not recorded, its `mean` and `maximum` are 0, and its
    `words` are UNKNOWN."""

    host: str
    attempt: int
    name: str  # such as `sda`; "" for a machine
    recorded: float  # seconds of the intervals that were recorded
    loop: float  # seconds of the loop, recorded or not
    sums: Mapping[Figure, Sum]

    def knows(self, figure: Figure) -> bool:
        return figure in self.sums

    def mean(self, figure: Figure) -> float:
        total = self.sums.get(figure, Sum())
        return figure.divide(Ratio(total.amount, total.base), self.recorded) or 0.0

    def maximum(self, figure: Figure) -> float:
        return self.sums.get(figure, Sum()).maximum or 0.0

    def words(self, figure: Figure, which: str = MEAN) -> str:
        """Write the figure's MEAN, MOST, LEAST or TOTAL (`which`) in its unit."""
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
    """The traffic from a machine to one of its peers."""

    source: str  # the machine's own address
    sent: float  # bytes
    busy: float  # seconds in which the machine had data and its peer had room for them


@dataclass(frozen=True)
class NetworkUsage(Usage):
    """The usage of the run's network interface. If `shared_by` nodes (processes of one machine)
    send through the interface, its bytes are divided by that number."""

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
    """Read the records of all machines of a run, and return what the machines did in its loops."""
    windows, usage = loop_windows(run), ResourceUsage()
    for host in sorted(run.machines, key=natural):
        with skip_damaged_records(host, run.missing.append):
            loops: dict[int, Loop] = {}
            shared_by = run.nodes_per_machine.get(host, 1)
            for window, mono, line in within(run.machines[host], windows.get(host, [])):
                if window.attempt not in loops:
                    loops[window.attempt] = Loop(host, window, shared_by)
                loops[window.attempt].add(mono, line)
            for attempt in sorted(loops):
                loops[attempt].add_usage(usage)
    # Nodes that are processes of one machine share its processors, but each node records only the
    # processor time of its ranks. Each node therefore gets the sum over all these nodes. The base
    # 1.0 makes the mean equal to the sum.
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


USUAL_INTERVAL = 1.0  # seconds between two lines
# The recorder itself computes the values of disks and GPUs for the time since its previous line, so
# a single line has figures. Most values of other things are counters, whose growth needs two lines.
SAMPLED = (DISK, GPU)


class TimedInterface(NamedTuple):
    mono: float
    counters: Interface


class Loop:
    """Sums up the records of a machine in the loop of one attempt, line by line."""

    def __init__(self, host: str, window: Window, shared_by: int):
        self.host, self.window, self.shared_by = host, window, shared_by
        self.sample: figures.Sample | None = None  # of the newest line, which has the time `mono`
        self.mono = window.start
        # Seconds of all lines, and of the lines that have the thing: a line omits idle disks.
        self.recorded = 0.0
        self.seconds: dict[Thing, float] = defaultdict(float)
        self.sums: dict[Thing, dict[Figure, Sum]] = defaultdict(dict)
        # The run's interface, by the moment: `start` and `end` of the loop, and `warm` at the end
        # of the strategy's warm-up.
        self.interface: dict[str, TimedInterface] = {}
        self.data_disk: str | None = None
        self.share_kinds: dict[str, str] = {}

    def add(self, mono: float, line: Entry) -> None:
        """Add one line of the machine."""
        # The first line has no line before it, so its interval is taken to be USUAL_INTERVAL.
        length = USUAL_INTERVAL if self.sample is None else mono - self.mono
        if length <= 0:
            return
        sample = figures.sample_of(line)
        self.recorded += length
        since = mono - self.window.start
        for thing, interval in figures.intervals(self.sample, sample, length):
            if self.sample is None and thing.kind not in SAMPLED:
                continue
            # A machine may record any number of new names, so each kind has at most MOST_DEVICES.
            is_new = thing not in self.sums
            kinds = (recorded.kind for recorded in self.sums)
            if is_new and sum(kind == thing.kind for kind in kinds) >= MOST_DEVICES:
                continue
            self.seconds[thing] += interval.seconds
            sums = self.sums[thing]
            for figure in FIGURES[thing.kind]:
                ratio = figure.read(interval)
                if ratio is None:
                    continue
                # The counters have the bytes of all nodes on this machine.
                if figure in (figures.SENT, figures.RECEIVED):
                    ratio = Ratio(ratio.amount / self.shared_by)
                if figure not in sums:
                    sums[figure] = Sum()
                value = figure.divide(ratio, interval.seconds)
                sums[figure].add(since, ratio, value, bool(figure.chart))
        machine_line = convert_what_fits(line, MachineLine)
        self.data_disk = machine_line.data_disk or self.data_disk
        for name, mount in machine_line.mounts.items():
            if mount.type and Thing(SHARE, name) in self.sums:
                self.share_kinds[name] = mount.type
        if machine_line.interface is not None:
            timed = TimedInterface(mono, machine_line.interface)
            self.interface.setdefault("start", timed)
            # In the warm-up a strategy sends more bytes, so only the later bytes count per step.
            if mono >= self.window.after_warm_up.start:
                self.interface.setdefault("warm", timed)
            self.interface["end"] = timed
        self.mono, self.sample = mono, sample

    def add_usage(self, usage: ResourceUsage) -> None:
        """Append the usage of this machine and of its things to `usage`."""
        for kind, uses in ((MACHINE, usage.machines), (GPU, usage.gpus)):
            uses.extend(self.usage_of(thing) for thing in self.things(kind))
        # A line omits idle disks, so the means of disks are over all recorded seconds.
        disks = [
            DiskUsage(
                **vars(self.usage_of(thing, self.recorded)),
                holds_data=thing.name == self.data_disk if self.data_disk else None,
            )
            for thing in self.things(DISK)
        ]
        activity = (figures.DISK_READ, figures.DISK_WRITTEN, figures.DISK_BUSY)
        # The report shows no idle disks, except the disk with the data: that it was idle is news.
        shown = [disk for disk in disks if disk.holds_data or any(map(disk.mean, activity))]
        usage.disks.extend(
            sorted(shown, key=lambda disk: (not disk.holds_data, -disk.mean(figures.DISK_READ)))
        )
        usage.shares.extend(
            ShareUsage(**vars(self.usage_of(thing)), kind=self.share_kinds.get(thing.name, "share"))
            for thing in self.things(SHARE)
        )
        # A machine records only the interface of the run, so this is one thing at most.
        for thing in self.things(INTERFACE):
            start, end = self.interface["start"].counters, self.interface["end"].counters
            traffic = {}
            for address, peer in end.peers.items():
                if peer.source is not None and peer.sent is not None and peer.busy is not None:
                    # For a peer that is not in the first line, the counters start at 0.
                    earlier = start.peers.get(address, Peer(sent=0.0, busy=0.0))
                    sent = figures.increase(earlier.sent, peer.sent)
                    busy = figures.increase(earlier.busy, peer.busy)
                    traffic[address] = PeerTraffic(peer.source, sent, busy)
            usage.networks.append(
                NetworkUsage(
                    **vars(replace(self.usage_of(thing), name=end.name or "?")),
                    speed_mbit=end.speed_mbit,
                    shared_by=self.shared_by,
                    sent_per_step=self.sent_per_step(),
                    sent_to=traffic,
                )
            )

    def things(self, kind: str) -> list[Thing]:
        """Return the things of a kind with at least one figure, sorted by name."""
        things = [thing for thing, sums in self.sums.items() if thing.kind == kind and sums]
        return sorted(things, key=lambda thing: natural(thing.name))

    def usage_of(self, thing: Thing, recorded: float | None = None) -> Usage:
        """Return the usage of a thing over `recorded` seconds; by default, over its intervals."""
        return Usage(
            host=self.host,
            attempt=self.window.attempt,
            name=thing.name,
            recorded=self.seconds[thing] if recorded is None else recorded,
            loop=self.window.seconds,
            sums=self.sums[thing],
        )

    def sent_per_step(self) -> float | None:
        """Return the bytes that a node sent per step after the warm-up; None if less than one step
        was recorded."""
        # The number of steps between two lines follows from their times, because all steps after
        # the warm-up are taken to be equally long.
        window = self.window.after_warm_up
        if "warm" not in self.interface or window.seconds <= 0:
            return None
        start, end = self.interface["warm"], self.interface["end"]
        steps = window.steps * (end.mono - start.mono) / window.seconds
        sent = figures.increase(start.counters.tx_bytes, end.counters.tx_bytes) / self.shared_by
        return sent / steps if steps >= 1 else None


def gpu_joules(run: RunRecord, uses: list[Usage]) -> float | None:
    """Return the energy of all GPUs in all attempts. Return None if the energy of a GPU is missing,
    because a partial sum would look like the energy of all."""
    trained = {record.attempt for record in run.ranks}
    # The energy of all these machines must be known: (host, attempt). A rank may have trained on a
    # machine that no attempt names, if the run was started by hand.
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
    is_complete = len(measured) == len(joules) and required <= recorded
    return sum(measured) if measured and is_complete else None


@dataclass(frozen=True)
class MemoryUsage:
    """The memory of one machine in the last attempt."""

    host: str
    device: str  # of the ranks; `host` if only the memory of processes is known
    ranks: int  # how many
    peak_memory: float | None  # bytes of the rank that used most
    bad_images: float | None  # images that could not be read


def memory_usage(run: RunRecord) -> list[MemoryUsage]:
    """Return the memory of each machine of the last attempt whose ranks ended in order."""
    # The ranks of an untimed script write no `end` line, but guards record the memory of processes.
    if run.untimed:
        newest = max((attempt for _, attempt in run.exits), default=0)
        return [
            MemoryUsage(
                host=host,
                device="host",
                ranks=len(entry.ranks),
                peak_memory=max(entry.peak_memory_bytes.values()),
                bad_images=None,
            )
            for (host, attempt), entry in run.exits.items()
            if attempt == newest and entry.peak_memory_bytes
        ]
    by_host: dict[str, list[RankRecord]] = {}
    for record in run.ranks_in(run.newest_attempt):
        if record.end:
            by_host.setdefault(record.host, []).append(record)
    uses = []
    for host, records in by_host.items():
        ends = [record.end for record in records]
        peaks = [end.peak_memory_bytes for end in ends if end.peak_memory_bytes is not None]
        bad = [end.bad_images for end in ends if end.bad_images is not None]
        uses.append(
            MemoryUsage(
                host=host,
                device=records[0].start.device or "?",
                ranks=len(records),
                peak_memory=max(peaks, default=None),
                bad_images=sum(bad) if bad else None,
            )
        )
    return uses
