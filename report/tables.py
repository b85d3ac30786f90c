"""The tables of a run's report, and the sections with those of its machines. A column is a heading
and a function that words its cell; to add one, add it here."""

from __future__ import annotations

from functools import partial

from contract.records import CATEGORIES, COMPUTE, PEERS, of_kind
from contract.text import link_speed, percent, seconds, size, three_digits
from report import formulas
from report.analysis import Analysis
from report.figures import (
    CPU,
    DISK,
    FIGURES,
    GPU,
    INTERFACE,
    MACHINE,
    SENT,
    SHARE_READ,
    Figure,
)
from report.measure import RankWork
from report.usage import Usage
from report.view import (
    UNKNOWN,
    Bar,
    Bars,
    Column,
    Item,
    Paragraph,
    Section,
    or_unknown,
    table,
    top1,
)


def loss(value: float) -> str:
    """A loss that fits into a column, even where the run diverges."""
    return three_digits(value) if abs(value) < 1e5 else f"{value:.0e}"


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
                use.speed_mbit, lambda mbit: percent(use.mean(SENT) / formulas.line_rate(mbit))
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
    Column(
        "unreadable files", lambda use: or_unknown(use.bad_images, lambda count: f"{count:,.0f}")
    ),
)


def seconds_of(category: str, rank: RankWork) -> str:
    return seconds(rank.seconds.get(category, 0.0))


# A rank's mean step: its own work, of what it consists, and its waits for others.
def rank_columns(samples: str) -> list[Column]:
    return [
        Column("rank", lambda rank: str(rank.rank)),
        Column("node", lambda rank: rank.host),
        Column("own work", lambda rank: seconds(rank.own)),
        *(
            Column(CATEGORIES[name].short.format(samples), partial(seconds_of, name))
            for name in ("data", *of_kind(COMPUTE), *of_kind(PEERS))
        ),
    ]


# Top-1 on the validation images and in the epoch's steps, and the mean loss of these and those.
EPOCHS = (
    Column("epoch", lambda epoch: str(epoch.epoch)),
    Column("top-1", lambda epoch: or_unknown(epoch.top1, top1)),
    Column("training top-1", lambda epoch: or_unknown(epoch.train_top1, top1)),
    Column("training loss", lambda epoch: or_unknown(epoch.train_loss, loss)),
    Column("validation loss", lambda epoch: or_unknown(epoch.loss, loss)),
)

MOST_BARS = 16  # machines in a chart


def disk_section(analysis: Analysis) -> Section:
    """The disks of each node, the one with the data first, and what was read from shares."""
    items: list[Item] = []
    if analysis.uses.disks:
        items.append(table("What each disk did", DISKS, analysis.uses.disks))
    items += [
        Paragraph(f"{use.host} read {use.words(SHARE_READ)} MB/s from {use.name} ({use.kind}).")
        for use in analysis.uses.shares
    ]
    note = DISKS_NOTE.format(analysis.run.samples)
    items += [Paragraph(note, "note")] if items else []
    return Section("Disks", items, WHILE)


WHILE = "while training ran"
DISKS_NOTE = (
    "A disk is the trouble when it is busy and the steps wait for {0}. Few MB/s alone say nothing: "
    "{0} that were read once come from memory (the page cache)."
)


def network_section(analysis: Analysis) -> Section:
    """What each node's card sent, and what its link can carry."""
    if not analysis.uses.networks:
        return Section("Network", [])
    uses = analysis.evidence.networks[:MOST_BARS]
    items: list[Item] = []
    if uses:
        speeds = [use.speed_mbit for use in uses if use.speed_mbit and use.shared_by == 1]
        limit = formulas.line_rate(min(speeds)) / 1e6 if speeds else None
        if limit and limit > 50 * max(use.mean(SENT) for use in uses) / 1e6:
            limit = None
        rows = [
            Bar(
                use.host[:14],
                [("sync_exposed", use.mean(SENT) / 1e6)],
                use.words(SENT),
            )
            for use in uses
        ]
        what = "Sent in MB/s" + ("; the dashed line is what the link can carry" if limit else "")
        items.append(Bars(what, rows, "MB/s", [], limit))
    items.append(table("What each machine sent", NETWORKS, analysis.uses.networks))
    if any(use.shared_by > 1 for use in analysis.uses.networks):
        items.append(Paragraph(SHARED_NOTE, "note"))
    return Section("Network", items, f"sent {WHILE}")


SHARED_NOTE = "The nodes share one machine's card: each is given its part of the counters."


def machine_section(analysis: Analysis) -> Section:
    """Processors, memory and swap of each machine."""
    if not analysis.uses.machines:
        return Section("Machines", [])
    rows = table("Processors, memory and swap", MACHINES, analysis.uses.machines)
    return Section("Machines", [rows, Paragraph(QUEUED_NOTE, "note")], WHILE)


QUEUED_NOTE = (
    "`queued`: of the time in which this run's threads wanted a processor, the share in which they "
    "had none. `pressure`: of the time, the share in which some process waited for memory."
)


def gpu_section(analysis: Analysis) -> Section:
    """The figures of each card, with the warning about utilisation."""
    if not analysis.uses.gpus:
        return Section("GPUs", [])
    items: list[Item] = [table("Each GPU", GPUS, analysis.uses.gpus)]
    joules, each = (analysis.summary[f"gpu_joules{of}"] for of in ("", "_per_image"))
    if joules is not None:
        image = f", {three_digits(each)} J per {analysis.run.sample}" if each else ""
        watt_hours = three_digits(joules / 3600)
        items.append(Paragraph(f"The cards took {watt_hours} Wh{image}; the PCs took more."))
    return Section("GPUs", [*items, Paragraph(RESIDENT_NOTE, "note")], WHILE)


RESIDENT_NOTE = (
    "`resident` is what nvidia-smi calls utilisation: it also counts waiting for gradients, so "
    "nothing is concluded from it."
)


def memory_section(analysis: Analysis) -> Section:
    """Peak memory and bad images, by machine."""
    # Most programs do not say how many images they could not read.
    columns = MEMORY if any(use.bad_images is not None for use in analysis.memory) else MEMORY[:-1]
    rows = table("Memory of each machine", columns, analysis.memory)
    aside = "of the process that took most; on a GPU what torch allocated"
    return Section("Memory", [rows] if rows.rows else [], aside)
