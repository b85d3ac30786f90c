"""Define the tables of a run's report, and its sections about machines.

A column is a heading and a function that puts the cell of a row into words. run_view.py puts the
sections in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from contract.records import CATEGORIES, COMPUTE, PEERS, of_kind
from contract.text import link_speed, percent, seconds, size, three_digits
from report import figures, formulas, view
from report.analysis import Analysis
from report.figures import DISK, FIGURES, GPU, INTERFACE, MACHINE, SENT, SHARE_READ, Figure
from report.usage import Usage
from report.view import Bar, Bars, Column, Item, Paragraph, Section, or_unknown, top1


def loss(value: float) -> str:
    """Write a loss that fits into a column, even if the run diverges."""
    return three_digits(value) if abs(value) < 1e5 else f"{value:.0e}"


def columns_of(shown: Sequence[Figure]) -> list[Column]:
    """Return the columns of figures in the report. Their rows are Usages."""
    return [
        Column(heading, partial(Usage.words, figure=figure, which=which))
        for figure in shown
        for which, heading in (figure.report or {}).items()
    ]


def columns_around(kind: str, after: Figure, *extra: Column) -> list[Column]:
    """Return all columns of a kind of thing, with the columns `extra` behind those of a figure."""
    index = FIGURES[kind].index(after) + 1
    return [*columns_of(FIGURES[kind][:index]), *extra, *columns_of(FIGURES[kind][index:])]


# A row of each of these tables is a Usage, or a subclass; of MEMORY it is a MemoryUsage.
NODE = Column("node", lambda use: use.host)
DISKS = (
    NODE,
    Column("disk", lambda use: use.name + (" (data)" if use.holds_data else "")),
    *columns_of(FIGURES[DISK]),
)
# "of link": the bytes sent as a fraction of what the link can carry.
NETWORKS = (
    NODE,
    Column("card", lambda use: use.name),
    Column("link", lambda use: or_unknown(use.speed_mbit, link_speed)),
    *columns_around(
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
BY_OTHERS = Column("by others", lambda use: or_unknown(use.others_busy, percent))
MACHINES = (NODE, *columns_around(MACHINE, figures.CPU, BY_OTHERS))
GPUS = (NODE, Column("GPU", lambda use: use.name), *columns_of(FIGURES[GPU]))
MEMORY = (
    NODE,
    Column("device", lambda use: use.device),
    Column("processes", lambda use: str(use.ranks)),
    Column("peak memory", lambda use: or_unknown(use.peak_memory, size)),
)
UNREADABLE = Column("unreadable files", lambda use: or_unknown(use.bad_images, "{:,.0f}".format))


def rank_columns(samples: str) -> list[Column]:
    """Return the columns of a rank's mean step: its work, the parts of it, and its waits. The rows
    are RankWorks."""
    columns = [
        Column("rank", lambda rank: str(rank.rank)),
        Column("node", lambda rank: rank.host),
        Column("own work", lambda rank: seconds(rank.work_seconds)),
    ]
    for name in ("data", *of_kind(COMPUTE), *of_kind(PEERS)):
        read = partial(lambda name, rank: seconds(rank.seconds.get(name, 0.0)), name)
        columns.append(Column(CATEGORIES[name].short.format(samples), read))
    return columns


# The rows are Epochs.
EPOCHS = (
    Column("epoch", lambda epoch: str(epoch.epoch)),
    Column("top-1", lambda epoch: or_unknown(epoch.top1, top1)),
    Column("training top-1", lambda epoch: or_unknown(epoch.train_top1, top1)),
    Column("training loss", lambda epoch: or_unknown(epoch.train_loss, loss)),
    Column("validation loss", lambda epoch: or_unknown(epoch.loss, loss)),
)

MOST_BARS = 16  # machines in a chart
MAX_LIMIT_RATIO = 50  # a limit above so many times the longest bar is not drawn
WHILE = "while training ran"


def disk_section(analysis: Analysis) -> Section:
    """Show the disks of each node, the one with the data first, and the reads from shares."""
    items: list[Item] = []
    if analysis.uses.disks:
        items.append(view.table("What each disk did", DISKS, analysis.uses.disks))
    items += [
        Paragraph(f"{use.host} read {use.words(SHARE_READ)} MB/s from {use.name} ({use.kind}).")
        for use in analysis.uses.shares
    ]
    samples = analysis.run.samples
    note = (
        f"A disk limits the speed if it is busy and the steps wait for {samples}. A low rate "
        f"proves nothing, because {samples} already read come from memory (the page cache)."
    )
    # Without figures there is nothing to explain.
    items += [Paragraph(note, "note")] if items else []
    return Section("Disks", items, WHILE)


def network_section(analysis: Analysis) -> Section:
    """Show how much each node's network interface sent, and how much its link can carry."""
    if not analysis.uses.networks:
        return Section("Network", [])
    uses = analysis.evidence.networks[:MOST_BARS]
    items: list[Item] = []
    if uses:
        speeds = [use.speed_mbit for use in uses if use.speed_mbit and use.shared_by == 1]
        limit = formulas.line_rate(min(speeds)) / 1e6 if speeds else None
        # On the scale of a limit that is much higher, the bars would be too short to see.
        if limit and limit > MAX_LIMIT_RATIO * max(use.mean(SENT) for use in uses) / 1e6:
            limit = None
        rows = [
            Bar(use.host[:14], [("sync_exposed", use.mean(SENT) / 1e6)], use.words(SENT))
            for use in uses
        ]
        caption = "Sent in MB/s" + ("; the dashed line is what the link can carry" if limit else "")
        items.append(Bars(caption, rows, "MB/s", [], limit))
    items.append(view.table("What each machine sent", NETWORKS, analysis.uses.networks))
    if any(use.shared_by > 1 for use in analysis.uses.networks):
        note = (
            "The nodes share the network card of one machine: the report divides its counters "
            "among them."
        )
        items.append(Paragraph(note, "note"))
    return Section("Network", items, f"sent {WHILE}")


