"""The columns of the report's tables. A column is a heading and a function that words its cell; to
add one, add it here."""

from __future__ import annotations

from contract.records import CATEGORIES, COMPUTE, PEERS, of_kind
from contract.text import link_speed, percent, seconds, size, three_digits
from report.formulas import line_rate
from report.view import Column, or_unknown


def loss(value: float) -> str:
    """A loss that fits into a column, even where the run diverges."""
    return three_digits(value) if abs(value) < 1e5 else f"{value:.0e}"


def top1(value: float) -> str:
    return f"{100 * value:.2f} %"


DISKS = (
    Column("node", lambda use: use.host),
    Column("disk", lambda use: use.device + (" (data)" if use.holds_data else "")),
    Column("MB/s read", lambda use: three_digits(use.read)),
    Column("peak", lambda use: three_digits(use.peak_read)),
    Column("MB/s written", lambda use: three_digits(use.write)),
    Column("busy", lambda use: f"{use.util:.0f} %"),
    Column("a request", lambda use: f"{three_digits(use.await_ms)} ms"),
)
# What was sent; "of link" is the fraction of what the link can carry.
NETWORKS = (
    Column("node", lambda use: use.host),
    Column("card", lambda use: use.interface),
    Column("link", lambda use: or_unknown(use.speed_mbit, link_speed)),
    Column("MB/s", lambda use: three_digits(use.sent / 1e6)),
    Column("peak", lambda use: three_digits(use.peak_sent / 1e6)),
    Column(
        "of link",
        lambda use: or_unknown(use.speed_mbit, lambda mbit: percent(use.sent / line_rate(mbit))),
    ),
    Column("a step", lambda use: or_unknown(use.sent_per_step, size)),
    Column("retransmits", lambda use: f"{use.retransmits:,}"),
    Column("drops", lambda use: f"{use.dropped:,}"),
)
# "queued": of the time in which the run's threads wanted a processor, when they had none.
MACHINES = (
    Column("node", lambda use: use.host),
    Column("CPUs", lambda use: str(use.cores)),
    Column("busy", lambda use: percent(use.busy)),
    Column("by others", lambda use: or_unknown(use.others_busy, percent)),
    Column("queued", lambda use: or_unknown(use.queued, percent)),
    Column("memory", lambda use: size(use.memory_total)),
    Column("used", lambda use: percent(use.memory_used)),
    Column("swap MB/s", lambda use: three_digits((use.swapped_in + use.swapped_out) / 1e6)),
    Column("pressure", lambda use: or_unknown(use.memory_pressure, percent)),
)
GPUS = (
    Column("node", lambda use: use.host),
    Column("GPU", lambda use: str(use.index)),
    Column("resident", lambda use: f"{use.utilization:.0f} %"),
    Column("memory", lambda use: size(use.memory_peak)),
    Column("power", lambda use: or_unknown(use.power, lambda watts: f"{watts:.0f} W")),
    Column("hottest", lambda use: or_unknown(use.temperature, lambda celsius: f"{celsius:.0f} C")),
    Column("slowest clock", lambda use: or_unknown(use.clock, lambda mhz: f"{mhz:.0f} MHz")),
)
# Memory of the process that used most; on a GPU, what torch had allocated there.
MEMORY = (
    Column("node", lambda use: use.host),
    Column("device", lambda use: use.device),
    Column("processes", lambda use: str(use.ranks)),
    Column("peak memory", lambda use: or_unknown(use.peak_memory, size)),
    Column("bad images", lambda use: or_unknown(use.bad_images, lambda count: f"{count:,.0f}")),
)
# A rank's mean step: its own work, of what it consists, and its waits for others.
RANKS = (
    Column("rank", lambda rank: str(rank.rank)),
    Column("node", lambda rank: rank.host),
    Column("own work", lambda rank: seconds(rank.own)),
    *(
        Column(CATEGORIES[name].short, lambda rank, name=name: seconds(rank.seconds.get(name, 0.0)))
        for name in ("data", *of_kind(COMPUTE), *of_kind(PEERS))
    ),
)
# Top-1 on the validation images, and the mean loss of the epoch's steps and of these images.
EPOCHS = (
    Column("epoch", lambda epoch: str(epoch.epoch)),
    Column("top-1", lambda epoch: or_unknown(epoch.top1, top1)),
    Column("training loss", lambda epoch: or_unknown(epoch.train_loss, loss)),
    Column("validation loss", lambda epoch: or_unknown(epoch.loss, loss)),
)
