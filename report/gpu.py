"""What nvidia-smi saw while the training loop ran, from gpu.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from report.files import number
from report.records import Run, natural_number
from report.series import Points, Series
from report.windows import loop_windows, within


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
    temperature: float | None  # celsius, highest
    clock: float | None  # MHz, lowest
    # Name of a figure -> (seconds since the loop began, value)
    series: Mapping[str, Points] = field(default_factory=dict)


MOST_GPUS = 64  # of a machine
FIGURES = ("utilization", "memory_used", "temperature", "power", "clock_sm")


@dataclass
class Figures:
    """Of what was seen of one figure: how often, its sum, the least and the most."""

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


def gpu_use(run: Run) -> list[GpuUse]:
    """One GpuUse per card and attempt."""
    windows = loop_windows(run)
    found = []
    for host, path in run.gpu.items():
        cards: dict[tuple[int, int], dict[str, Figures]] = {}
        for window, mono, line in within(path, windows.get(host, [])):
            index = natural_number(line.get("index")) or 0
            if index >= MOST_GPUS:
                continue
            if (window.attempt, index) not in cards:
                cards[window.attempt, index] = {name: Figures() for name in FIGURES}
            for name, figures in cards[window.attempt, index].items():
                value = number(line.get(name))
                if value is not None:
                    figures.add(mono - window.start, value)
        found += [one_gpu(host, *card, cards[card]) for card in sorted(cards)]
    return found


def one_gpu(host: str, attempt: int, index: int, seen: dict[str, Figures]) -> GpuUse:
    """The figures of one card."""
    return GpuUse(
        host=host,
        attempt=attempt,
        index=index,
        utilization=seen["utilization"].mean or 0.0,
        memory_peak=seen["memory_used"].most or 0.0,
        power=seen["power"].mean,
        temperature=seen["temperature"].most,
        clock=seen["clock_sm"].least,
        series={name: figures.series.points for name, figures in seen.items()},
    )
