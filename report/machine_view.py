"""What the machines of a run did, as sections of its view: disks, network, processors, GPUs and
memory."""

from __future__ import annotations

from contract.text import three_digits
from report import formulas, tables
from report.analysis import Analysis
from report.figures import SENT, SHARE_READ
from report.view import UNKNOWN, Bar, Bars, Item, Paragraph, Section, table

MOST_BARS = 16  # machines in a chart


def disk_section(analysis: Analysis) -> Section:
    """The disks of each node, the one with the data first, and what was read from shares."""
    items: list[Item] = []
    if analysis.uses.disks:
        items.append(table("What each disk did", tables.DISKS, analysis.uses.disks))
    items += [
        Paragraph(f"{use.host} read {use.words(SHARE_READ)} MB/s from {use.name} ({use.kind}).")
        for use in analysis.uses.shares
    ]
    items += [Paragraph(DISKS, "note")] if items else []
    return Section("Disks", items, WHILE)


WHILE = "while training ran"
DISKS = (
    "A disk is the trouble when it is busy and the steps wait for images. Few MB/s alone say "
    "nothing: images that were read once come from memory (the page cache)."
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
    items.append(table("What each machine sent", tables.NETWORKS, analysis.uses.networks))
    if any(use.shared_by > 1 for use in analysis.uses.networks):
        items.append(Paragraph(SHARED, "note"))
    return Section("Network", items, f"sent {WHILE}")


SHARED = "The nodes share one machine's card: each is given its part of the counters."


def machine_section(analysis: Analysis) -> Section:
    """Processors, memory and swap of each machine."""
    if not analysis.uses.machines:
        return Section("Machines", [])
    rows = table("Processors, memory and swap", tables.MACHINES, analysis.uses.machines)
    return Section("Machines", [rows, Paragraph(QUEUED, "note")], WHILE)


QUEUED = (
    "`queued`: of the time in which this run's threads wanted a processor, the share in which they "
    "had none. `pressure`: of the time, the share in which some process waited for memory."
)


def gpu_section(analysis: Analysis) -> Section:
    """The figures of each card, with the warning about utilisation."""
    if not analysis.uses.gpus:
        return Section("GPUs", [])
    items: list[Item] = [table("Each GPU", tables.GPUS, analysis.uses.gpus)]
    joules, each = (analysis.summary[f"gpu_joules{of}"] for of in ("", "_per_image"))
    if joules is not None:
        image = f", {three_digits(each)} J an image" if each else ""
        watt_hours = three_digits(joules / 3600)
        items.append(Paragraph(f"The cards took {watt_hours} Wh{image}; the PCs took more."))
    return Section("GPUs", [*items, Paragraph(RESIDENT, "note")], WHILE)


RESIDENT = (
    "`resident` is what nvidia-smi calls utilisation: it also counts waiting for gradients, so "
    "nothing is concluded from it."
)


def memory_section(analysis: Analysis) -> Section:
    """Peak memory and bad images, by machine."""
    known = [
        column  # no script says how many images it could not read
        for column in tables.MEMORY
        if any(column.words(use) != UNKNOWN for use in analysis.memory)
    ]
    rows = table("Memory of each machine", known, analysis.memory)
    aside = "of the process that took most; on a GPU what torch allocated"
    return Section("Memory", [rows] if rows.rows else [], aside)
