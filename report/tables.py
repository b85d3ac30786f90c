"""The columns of the report's tables. A column is a heading and a function that words its cell; to
add one, add it here."""

from __future__ import annotations

from functools import partial

from contract.records import CATEGORIES, COMPUTE, PEERS, of_kind
from contract.text import link_speed, percent, seconds, size, three_digits
from report.figures import (
    CPU,
    DISK,
    FIGURES,
    GPU,
    INTERFACE,
    MACHINE,
    SENT,
    Figure,
)
from report.formulas import line_rate
from report.measure import RankWork
from report.usage import Usage
from report.view import UNKNOWN, Column, or_unknown


def loss(value: float) -> str:
    """A loss that fits into a column, even where the run diverges."""
    return three_digits(value) if abs(value) < 1e5 else f"{value:.0e}"


def top1(value: float) -> str:
    return f"{100 * value:.2f} %"


def columns_of(*figures: Figure) -> list[Column]:
    """Their columns in the report."""
    return [
        Column(heading, partial(cell, figure, which))
        for figure in figures
        for which, heading in (figure.report or {}).items()
    ]


def cell(figure: Figure, which: str, use: Usage) -> str:
    return use.words(figure, which) if use.knows(figure) else UNKNOWN


def columns_between(kind: str, after: Figure, *more: Column) -> list[Column]:
    """All columns of a kind of thing, and more ones behind those of a figure."""
    figures = FIGURES[kind]
    place = figures.index(after) + 1
    return [*columns_of(*figures[:place]), *more, *columns_of(*figures[place:])]


NODE = Column("node", lambda use: use.host)
DISKS = (
    NODE,
    Column("disk", lambda use: use.name + (" (data)" if use.holds_data else "")),
    *columns_of(*FIGURES[DISK]),
)
# What was sent; "of link" is the fraction of what the link can carry.
NETWORKS = (
    NODE,
    Column("card", lambda use: use.name),
    Column("link", lambda use: or_unknown(use.speed_mbit, link_speed)),
    *columns_between(
        INTERFACE,
        SENT,
        Column(
            "of link",
            lambda use: or_unknown(
                use.speed_mbit, lambda mbit: percent(use.mean(SENT) / line_rate(mbit))
            ),
        ),
        Column("a step", lambda use: or_unknown(use.sent_per_step, size)),
    ),
)
MACHINES = (
    NODE,
    *columns_between(
        MACHINE, CPU, Column("by others", lambda use: or_unknown(use.others_busy, percent))
    ),
)
GPUS = (NODE, Column("GPU", lambda use: use.name), *columns_of(*FIGURES[GPU]))
# Memory of the process that used most; on a GPU, what torch had allocated there.
MEMORY = (
    Column("node", lambda use: use.host),
    Column("device", lambda use: use.device),
    Column("processes", lambda use: str(use.ranks)),
    Column("peak memory", lambda use: or_unknown(use.peak_memory, size)),
    Column("bad images", lambda use: or_unknown(use.bad_images, lambda count: f"{count:,.0f}")),
)


def seconds_of(category: str, rank: RankWork) -> str:
    return seconds(rank.seconds.get(category, 0.0))


# A rank's mean step: its own work, of what it consists, and its waits for others.
RANKS = (
    Column("rank", lambda rank: str(rank.rank)),
    Column("node", lambda rank: rank.host),
    Column("own work", lambda rank: seconds(rank.own)),
    *(
        Column(CATEGORIES[name].short, partial(seconds_of, name))
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
