"""What disks and file shares did while the training loop ran, from iostat.json and mounts.jsonl."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from report.files import (
    DECODER,
    MOST_ATTEMPTS,
    Entry,
    dicts,
    natural,
    number,
    only,
    open_record,
    parse,
    text,
    time_of,
)
from report.network import grown
from report.records import Run, attempt_of, positive
from report.windows import Window, loop_windows, within


@dataclass(frozen=True)
class DiskUse:
    """One disk of one node during one loop. Rates in MB/s, util in percent, await in ms."""

    host: str
    attempt: int
    device: str
    holds_data: bool | None  # None: the files do not say which disk holds the data
    source: str  # one of SOURCES
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


SOURCES = ("iostat", "diskstats", "digest")  # the last does not tell how long requests take
MOST_DISKS, MOST_MOUNTS = 64, 32  # of a machine
POINTS = 1000  # of a series; beyond twice as many every second one is kept


class Disk:
    """What is folded from the reports on one disk in one loop."""

    def __init__(self) -> None:
        self.count = self.waits = 0
        self.read = self.peak = self.written = self.util = self.wait = 0.0
        self.series: list[tuple[float, float, float]] = []
        self.every = 1  # of how many reports one is in the series

    def add(self, time: float, disk: Entry) -> None:
        read, util = megabytes(disk, "rkB/s"), number(disk.get("util")) or 0.0
        if self.count % self.every == 0:
            self.series.append((time, read, util))
        if len(self.series) > 2 * POINTS:
            self.series, self.every = self.series[::2], 2 * self.every
        self.count += 1
        self.read, self.peak = self.read + read, max(self.peak, read)
        self.written, self.util = self.written + megabytes(disk, "wkB/s"), self.util + util
        if (wait := await_of(disk)) > 0:
            self.wait, self.waits = self.wait + wait, self.waits + 1

    def use(self, host: str, attempt: int, device: str, entry: Entry) -> DiskUse:
        """`entry`: of the attempt in iostat.json."""
        data_disk = entry.get("data_disk")
        return DiskUse(
            host=host,
            attempt=attempt,
            device=device,
            holds_data=device == data_disk if data_disk else None,
            source=entry["source"] if entry.get("source") in SOURCES else SOURCES[0],
            read=self.read / self.count,
            write=self.written / self.count,
            peak_read=self.peak,
            util=self.util / self.count,
            await_ms=self.wait / self.waits if self.waits else 0.0,
            series=tuple(self.series),
        )


def disk_use(run: Run) -> list[DiskUse]:
    """All disks that did anything; within each node the one with the data comes first."""
    windows = loop_windows(run)
    found = []
    for host, path in run.iostat.items():
        uses_in_attempt = {window.attempt: window for window in windows.get(host, [])}
        found += disks_of(host, path, uses_in_attempt, run.missing)
    found += told_disks(run, windows)

    def place(use: DiskUse) -> tuple[int, list[str | int], bool, float]:
        return use.attempt, natural(use.host), not use.holds_data, -use.read

    return sorted(found, key=place)


def disks_of(
    host: str, path: Path, windows: dict[int, Window], missing: list[str]
) -> list[DiskUse]:
    """The disks in one iostat.json; only intervals within the loops count."""
    disks: dict[tuple[int, str], Disk] = {}
    entries: dict[int, Entry] = {}
    for entry, index, report in read_iostat(path, missing):
        attempt = attempt_of(entry)
        window = windows.get(attempt)
        if window is None:
            continue
        start, interval = time_of(entry.get("mono_start")), positive(entry.get("interval")) or 1.0
        start = window.start if start is None else start
        time = start + (index + 1) * interval - window.start
        if not 0 <= time <= window.seconds + interval:
            continue
        entries[attempt] = entry
        for disk in dicts(report.get("disk")):
            key = (attempt, text(disk.get("disk_device")) or "?")
            if key not in disks and len(disks) < MOST_DISKS:
                disks[key] = Disk()
            if key in disks:
                disks[key].add(time, disk)
    uses = [disk.use(host, *key, entries[key[0]]) for key, disk in disks.items()]
    return [use for use in uses if use.holds_data or use.read + use.write + use.util > 0]


TOLD = "disk"  # what a digest tells of has no name: the disk with the data, where it is known


def told_disks(run: Run, windows: dict[str, list[Window]]) -> list[DiskUse]:
    """The disks of machines that only told of theirs (report/digests.py)."""
    found = []
    for host, lines in run.told.items():
        for window in windows.get(host, []):
            disk, before = Disk(), None
            for line in lines:
                if line["attempt"] != window.attempt or not (
                    window.start <= line["mono"] <= window.end
                ):
                    continue
                if before is not None and line["sums"]["read"] is not None:
                    disk.add(line["mono"] - window.start, told_rates(before["sums"], line["sums"]))
                before = line
            if disk.count:
                entry = {"data_disk": TOLD, "source": "digest"}
                found.append(disk.use(host, window.attempt, TOLD, entry))
    return found


def told_rates(before: Entry, now: Entry) -> Entry:
    """As iostat has them, between two lines of sums."""
    grown = {
        name: (now[name] or 0.0) - (before[name] or 0.0) for name in ("read", "written", "busy")
    }
    passed = max(1e-3, (now["seconds"] or 0.0) - (before["seconds"] or 0.0))
    return {
        "rkB/s": grown["read"] / passed / 1024,
        "wkB/s": grown["written"] / passed / 1024,
        "util": min(100.0, 100 * grown["busy"] / passed),
    }


REPORTS = re.compile(r'"statistics"\s*:\s*\[')
BETWEEN = re.compile(r"[\s,]*")
CHUNK = 1 << 18  # characters; no report, and no beginning of an attempt, is longer


def read_iostat(path: Path, missing: list[str]) -> Iterator[tuple[Entry, int, Entry]]:
    """Each report of iostat.json with its number in its attempt and that attempt's entry without
    reports, one after the other: two weeks of them are a gigabyte. What cannot be read ends it,
    with a sentence in `missing`. (sysstat: {hosts: [{statistics: [{disk: [...]}]}]}.)"""
    try:
        with open_record(path) as file:
            yield from reports_in(file)
    except (OSError, ValueError, RecursionError):
        missing.append(f"{'/'.join(path.parts[-2:])} cannot be read as JSON.")


def reports_in(file: TextIO) -> Iterator[tuple[Entry, int, Entry]]:
    """Raises ValueError, and RecursionError, where the file is damaged."""
    rest, opening = file.read(CHUNK), ""
    for _ in range(MOST_ATTEMPTS):
        if len(rest) < CHUNK:
            rest += file.read(CHUNK)
        match = REPORTS.search(rest)
        if match is None:
            parse(opening + rest)  # the end of the document, or one without reports
            return
        # What was opened before the reports is closed, so that it is JSON by itself.
        head = parse(f"{opening}{rest[: match.end()]}]}}]}}}}]}}")
        entries = dicts(head.get("attempts")) if isinstance(head, dict) else []
        if not entries:
            raise ValueError("it has reports of no attempt")
        rest = yield from reports_of(entries[-1], rest[match.end() :], file)
        opening = '{"attempts": [{"sysstat": {"hosts": [{"statistics": ['


def reports_of(
    entry: Entry, rest: str, file: TextIO
) -> Generator[tuple[Entry, int, Entry], None, str]:
    """The reports of one attempt; `rest` is what was read of them. Returns what follows them."""
    index = at = 0
    more = True
    while True:
        if more and len(rest) - at < CHUNK:
            chunk = file.read(CHUNK)
            rest, at, more = rest[at:] + chunk, 0, bool(chunk)
        at = BETWEEN.match(rest, at).end()  # type: ignore[union-attr]
        if rest[at : at + 1] == "]":
            return rest[at:]
        report, at = DECODER.raw_decode(rest, at)
        if isinstance(report, dict):
            yield entry, index, report
        index += 1


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
    for host, path in run.mounts.items():
        ends: dict[tuple[int, str], list[tuple[float, Entry]]] = {}  # the first sample and the last
        for window, mono, line in within(path, windows.get(host, [])):
            sample = only({"type": text, "read_bytes": number}, line)
            key = (window.attempt, text(line.get("mount")) or "?")
            if key in ends:
                ends[key][1:] = [(mono, sample)]
            elif len(ends) < MOST_MOUNTS:
                ends[key] = [(mono, sample)]
        for (attempt, mount), samples in sorted(ends.items()):
            (began, first), (ended, last) = samples[0], samples[-1]
            if ended > began:
                read = grown(first, last, "read_bytes") / (ended - began) / 1e6
                found.append(ShareUse(host, attempt, mount, last.get("type", "share"), read))
    return found
