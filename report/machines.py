"""What processors, memory and swap did while the training loop ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from report.fields import Fields
from report.files import MOST_RANKS, Entry, count, number, only, positive
from report.network import grown, nodes_per_machine
from report.read import Run
from report.windows import Points, Series, Window


@dataclass(frozen=True)
class MachineUse:
    """One machine during the loop of one attempt. Shares are of the time, or of all processors, and
    at most 1; None: the kernel does not say, or it is not known which process is whose."""

    host: str
    attempt: int
    cores: int
    busy: float  # share of the processors
    ranks_busy: float | None  # that of this run's own processes
    # Of the time in which this run's threads wanted a processor, the share in which they had none.
    queued: float | None
    waited: float | None  # seconds a second that these threads together had none
    memory_total: float  # bytes
    memory_least: float  # bytes that were available at the least
    swapped_in: float  # bytes per second, mean
    swapped_out: float
    memory_pressure: float | None  # share of the time in which some process waited for memory
    # Name of a figure -> (seconds since the loop began, value)
    series: Mapping[str, Points] = field(default_factory=dict)

    @property
    def memory_used(self) -> float:
        """The most that was taken, as a share."""
        return 1 - self.memory_least / self.memory_total if self.memory_total else 0.0

    @property
    def oversubscribed(self) -> bool:
        """Whether all processors are taken, and this run's threads mostly wait for one."""
        return oversubscribed(self.busy, self.queued)

    @property
    def others_busy(self) -> float | None:
        """The share of the processors that other programs kept busy."""
        return None if self.ranks_busy is None else max(0.0, self.busy - self.ranks_busy)


# All processors are taken, and threads wait for one longer than they have one.
FULL, QUEUED = 0.9, 0.5


def oversubscribed(busy: float | None, queued: float | None) -> bool:
    return (busy or 0.0) >= FULL and (queued or 0.0) >= QUEUED


def busy(seconds: float, passed: float, cores: float) -> float:
    """The share of all processors that was busy, of seconds summed over them."""
    return min(1.0, seconds / passed / cores)


COUNTERS = ("cpu_busy", "swapped_in", "swapped_out", "pressure_cpu", "pressure_memory")
STATES = ("memory_total", "memory_available")
SAMPLE: Fields = {
    **dict.fromkeys(COUNTERS, number),
    **dict.fromkeys(STATES, positive),
    "cores": count,
}
RANK: Fields = {"ran": number, "waited": number}
FIGURES = ("cpu", "memory", "swap", "pressure", "queued")


class Processors:
    """Processors and memory of one machine: of each attempt one MachineUse, where two samples or
    more lie within its loop."""

    def __init__(self, run: Run, host: str):
        self.host = host
        self.loops: dict[int, MachineLoop] = {}

    def add(self, window: Window, mono: float, line: Entry) -> None:
        sample = only(SAMPLE, line)
        if "cores" not in sample:
            return
        sample["schedule"] = schedule(line.get("ranks"))
        if window.attempt in self.loops:
            self.loops[window.attempt].add(mono, sample)
        else:
            self.loops[window.attempt] = MachineLoop(window, mono, sample)

    def uses(self) -> list[MachineUse]:
        loops = (self.loops[attempt] for attempt in sorted(self.loops))
        uses = (loop.use(self.host) for loop in loops)
        return [use for use in uses if use is not None]


def schedule(ranks: object) -> dict[str, Entry]:
    """Rank -> the seconds that it ran and waited for a processor."""
    named = list(ranks.items())[:MOST_RANKS] if isinstance(ranks, dict) else []
    entries = {name: only(RANK, entry) for name, entry in named if isinstance(entry, dict)}
    return {name: entry for name, entry in entries.items() if len(entry) == len(RANK)}


@dataclass
class MachineLoop:
    """One machine's samples in one loop, folded: what grew between each two of them."""

    window: Window
    ended: float
    last: Entry
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    counters: set[str] = field(default_factory=set)  # the counters that were there
    ran: float = 0.0
    waited: float = 0.0
    has_ranks: bool = False
    least: float | None = None  # bytes of memory
    series: dict[str, Series] = field(default_factory=lambda: {n: Series() for n in FIGURES})

    def add(self, mono: float, sample: Entry) -> None:
        since, length = mono - self.window.start, mono - self.ended
        if length <= 0:
            return
        grew = {name: grown(self.last, sample, name) for name in COUNTERS}
        self.counters |= {name for name in COUNTERS if name in sample}
        for name, value in grew.items():
            self.sums[name] += value
        self.seconds += length
        ran, waited = self.scheduling(sample)
        self.ran, self.waited = self.ran + ran, self.waited + waited
        cores, total = sample.get("cores", 1), sample.get("memory_total")
        self.series["cpu"].add(since, 100 * busy(grew["cpu_busy"], length, cores))
        moved = grew["swapped_in"] + grew["swapped_out"]
        self.series["swap"].add(since, moved / length / 1e6)
        if "pressure_memory" in sample:
            self.series["pressure"].add(since, 100 * min(1.0, grew["pressure_memory"] / length))
        if ran + waited > 0:
            self.series["queued"].add(since, 100 * waited / (ran + waited))
        available = sample.get("memory_available")
        if total and available is not None:
            self.least = available if self.least is None else min(self.least, available)
            self.series["memory"].add(since, 100 * (1 - min(1.0, available / total)))
        self.ended, self.last = mono, sample

    def scheduling(self, sample: Entry) -> tuple[float, float]:
        """Seconds that all ranks ran and waited since the last sample. A rank that was not in it
        counts as 0: its threads may be older than the loop."""
        before, now = self.last["schedule"], sample["schedule"]
        known = [(before[rank], now[rank]) for rank in now if rank in before]
        self.has_ranks |= bool(known)
        ran, waited = (sum(grown(a, b, key) for a, b in known) for key in ("ran", "waited"))
        return ran, waited

    def use(self, host: str) -> MachineUse | None:
        if self.seconds <= 0:
            return None
        cores = self.last.get("cores", 1)
        wanted = self.ran + self.waited
        pressed = "pressure_memory" in self.counters
        total = self.last.get("memory_total") or 0.0
        return MachineUse(
            host=host,
            attempt=self.window.attempt,
            cores=cores,
            busy=busy(self.sums["cpu_busy"], self.seconds, cores),
            ranks_busy=busy(self.ran, self.seconds, cores) if self.has_ranks else None,
            queued=self.waited / wanted if self.has_ranks and wanted > 0 else None,
            waited=self.waited / self.seconds if self.has_ranks else None,
            memory_total=total,
            memory_least=total if self.least is None else self.least,
            swapped_in=self.sums["swapped_in"] / self.seconds,
            swapped_out=self.sums["swapped_out"] / self.seconds,
            memory_pressure=(
                min(1.0, self.sums["pressure_memory"] / self.seconds) if pressed else None
            ),
            series={name: series.points for name, series in self.series.items()},
        )


def together(run: Run, uses: list[MachineUse]) -> list[MachineUse]:
    """Nodes that are processes of one machine have its processors in common."""
    shared, ran = nodes_per_machine(run), defaultdict[int, float](float)
    for use in uses:
        ran[use.attempt] += (use.ranks_busy or 0.0) * (use.host in shared)
    return [
        replace(use, ranks_busy=min(1.0, ran[use.attempt]))
        if use.host in shared and use.ranks_busy is not None
        else use
        for use in uses
    ]
