"""The part of a live screen that needs a wide terminal: the parts of a step as bars, and each
machine's last seconds as lines of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contract.text import percent, three_digits
from report.bottleneck import parts
from report.network import grown
from report.read import Machine
from report.status import Progress, sample_of

WIDE = 120  # columns from which on there is room
BLOCKS, LETTERS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"  # of a terminal with and without them
NAMES = {
    "data": "images",
    "h2d": "copy",
    "compute": "computing",
    "network": "network",
    "straggler": "slower ranks",
    "checkpoint": "saving",
}
INDENT = 16


def wide_lines(
    progress: Progress, machines: Mapping[str, Machine], width: int, blocks: bool = True
) -> list[str]:
    """The lines below a run's figures; [] where the screen has fewer than WIDE columns."""
    if width < WIDE:
        return []
    letters = BLOCKS if blocks else LETTERS
    charts = step_bars(progress, width, letters[-1]), sparklines(machines, width, letters)
    return [line for lines in charts if lines for line in ("", *lines)]


def step_bars(progress: Progress, width: int, full: str) -> list[str]:
    if progress.ruling is None:
        return []
    room = width - INDENT - 10
    return [
        f"  {name:<{INDENT - 3}} {percent(part):>6}  {full * round(room * min(1.0, part))}".rstrip()
        for key, part in parts(progress.ruling.step).items()
        for name in [NAMES[key].replace("images", "samples" if progress.script else "images")]
    ]


def sparklines(machines: Mapping[str, Machine], width: int, letters: str) -> list[str]:
    """A line for each machine: processors, card and busiest disk, one character a second."""
    room = (width - INDENT) // 3 - 2
    rows = {host: histories(machine, room) for host, machine in machines.items()}
    rows = {host: row for host, row in rows.items() if any(row)}
    if not rows:
        return []
    most = max((value for _, sent, _ in rows.values() for value in sent), default=0.0)
    heads = ("CPU, to 100 %", f"sent, to {three_digits(most / 1e6)} MB/s", "disk, to 100 %")
    lines = [" " * INDENT + "  ".join(f"{head:<{room}}" for head in heads).rstrip()]
    for host, row in rows.items():
        drawn = (spark(values, top, letters) for values, top in zip(row, (100.0, most, 100.0)))
        named = f"  {host[: INDENT - 3]:<{INDENT - 2}}"
        lines.append((named + "  ".join(f"{line:<{room}}" for line in drawn)).rstrip())
    return lines


def histories(machine: Machine, room: int) -> tuple[list[float], list[float], list[float]]:
    """Percent of the processors, bytes a second and percent of the busiest disk."""
    samples = [sample_of(line) for line in list(machine.recent)[-room - 1 :] if "mono" in line]
    cpu, sent, disk = [], [], []
    for first, last in zip(samples, samples[1:]):
        passed, cores = last.get("mono", 0.0) - first.get("mono", 0.0), last.get("cores")
        if passed <= 0:
            continue
        cpu.append(100 * grown(first, last, "cpu_busy") / passed / cores if cores else 0.0)
        sent.append(grown(first, last, "tx_bytes") / passed)
        disk.append(max((entry.get("util", 0.0) for entry in last.get("disks") or []), default=0.0))
    return cpu, sent, disk


def spark(values: Sequence[float], top: float, letters: str) -> str:
    steps = len(letters) - 1
    heights = (min(1.0, max(0.0, value / top)) if top > 0 else 0.0 for value in values)
    return "".join(letters[round(height * steps)] for height in heights)


def slow_hosts(progress: Progress) -> set[str]:
    """The machines that the others wait for."""
    ruling = progress.ruling
    if progress.hang is not None:
        return {host for host, _ in progress.hang.ranks}
    if ruling is None or ruling.slower is None:
        return set()
    return {rank.host for rank in ruling.step.ranks if rank.rank == ruling.slower}
