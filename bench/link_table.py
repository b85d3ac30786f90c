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
from report.published_speeds import PARAMETERS

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "slow-links.json"
BEGIN, END = "<!-- made by make bench -->", "<!-- end -->"
AGREEMENT = "<!-- agreement, by python -m bench.link_table -->"
WHOLE = "<!-- a whole run, by make bench -->"
BUSY = 0.7  # share of the cores; beyond it a cell says more of them than of the link
HEADS = (
    *("machines", "link", "SYNC", "a step", "efficiency", "sent a step"),
    *("planned", "off by", "dilation"),
)


def payload(strategy):
    """Of ResNet-50's gradients, in the strategy's buckets."""
    return Payload(4 * PARAMETERS["resnet50"], strategy.rule.bucket_mb * MIB)


def planned(sync, nodes, mbit, alone):
    """Seconds a step that `make plan` foresees, where each machine by itself takes `alone`."""
    strategy = strategies.parse(sync)
    rate = formulas.goodput(mbit)
    return alone + formulas.sync_wait(strategy, nodes, payload(strategy), rate, BACKWARD)


def row(case, pairs):
    """One line of the table, of (baseline, strategy) as they were seen one after the other."""
    strategy = strategies.parse(case.sync)
    alone = statistics.median(baseline.seconds for baseline, _ in pairs)
    seconds = statistics.median(measured.seconds for _, measured in pairs)
    foreseen = planned(case.sync, case.nodes, case.mbit, alone)
    return {
        "nodes": case.nodes,
        "mbit": case.mbit,
        "sync": case.sync,
        "seconds": round(seconds, 4),
        "alone": round(alone, 4),
        "efficiency": round(statistics.median(b.seconds / s.seconds for b, s in pairs), 3),
        "sent": round(statistics.median(measured.sent for _, measured in pairs)),
        "formula": round(strategy.bytes_per_step(case.nodes, payload(strategy))),
        "planned": round(foreseen, 4),
        "error": round(foreseen / seconds - 1, 3),
        "busy": round(statistics.median(measured.busy for _, measured in pairs), 2),
        "dilation": case.dilation,
        "pairs": len(pairs),
    }


def rows(rounds):
    """`rounds`: each a mapping of Case to Seen. The baseline of a case has its number of machines
    and its dilation."""
    pairs = {}
    for results in rounds:
        for case, measured in results.items():
            alike = (
                own
                for other, own in results.items()
                if other.sync == ALONE
                and (other.nodes, other.dilation) == (case.nodes, case.dilation)
            )
            if case.sync != ALONE:
                pairs.setdefault(case, []).append((next(alike), measured))
    return [row(case, own) for case, own in pairs.items()]


def link(mbit):
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def cells(row):
    return (
        str(row["nodes"]),
        link(row["mbit"]),
        f"`{row['sync']}`",
        f"{row['seconds']:.3f} s",
        f"{row['efficiency']:.2f}",
        f"{row['sent'] / 1e6:.2f} MB",
        f"{row['planned']:.3f} s",
        f"{row['error']:+.0%}",
        str(row["dilation"]),
    )


