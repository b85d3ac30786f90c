"""What the bench of slow links found, as JSON, as a page and as a picture in docs/."""

import json
import os
import statistics
import textwrap
from pathlib import Path

from bench.slow_links import ALONE, BACKWARD, FORWARD
from contract import strategies
from contract.strategies import MIB, Payload
from report import formulas
from report.published_speeds import BLOCKS, PARAMETERS, matrices

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOUND = DOCS / "slow-links.json"
BEGIN, END = "<!-- made by make bench -->", "<!-- end -->"
AGREEMENT = "<!-- agreement, by python -m bench.link_table -->"
WHOLE = "<!-- a whole run, by make bench -->"
BUSY = 0.7  # share of the cores; beyond it a cell says more of them than of the link
HEADS = (
    *("machines", "link", "SYNC", "a step", "efficiency", "sent a step", "formula"),
    *("planned", "off by", "cores busy", "dilation", "pairs"),
)


def payload(strategy):
    """Of ResNet-50's gradients, in the strategy's buckets."""
    shapes = matrices(BLOCKS["resnet50"])
    return Payload(4 * PARAMETERS["resnet50"], strategy.rule.bucket_mb * MIB, matrices=shapes)


def planned(sync, nodes, mbit, alone):
    """Seconds a step that `make plan` foresees, where each machine by itself takes `alone`."""
    strategy = strategies.parse(sync)
    rate = formulas.goodput(mbit)
    return alone + formulas.sync_wait(strategy, nodes, payload(strategy), rate, BACKWARD)


def row(case, pairs):
    """One line of the table, of (baseline, strategy) as they were seen one after the other."""
    strategy = strategies.parse(case.sync)
    alone = statistics.median(baseline.seconds for baseline, _ in pairs)
    seconds = statistics.median(seen.seconds for _, seen in pairs)
    foreseen = planned(case.sync, case.nodes, case.mbit, alone)
    return {
        "nodes": case.nodes,
        "mbit": case.mbit,
        "sync": case.sync,
        "seconds": round(seconds, 4),
        "alone": round(alone, 4),
        "efficiency": round(statistics.median(b.seconds / s.seconds for b, s in pairs), 3),
        "sent": round(statistics.median(seen.sent for _, seen in pairs)),
        "formula": round(strategy.bytes_per_step(case.nodes, payload(strategy))),
        "planned": round(foreseen, 4),
        "error": round(foreseen / seconds - 1, 3),
        "busy": round(statistics.median(seen.busy for _, seen in pairs), 2),
        "dilation": case.dilation,
        "pairs": len(pairs),
    }


def rows(seen):
    """`seen`: rounds, each a mapping of Case to Seen. The baseline of a case has its number of
    machines and its dilation."""
    found = {}
    for one in seen:
        for case, measured in one.items():
            alike = (
                own
                for other, own in one.items()
                if other.sync == ALONE
                and (other.nodes, other.dilation) == (case.nodes, case.dilation)
            )
            if case.sync != ALONE:
                found.setdefault(case, []).append((next(alike), measured))
    return [row(case, pairs) for case, pairs in found.items()]


def link(mbit):
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def cells(one):
    return (
        str(one["nodes"]),
        link(one["mbit"]),
        f"`{one['sync']}`",
        f"{one['seconds']:.3f} s",
        f"{one['efficiency']:.2f}",
        f"{one['sent'] / 1e6:.2f} MB",
        f"{one['formula'] / 1e6:.2f} MB",
        f"{one['planned']:.3f} s",
        f"{one['error']:+.0%}",
        f"{one['busy']:.0%}",
        str(one["dilation"]),
        str(one["pairs"]),
    )


