"""The report's tables, each once: the terminal and the page show the same columns and rows.

A column is a heading and a function that words its cell; to add a column, add it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from report import formulas
from report.devices import GpuUse, MemoryUse
from report.disk import DiskUse
from report.layout import link, percent, size, three_digits
from report.machines import MachineUse
from report.network import NetworkUse
from report.progress import Epoch

UNKNOWN = "?"
NAMES = 2  # the first columns of each table name what the row is about


class Column(NamedTuple):
    """`words` gives the cell of a row."""

    head: str
    words: Callable[[Any], str]


@dataclass(frozen=True)
class Table:
    """`rows` are as wide as `heads`; the first NAMES columns are names, the others figures."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def made(columns: tuple[Column, ...], uses: Sequence[Any]) -> Table:
    """One row for each of `uses`."""
    rows = (tuple(column.words(use) for column in columns) for use in uses)
    return Table(tuple(column.head for column in columns), tuple(rows))


def known(value: float | None, words: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else words(value)


def share_of_link(sent: float, mbit: float) -> str:
    """Bytes per second as a fraction of what a link carries."""
    return percent(sent / formulas.line_rate(mbit))


DISKS = (
    Column("node", lambda use: use.host),
    Column("disk", lambda use: use.device + (" (data)" if use.holds_data else "")),
    Column("MB/s read", lambda use: three_digits(use.read)),
    Column("peak", lambda use: three_digits(use.peak_read)),
    Column("MB/s written", lambda use: three_digits(use.write)),
    Column("busy", lambda use: f"{use.util:.0f} %"),
    Column(
        "a request",
        lambda use: f"{three_digits(use.await_ms)} ms",
    ),
)
# What was sent; "of link" is the fraction of what the link can carry.
NETWORKS = (
    Column("node", lambda use: use.host),
    Column("card", lambda use: use.interface),
    Column("link", lambda use: known(use.speed_mbit, link)),
    Column("MB/s", lambda use: three_digits(use.sent / 1e6)),
    Column("peak", lambda use: three_digits(use.peak_sent / 1e6)),
    Column(
        "of link", lambda use: known(use.speed_mbit, lambda mbit: share_of_link(use.sent, mbit))
    ),
    Column("a step", lambda use: known(use.sent_per_step, size)),
    Column("retransmits", lambda use: f"{use.retransmits:,}"),
    Column("drops", lambda use: f"{use.dropped:,}"),
)
# "queued": of the time in which the run's threads wanted a processor, when they had none.
MACHINES = (
    Column("node", lambda use: use.host),
    Column("CPUs", lambda use: str(use.cores)),
    Column("busy", lambda use: percent(use.busy)),
    Column("by others", lambda use: known(use.others_busy, percent)),
    Column("queued", lambda use: known(use.queued, percent)),
    Column("memory", lambda use: size(use.memory_total)),
    Column("used", lambda use: percent(use.memory_used)),
    Column("swap MB/s", lambda use: three_digits((use.swapped_in + use.swapped_out) / 1e6)),
    Column("pressure", lambda use: known(use.memory_pressure, percent)),
)
GPUS = (
    Column("node", lambda use: use.host),
    Column("GPU", lambda use: str(use.index)),
    Column("resident", lambda use: f"{use.utilization:.0f} %"),
    Column("memory", lambda use: size(use.memory_peak)),
    Column("power", lambda use: known(use.power, lambda watts: f"{watts:.0f} W")),
    Column("hottest", lambda use: known(use.temperature, lambda celsius: f"{celsius:.0f} C")),
    Column("slowest clock", lambda use: known(use.clock, lambda mhz: f"{mhz:.0f} MHz")),
)
# Memory of the process that used most; on a GPU, what torch had allocated there.
MEMORY = (
    Column("node", lambda use: use.host),
    Column("device", lambda use: use.device),
    Column("processes", lambda use: str(use.ranks)),
    Column("peak memory", lambda use: known(use.peak_memory, size)),
    Column("bad images", lambda use: known(use.bad_images, lambda count: f"{count:,.0f}")),
)


def disks(uses: list[DiskUse]) -> Table:
    return made(DISKS, uses)


def networks(uses: list[NetworkUse]) -> Table:
    return made(NETWORKS, uses)


def losses(epoch: Epoch) -> tuple[str, str]:
    """In training, and on validation images."""
    return known(epoch.train_loss, loss), known(epoch.loss, loss)


def loss(value: float) -> str:
    """That of a run that goes astray may have any number of digits, and a column has not."""
    return three_digits(value) if abs(value) < 1e5 else f"{value:.0e}"


def memory(uses: list[MemoryUse]) -> Table:
    return made(MEMORY, uses)


def machines(uses: list[MachineUse]) -> Table:
    return made(MACHINES, uses)


def gpus(uses: list[GpuUse]) -> Table:
    return made(GPUS, uses)
