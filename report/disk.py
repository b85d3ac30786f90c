"""What disks and file shares did while the training loop ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from report.files import Entry, number, only, text
from report.network import grown
from report.read import Run
from report.windows import Points, Series, Window


@dataclass(frozen=True)
class DiskUse:
    """One disk of one node during one loop. Rates in MB/s, util in percent, await in ms."""

    host: str
    attempt: int
    device: str
    holds_data: bool | None  # None: the files do not say which disk holds the data
    read: float
    write: float
    peak_read: float
    util: float
    await_ms: float
    # "read" (MB/s) and "util" (percent) -> (seconds since the loop began, value)
    series: Mapping[str, Points] = field(default_factory=dict)


@dataclass(frozen=True)
class ShareUse:
    """One NFS or SMB mount of one node during the loop: MB/s read."""

    host: str
    attempt: int
    mount: str
    kind: str
    read: float


MOST_DISKS, MOST_MOUNTS = 64, 32  # of a machine
USUAL = 1.0  # seconds between two lines


class Disk:
    """The rates of one disk in one loop, summed up."""

    def __init__(self) -> None:
        self.waits = 0
        self.read = self.peak = self.written = self.util = self.wait = 0.0
        self.series = {"read": Series(), "util": Series()}

    def add(self, time: float, passed: float, disk: Entry) -> None:
        """The rates of the last `passed` seconds."""
        read, util = megabytes(disk, "rkB/s"), number(disk.get("util")) or 0.0
        self.series["read"].add(time, read)
        self.series["util"].add(time, util)
        self.read, self.peak = self.read + passed * read, max(self.peak, read)
        self.written += passed * megabytes(disk, "wkB/s")
        self.util += passed * util
        if (wait := await_of(disk)) > 0:
            self.wait, self.waits = self.wait + wait, self.waits + 1

    def use(
        self, host: str, attempt: int, device: str, seconds: float, data_disk: str | None
    ) -> DiskUse:
        """`seconds`: of the loop that were recorded; a disk that did nothing has no rates then."""
        return DiskUse(
            host=host,
            attempt=attempt,
            device=device,
            holds_data=device == data_disk if data_disk else None,
            read=self.read / seconds,
            write=self.written / seconds,
            peak_read=self.peak,
            util=self.util / seconds,
            await_ms=self.wait / self.waits if self.waits else 0.0,
            series={name: series.points for name, series in self.series.items()},
        )


class Disks:
    """The disks of one machine: those that did anything, the one with the data first."""

    def __init__(self, run: Run, host: str):
        self.host = host
        self.disks: dict[tuple[int, str], Disk] = {}
        self.data_disk: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        self.last: dict[int, float] = {}

    def add(self, window: Window, mono: float, line: Entry) -> None:
        rates, attempt = line.get("disks"), window.attempt
        if not isinstance(rates, dict):
            return
        passed = mono - self.last.get(attempt, mono - USUAL) or USUAL
        self.last[attempt] = mono
        self.seconds[attempt] = self.seconds.get(attempt, 0.0) + passed
        if data_disk := text(line.get("data_disk")):
            self.data_disk[attempt] = data_disk
        for device, disk in list(rates.items())[:MOST_DISKS]:
            key = attempt, device
            if key not in self.disks and len(self.disks) < MOST_DISKS:
                self.disks[key] = Disk()
            if key in self.disks and isinstance(disk, dict):
                self.disks[key].add(mono - window.start, passed, disk)

    def uses(self) -> list[DiskUse]:
        uses = [
            disk.use(self.host, *key, self.seconds[key[0]], self.data_disk.get(key[0]))
            for key, disk in self.disks.items()
        ]
        busy = [use for use in uses if use.holds_data or use.read + use.write + use.util > 0]
        return sorted(busy, key=lambda use: (use.attempt, not use.holds_data, -use.read))


def megabytes(disk: Entry, key: str) -> float:
    """A kB/s figure of iostat (units of 1024 bytes) as MB/s."""
    return (number(disk.get(key)) or 0.0) * 1024 / 1e6


def await_of(disk: Entry) -> float:
    """Mean milliseconds a request took: reads and writes weighted by their number."""
    total = weighted = 0.0
    for rate, wait in (("r/s", "r_await"), ("w/s", "w_await")):
        count = number(disk.get(rate)) or 0.0
        total += count
        weighted += count * (number(disk.get(wait)) or 0.0)
    return weighted / total if total else 0.0


class Shares:
    """The NFS and SMB mounts of one machine with two samples or more within a loop."""

    def __init__(self, run: Run, host: str):
        self.host = host
        # The first sample and the last.
        self.ends: dict[tuple[int, str], list[tuple[float, Entry]]] = {}

    def add(self, window: Window, mono: float, line: Entry) -> None:
        mounts = line.get("mounts")
        if not isinstance(mounts, dict):
            return
        for mount, counted in list(mounts.items())[:MOST_MOUNTS]:
            if not isinstance(counted, dict):
                continue
            sample = only({"type": text, "read_bytes": number}, counted)
            key = window.attempt, mount
            if key in self.ends:
                self.ends[key][1:] = [(mono, sample)]
            elif len(self.ends) < MOST_MOUNTS:
                self.ends[key] = [(mono, sample)]

    def uses(self) -> list[ShareUse]:
        uses = []
        for (attempt, mount), samples in sorted(self.ends.items()):
            (began, first), (ended, last) = samples[0], samples[-1]
            if ended > began:
                read = grown(first, last, "read_bytes") / (ended - began) / 1e6
                uses.append(ShareUse(self.host, attempt, mount, last.get("type", "share"), read))
        return uses