def page(table):
    lines = [HEADS, ["---"] * len(HEADS), *map(cells, table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def agreement(table):
    """How today's plan fares against the table: one entry a cell, but for those of busy cores.

    `median`, `greatest`: of what the plan is off by, without its sign. `found`: on how many of the
    `links` the strategy that the plan has for the fastest is within 3 % of the fastest measured.
    """
    quiet = [one for one in table if one["busy"] <= BUSY]
    off = [abs(plan_of(one) / one["seconds"] - 1) for one in quiet]
    by_link = {}
    for one in quiet:
        by_link.setdefault((one["nodes"], one["mbit"]), []).append(one)
    chosen = {
        key: (min(cells, key=plan_by_itself), max(cells, key=lambda one: one["efficiency"]))
        for key, cells in by_link.items()
    }
    found = [
        best["efficiency"] >= 0.97 * fastest["efficiency"] for best, fastest in chosen.values()
    ]
    return {
        "cells": len(off),
        "median": statistics.median(off),
        "greatest": max(off),
        "found": sum(found),
        "links": len(found),
        "chosen": chosen,
    }


def plan_of(one):
    return planned(one["sync"], one["nodes"], one["mbit"], one["alone"])


def plan_by_itself(one):
    """Times one machine's seconds: cells of one link have baselines of their own."""
    return plan_of(one) / one["alone"]


def sentences(table):
    """What `agreement` found, for the page."""
    seen = agreement(table)
    lines = [
        f"Over the {seen['cells']} cells of the table, by today's formula, the plan's seconds a "
        f"step are off by {seen['median']:.1%} in the median and {seen['greatest']:.1%} at most. "
        "What it has for the fastest is within 3 % of the fastest on "
        f"{seen['found']} of {seen['links']} links:"
    ]
    for (nodes, mbit), (best, fastest) in seen["chosen"].items():
        lines.append(
            f"- {nodes} machines, {link(mbit)}: planned `{best['sync']}`, whose efficiency was "
            f"{best['efficiency']:.2f}; the fastest was `{fastest['sync']}`, "
            f"{fastest['efficiency']:.2f}."
        )
    return "\n".join(filler(line) for line in lines)


def filler(line):
    return textwrap.fill(
        line, 100, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False
    )


def picture(table):
    """Horizontal bars of efficiency, one for each line of the table."""
    high, left, wide = 22, 230, 420
    marks = []
    for number, one in enumerate(table):
        top = 30 + number * high
        name = f"{one['sync']}, {one['nodes']} x {link(one['mbit'])}"
        length = wide * min(1.0, one["efficiency"])
        marks += [
            f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.0f}" height="16" fill="#2a6f97"/>',
            f'<text x="{left + length + 6:.0f}" y="{top + 12}">{one["efficiency"]:.2f}</text>',
        ]
    title = "s/step without communication / s/step: 1 is N times one machine"
    box = f'viewBox="0 0 700 {40 + len(table) * high}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style} role="img">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return f'{head}\n{back}\n<text x="8" y="18">{title}</text>\n' + "\n".join(marks) + "\n</svg>\n"


def write(seen):
    """Into docs/: what the machine was, and all cells so far, beside those of earlier benches."""
    table = updated(known(), rows(seen))
    document = {
        **json.loads(FOUND.read_text()),
        "forward": FORWARD,
        "backward": BACKWARD,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "rows": table,
    }
    FOUND.write_text(json.dumps(document, indent=1) + "\n")
    (DOCS / "images/slow-links.svg").write_text(picture(table))
    onto_page(table)
    return table


def whole_run(case, seen, alone):
    """A run with its warm-up as it was seen, by the plan, and by one machine that trains on as many
    images: seconds from its first step to the beginning of its last."""
    strategy, exact = (
        strategies.parse(case.sync),
        round(case.warmup * (case.steps + 1) / case.epochs),
    )
    step, warm = (
        planned(sync, case.nodes, case.mbit, alone) for sync in (case.sync, strategies.EXACT)
    )
    mean = strategies.Phases(case.steps, exact).mean(strategy, step, warm)
    return {
        **{"nodes": case.nodes, "mbit": case.mbit, "sync": case.sync, "dilation": case.dilation},
        **{"steps": case.steps, "exact": exact, "load": round(os.getloadavg()[0], 1)},
        **{"seconds": round(seen.seconds * case.steps, 2), "planned": round(mean * case.steps, 2)},
        "alone": round(alone * case.nodes * case.steps, 2),
    }


def write_whole(one):
    """The whole run into docs/."""
    document = {**json.loads(FOUND.read_text()), "whole": one}
    FOUND.write_text(json.dumps(document, indent=1) + "\n")
    onto_page(document["rows"])


def whole_sentence():
    """Of the whole run, for the page."""
    one = json.loads(FOUND.read_text()).get("whole")
    if one is None:
        return ""
    off = one["planned"] / one["seconds"] - 1
    return filler(
        "A run's total is that of its phases, each at its own cost. "
        f"{one['steps']} steps of {one['nodes']} machines with `{one['sync']}` on "
        f"{link(one['mbit'])}, the first {one['exact']} of them exact: {one['seconds']:.2f} s "
        f"measured, {one['planned']:.2f} s by the plan ({off:+.1%}). One machine takes "
        f"{one['alone']:.2f} s for as many images, {one['alone'] / one['seconds']:.2f} times as "
        f"long (dilation {one['dilation']}; load of this machine {one['load']})."
    )


def known():
    """The rows of docs/slow-links.json."""
    return json.loads(FOUND.read_text())["rows"]


def updated(old, new):
    """`new` rows, and those of `old` that are of other cells: many machines, fast links and the
    most efficient first."""
    by_cell = {(one["nodes"], one["mbit"], one["sync"]): one for one in [*old, *new]}
    return sorted(
        by_cell.values(), key=lambda one: (-one["nodes"], -one["mbit"], -one["efficiency"])
    )


def onto_page(table):
    path = DOCS / "slow-links.md"
    text = path.read_text()
    parts = {BEGIN: page(table), AGREEMENT: sentences(table), WHOLE: whole_sentence()}
    for begin, made in parts.items():
        before, _, rest = text.partition(begin)
        after = rest.partition(END)[2]
        text = f"{before}{begin}\n{made}\n{END}{after}"
    path.write_text(text)


if __name__ == "__main__":
    measured = known()
    onto_page(measured)
    print(sentences(measured))
