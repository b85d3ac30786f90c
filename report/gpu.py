"""What nvidia-smi saw while the training loop ran, from gpu.jsonl."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from report.files import Entry, number
from report.records import Run
from report.windows import between, loop_windows


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


def gpu_use(run: Run) -> list[GpuUse]:
    """One GpuUse per card and attempt."""
    windows = loop_windows(run)
    found = []
    for host, samples in run.gpu.items():
        for window in windows.get(host, []):
            inside = between(samples, window)
            for index in sorted({int(number(sample.get("index")) or 0) for sample in inside}):
                mine = [x for x in inside if int(number(x.get("index")) or 0) == index]
                found.append(one_gpu(host, window.attempt, index, mine))
    return found


def one_gpu(host: str, attempt: int, index: int, samples: list[Entry]) -> GpuUse:
    """The figures of one card."""

    def values(key: str) -> list[float]:
        return [value for sample in samples if (value := number(sample.get(key))) is not None]

    return GpuUse(
        host=host,
        attempt=attempt,
        index=index,
        utilization=statistics.fmean(values("utilization") or [0.0]),
        memory_peak=max(values("memory_used"), default=0.0),
        power=statistics.fmean(values("power")) if values("power") else None,
        temperature=max(values("temperature"), default=None),
        clock=min(values("clock_sm"), default=None),
    )