def page(table):
    lines = [HEADS, ["---"] * len(HEADS), *map(cells, table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def agreement(table):
    """How today's plan fares against the table: one entry a cell, but for those of busy cores.

    `median`, `greatest`: of what the plan is off by, without its sign. `found`: on how many of the
    `links` the strategy that the plan has for the fastest is within 3 % of the fastest measured.
    """
    quiet = [row for row in table if row["busy"] <= BUSY]
    off = [abs(plan_of(row) / row["seconds"] - 1) for row in quiet]
    by_link = {}
    for row in quiet:
        by_link.setdefault((row["nodes"], row["mbit"]), []).append(row)
    chosen = {
        key: (min(cells, key=plan_by_itself), max(cells, key=lambda row: row["efficiency"]))
        for key, cells in by_link.items()
    }
    matches = [
        best["efficiency"] >= 0.97 * fastest["efficiency"] for best, fastest in chosen.values()
    ]
    return {
        "cells": len(off),
        "median": statistics.median(off),
        "greatest": max(off),
        "found": sum(matches),
        "links": len(matches),
        "chosen": chosen,
    }


def plan_of(row):
    return planned(row["sync"], row["nodes"], row["mbit"], row["alone"])


def plan_by_itself(row):
    """Times one machine's seconds: cells of one link have baselines of their own."""
    return plan_of(row) / row["alone"]


def sentences(table):
    """The result of `agreement`, for the page."""
    fit = agreement(table)
    lines = [
        f"Over the {fit['cells']} cells of the table, by today's formula, the plan's seconds a "
        f"step are off by {fit['median']:.1%} in the median and {fit['greatest']:.1%} at most. "
        "What it has for the fastest is within 3 % of the fastest on "
        f"{fit['found']} of {fit['links']} links:"
    ]
    for (nodes, mbit), (best, fastest) in fit["chosen"].items():
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
    for number, row in enumerate(table):
        top = 30 + number * high
        name = f"{row['sync']}, {row['nodes']} x {link(row['mbit'])}"
        length = wide * min(1.0, row["efficiency"])
        marks += [
            f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.0f}" height="16" fill="#2a6f97"/>',
            f'<text x="{left + length + 6:.0f}" y="{top + 12}">{row["efficiency"]:.2f}</text>',
        ]
    title = "s/step without communication / s/step: 1 is N times one machine"
    box = f'viewBox="0 0 700 {40 + len(table) * high}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style} role="img">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return f'{head}\n{back}\n<text x="8" y="18">{title}</text>\n' + "\n".join(marks) + "\n</svg>\n"


def write(rounds):
    """Into docs/: what the machine was, and all cells so far, beside those of earlier benches."""
    table = merge(read_rows(), rows(rounds))
    document = {
        **json.loads(RECORD.read_text()),
        "forward": FORWARD,
        "backward": BACKWARD,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "rows": table,
    }
    RECORD.write_text(json.dumps(document, indent=1) + "\n")
    (DOCS / "images/slow-links.svg").write_text(picture(table))
    onto_page(table)
    return table


def describe_run(case, run, alone):
    """A run with its warm-up as measured, by the plan, and by one machine that trains on as many
    images: seconds from its first step to the beginning of its last."""
    strategy = strategies.parse(case.sync)
    exact = round(case.warmup * (case.steps + 1) / case.epochs)
    step, warm = (
        planned(sync, case.nodes, case.mbit, alone) for sync in (case.sync, strategies.EXACT)
    )
    mean = strategies.Phases(case.steps, exact).mean(strategy, step, warm)
    return {
        **{"nodes": case.nodes, "mbit": case.mbit, "sync": case.sync},
        **{"optimizer": case.optimizer, "dilation": case.dilation},
        **{"steps": case.steps, "exact": exact, "load": round(os.getloadavg()[0], 1)},
        **{"seconds": round(run.seconds * case.steps, 2), "planned": round(mean * case.steps, 2)},
        **{"alone": round(alone * case.nodes * case.steps, 2), "busy": round(run.busy, 2)},
    }


def write_run(run):
    """A whole run into docs/, in the place of an earlier one with this optimizer."""
    document = json.loads(RECORD.read_text())
    known = {other["optimizer"]: other for other in document.get("whole", [])}
    known[run["optimizer"]] = run
    document["whole"] = [known[optimizer] for optimizer in sorted(known, reverse=True)]
    RECORD.write_text(json.dumps(document, indent=1) + "\n")
    onto_page(document["rows"])


def run_sentences(runs):
    """On whole runs, for the page."""
    lines = [
        f"- `{run['sync']}` with {run['optimizer']}, {run['nodes']} machines on "
        f"{link(run['mbit'])}, {run['steps']} steps, {run['exact'] or 'none'} of them exact: "
        f"{run['seconds']:.2f} s measured, {run['planned']:.2f} s by the plan "
        f"({run['planned'] / run['seconds'] - 1:+.1%}). One machine takes {run['alone']:.2f} s for "
        f"as many images, {run['alone'] / run['seconds']:.2f} times as long (dilation "
        f"{run['dilation']}; load of this machine {run['load']}, cores busy {run['busy']:.0%})."
        for run in runs
    ]
    return "\n".join(filler(line) for line in lines)


def read_rows():
    """The rows of docs/slow-links.json."""
    return json.loads(RECORD.read_text())["rows"]


def merge(old, new):
    """`new` rows, and those of `old` that are of other cells: many machines, fast links and the
    most efficient first."""
    by_cell = {(row["nodes"], row["mbit"], row["sync"]): row for row in [*old, *new]}
    return sorted(
        by_cell.values(), key=lambda row: (-row["nodes"], -row["mbit"], -row["efficiency"])
    )


def onto_page(table):
    path = Path(__file__).with_name("slow-links.md")
    text = path.read_text()
    whole = run_sentences(json.loads(RECORD.read_text()).get("whole", []))
    parts = {BEGIN: page(table), AGREEMENT: sentences(table), WHOLE: whole}
    for begin, content in parts.items():
        before, _, rest = text.partition(begin)
        after = rest.partition(END)[2]
        text = f"{before}{begin}\n{content}\n{END}{after}"
    path.write_text(text)


if __name__ == "__main__":
    measured = read_rows()
    onto_page(measured)
    print(sentences(measured))