def machine_section(analysis: Analysis) -> Section:
    """Show processors, memory and swap of each machine."""
    if not analysis.uses.machines:
        return Section("Machines", [])
    rows = view.table("Processors, memory and swap", MACHINES, analysis.uses.machines)
    note = (
        "`queued`: the percentage of the time in which this run's threads wanted a processor "
        "but had none. `pressure`: the percentage of the time in which some process waited "
        "for memory."
    )
    return Section("Machines", [rows, Paragraph(note, "note")], WHILE)


def gpu_section(analysis: Analysis) -> Section:
    """Show the figures of each GPU, with the warning about utilisation."""
    if not analysis.uses.gpus:
        return Section("GPUs", [])
    items: list[Item] = [view.table("Each GPU", GPUS, analysis.uses.gpus)]
    joules = analysis.summary["gpu_joules"]
    per_image = analysis.summary["gpu_joules_per_image"]
    # The energy is unknown if the records of any GPU are missing.
    if joules is not None:
        image = f", {three_digits(per_image)} J per {analysis.run.sample}" if per_image else ""
        watt_hours = three_digits(joules / 3600)
        items.append(Paragraph(f"The GPUs used {watt_hours} Wh{image}; the whole PCs used more."))
    note = (
        "`resident` is nvidia-smi's utilization: it also counts waiting for gradients, "
        "so the report concludes nothing from it."
    )
    return Section("GPUs", [*items, Paragraph(note, "note")], WHILE)


def memory_section(analysis: Analysis) -> Section:
    """Show peak memory and unreadable images of each machine."""
    if not analysis.memory:
        return Section("Memory", [])
    columns = [*MEMORY]
    # Most programs do not record how many images they could not read.
    if any(use.bad_images is not None for use in analysis.memory):
        columns.append(UNREADABLE)
    rows = view.table("Memory of each machine", columns, analysis.memory)
    aside = "of the process that took most; on a GPU what torch allocated"
    return Section("Memory", [rows], aside)
