"""What processes report at their end: the memory they used and the images they skipped."""

from __future__ import annotations

from dataclasses import dataclass

from report.files import number
from report.records import RankRecord, Run


@dataclass(frozen=True)
class MemoryUse:
    """One machine in the last attempt: its device, its ranks, the peak bytes of the rank that used
    most, and the number of images that could not be used."""

    host: str
    device: str
    ranks: int
    peak_memory: float | None
    bad_images: float | None


def memory_use(run: Run) -> list[MemoryUse]:
    """The machines of the last attempt whose ranks wrote an `end` line."""
    last = max((record.attempt for record in run.ranks), default=0)
    ended: dict[str, list[RankRecord]] = {}
    for record in run.ranks:
        if record.attempt == last and record.end:
            ended.setdefault(record.host, []).append(record)
    return [_of_machine(host, records) for host, records in ended.items()]


def _of_machine(host: str, records: list[RankRecord]) -> MemoryUse:
    peaks, bad = (
        [value for record in records if (value := number(record.end.get(key))) is not None]
        for key in ("peak_memory_bytes", "bad_images")
    )
    device = str(records[0].start.get("device", "?"))
    return MemoryUse(
        host, device, len(records), max(peaks, default=None), sum(bad) if bad else None
    )
