"""What GPUs did while the training loop ran, as nvidia-smi recorded it, and what their processes
wrote at the end: peak memory, images that were skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from report.files import Entry, dicts, natural_number, number
from report.read import RankRecord, Run
from report.windows import Points, Series, Window


@dataclass(frozen=True)
class GpuUse:
    """One GPU during the loop of one attempt.

    `utilization` (percent, mean) says only that a kernel was resident, and NCCL's waiting kernel is
    one too: it is shown, and nothing is concluded from it.
    """

    host: str
    attempt: int
    index: int
    utilization: float
    memory_peak: float  # bytes
    power: float | None  # watts, mean
    seconds: float  # that the loop took
    temperature: float | None  # celsius, highest
    clock: float | None  # MHz, lowest
    # Name of a figure -> (seconds since the loop began, value)
    series: Mapping[str, Points] = field(default_factory=dict)

    @property
    def joules(self) -> float | None:
        """Energy of the card alone, by its own sensor."""
        return None if self.power is None else self.power * self.seconds


MOST_GPUS = 64  # of a machine
FIGURES = ("utilization", "memory_used", "temperature", "power", "clock_sm")


@dataclass
class Figures:
    """The samples of one figure: their number, sum, least and most."""

    count: int = 0
    sum: float = 0.0
    least: float | None = None
    most: float | None = None
    series: Series = field(default_factory=Series)

    def add(self, seconds: float, value: float) -> None:
        self.series.add(seconds, value)
        self.count, self.sum = self.count + 1, self.sum + value
        self.least = value if self.least is None else min(self.least, value)
        self.most = value if self.most is None else max(self.most, value)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None


class Gpus:
    """The GPUs of one machine: one GpuUse per card and attempt."""

    def __init__(self, run: Run, host: str):
        self.host = host
        self.lasted: dict[int, float] = {}
        self.cards: dict[tuple[int, int], dict[str, Figures]] = {}

    def add(self, window: Window, mono: float, line: Entry) -> None:
        for sample in dicts(line.get("gpus"))[:MOST_GPUS]:
            card = window.attempt, natural_number(sample.get("index")) or 0
            if card[1] >= MOST_GPUS:
                continue
            self.lasted[window.attempt] = window.seconds
            if card not in self.cards:
                self.cards[card] = {name: Figures() for name in FIGURES}
            for name, figures in self.cards[card].items():
                value = number(sample.get(name))
                if value is not None:
                    figures.add(mono - window.start, value)

    def uses(self) -> list[GpuUse]:
        return [
            gpu_use(self.host, *card, self.lasted[card[0]], self.cards[card])
            for card in sorted(self.cards)
        ]


def gpu_use(
    host: str, attempt: int, index: int, seconds: float, card: dict[str, Figures]
) -> GpuUse:
    """The figures of one card, in a loop of so many seconds."""
    return GpuUse(
        host=host,
        attempt=attempt,
        index=index,
        utilization=card["utilization"].mean or 0.0,
        memory_peak=card["memory_used"].most or 0.0,
        power=card["power"].mean,
        seconds=seconds,
        temperature=card["temperature"].most,
        clock=card["clock_sm"].least,
        series={name: figures.series.points for name, figures in card.items()},
    )


def gpu_joules(run: Run, uses: list[GpuUse]) -> float | None:
    """Energy of all cards in all attempts; None where a card did not report it or a machine's
    records are missing: its images would count without its energy."""
    trained = {record.attempt for record in run.ranks}
    wanted = {
        (host, entry["attempt"])
        for entry in run.attempts
        if entry["attempt"] in trained
        for host in entry["nodes"]
    }
    wanted |= {(record.host, record.attempt) for record in run.ranks}
    joules = {(use.host, use.attempt, use.index): use.joules for use in uses}
    measured = [energy for energy in joules.values() if energy is not None]
    complete = len(measured) == len(joules) and wanted <= {
        (host, which) for host, which, _ in joules
    }
    return sum(measured) if measured and complete else None


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
    """The machines of the last attempt whose ranks wrote an `end` line; of a script whose steps
    nobody timed all, by what its processes had of the machine's memory."""
    if run.untimed:
        return _of_script(run)
    last = max((record.attempt for record in run.ranks), default=0)
    ended: dict[str, list[RankRecord]] = {}
    for record in run.ranks:
        if record.attempt == last and record.end:
            ended.setdefault(record.host, []).append(record)
    return [_of_machine(host, records) for host, records in ended.items()]


def _of_script(run: Run) -> list[MemoryUse]:
    last = max((attempt for _, attempt in run.exits), default=0)
    ended = {host: entry for (host, which), entry in run.exits.items() if which == last}
    return [
        MemoryUse(host, "host", len(entry["ranks"]), max(peaks), None)
        for host, entry in ended.items()
        if (peaks := entry.get("peak_memory_bytes"))
    ]


def _of_machine(host: str, records: list[RankRecord]) -> MemoryUse:
    peaks, bad = (
        [value for record in records if (value := number(record.end.get(key))) is not None]
        for key in ("peak_memory_bytes", "bad_images")
    )
    device = str(records[0].start.get("device", "?"))
    return MemoryUse(
        host, device, len(records), max(peaks, default=None), sum(bad) if bad else None
    )
