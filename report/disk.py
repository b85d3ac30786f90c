"""What disks and file shares did while the training loop ran, from iostat.json and mounts.jsonl."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from report.files import Entry, dicts, natural, number
from report.network import grown
from report.records import Run, attempt_of
from report.windows import Window, between, loop_windows


@dataclass(frozen=True)
class DiskUse:
    """One disk of one node during one loop. Rates in MB/s, util in percent, await in ms."""

    host: str
    attempt: int
    device: str
    holds_data: bool | None  # None: the files do not say which disk holds the data
    source: str  # "iostat" or "diskstats"
    read: float
    write: float
    peak_read: float
    util: float
    await_ms: float
    # (seconds since the loop began, MB/s read, percent busy)
    series: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class ShareUse:
    """One NFS or SMB mount of one node during the loop: MB/s read."""

    host: str
    attempt: int
    mount: str
    kind: str
    read: float


def disk_use(run: Run) -> list[DiskUse]:
    """All disks that did anything; within each node the one with the data comes first."""
    windows = loop_windows(run)
    found = []
    for host, attempts in run.iostat.items():
        for entry in attempts:
            for window in windows.get(host, []):
                if window.attempt == attempt_of(entry):
                    found += disks_of(host, entry, window)

    def place(use: DiskUse) -> tuple[int, list[str | int], bool, float]:
        return use.attempt, natural(use.host), not use.holds_data, -use.read

    return sorted(found, key=place)


def disks_of(host: str, entry: Entry, window: Window) -> list[DiskUse]:
    """The disks in one iostat document; only intervals within the loop count."""
    start, interval = number(entry.get("mono_start")), number(entry.get("interval")) or 1.0
    start = window.start if start is None else start
    rows: dict[str, list[tuple[float, Entry]]] = {}
    for index, report in enumerate(statistics_of(entry)):
        time = start + (index + 1) * interval - window.start
        if 0 <= time <= window.seconds + interval:
            for disk in dicts(report.get("disk")):
                rows.setdefault(str(disk.get("disk_device", "?")), []).append((time, disk))
    data_disk = entry.get("data_disk")
    source = "diskstats" if entry.get("source") == "diskstats" else "iostat"
    uses = [
        one_disk(
            host, window.attempt, device, device == data_disk if data_disk else None, source, x
        )
        for device, x in rows.items()
    ]
    return [use for use in uses if use.holds_data or use.read + use.write + use.util > 0]


def statistics_of(entry: Entry) -> list[Entry]:
    """The reports of an iostat document. (sysstat: {hosts: [{statistics: [{disk: [...]}]}]}.)"""
    document = entry.get("sysstat")
    hosts = dicts(document.get("hosts")) if isinstance(document, dict) else []
    return dicts(hosts[0].get("statistics")) if hosts else []


def one_disk(
    host: str,
    attempt: int,
    device: str,
    holds_data: bool | None,
    source: str,
    rows: list[tuple[float, Entry]],
) -> DiskUse:
    """Means and series over the rows (time, disk)."""
    reads = [megabytes(disk, "rkB/s") for _, disk in rows]
    waits = [wait for _, disk in rows if (wait := await_of(disk)) > 0]
    return DiskUse(
        host=host,
        attempt=attempt,
        device=device,
        holds_data=holds_data,
        source=source,
        read=statistics.fmean(reads),
        write=statistics.fmean(megabytes(disk, "wkB/s") for _, disk in rows),
        peak_read=max(reads),
        util=statistics.fmean(number(disk.get("util")) or 0.0 for _, disk in rows),
        await_ms=statistics.fmean(waits) if waits else 0.0,
        series=tuple(
            (time, megabytes(disk, "rkB/s"), number(disk.get("util")) or 0.0) for time, disk in rows
        ),
    )


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


def share_use(run: Run) -> list[ShareUse]:
    """All NFS and SMB mounts with at least two samples within a loop."""
    found = []
    windows = loop_windows(run)
    for host, samples in run.mounts.items():
        for window in windows.get(host, []):
            inside = between(samples, window)
            for mount in sorted({str(sample.get("mount")) for sample in inside}):
                mine = [sample for sample in inside if str(sample.get("mount")) == mount]
                seconds = mine[-1]["mono"] - mine[0]["mono"]
                if seconds > 0:
                    read = grown(mine[0], mine[-1], "read_bytes") / seconds / 1e6
                    kind = str(mine[-1].get("type", "share"))
                    found.append(ShareUse(host, window.attempt, mount, kind, read))
    return found
