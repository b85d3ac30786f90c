"""Write what the bench of slow links measured: docs/slow-links.json, slow-links.md and a picture.
`python -m bench.link_table` writes the page again, with today's formula of the plan.

A row is a dict: one strategy on one kind of link (`row_of`). Times are without dilation.
"""

import json
import os
import statistics
import textwrap
from functools import partial
from pathlib import Path

from bench import markdown
from bench.slow_links import ALONE, BACKWARD, FORWARD
from contract import strategies
from contract.strategies import MIB, Payload
from report import formulas
from report.published_speeds import PARAMETERS

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORD = DOCS / "slow-links.json"
PAGE = Path(__file__).with_name("slow-links.md")
END = "<!-- end -->"
BUSY = 0.7  # share of this machine's cores; beyond it a row depends on the cores, not on the link
NEAR = 0.97  # of the best efficiency: a strategy that has this is as good as the fastest


def payload_of(strategy):
    """Return ResNet-50's gradients, in the strategy's buckets."""
    return Payload(4 * PARAMETERS["resnet50"], strategy.rule.bucket_mb * MIB)


def planned_seconds(sync, nodes, mbit, alone):
    """Return the step time that `make plan` predicts. `alone`: the step time of one machine."""
    strategy, rate = strategies.parse(sync), formulas.goodput(mbit)
    return alone + formulas.sync_wait(strategy, nodes, payload_of(strategy), rate, BACKWARD)


def row_of(case, pairs):
    """Return a Case's row. `pairs`: Measurements of (baseline, case), made one after the other."""
    strategy = strategies.parse(case.sync)
    alone = statistics.median(baseline.seconds for baseline, _ in pairs)
    seconds, sent, busy = (
        statistics.median(getattr(measured, name) for _, measured in pairs)
        for name in ("seconds", "sent", "busy")
    )
    planned = planned_seconds(case.sync, case.nodes, case.mbit, alone)
    return {
        **{"nodes": case.nodes, "mbit": case.mbit, "sync": case.sync},
        **{"seconds": round(seconds, 4), "alone": round(alone, 4)},
        "efficiency": round(statistics.median(b.seconds / m.seconds for b, m in pairs), 3),
        "sent": round(sent),
        "formula": round(strategy.bytes_per_step(case.nodes, payload_of(strategy))),
        **{"planned": round(planned, 4), "error": round(planned / seconds - 1, 3)},
        **{"busy": round(busy, 2), "dilation": case.dilation, "pairs": len(pairs)},
    }


def rows_of(rounds):
    """Return the rows of all cases. `rounds`: a list of {Case: Measurement}. A case's baseline is
    of the same round, number of machines and dilation."""
    pairs = {}
    for results in rounds:
        baselines = {(c.nodes, c.dilation): m for c, m in results.items() if c.sync == ALONE}
        for case, measured in results.items():
            if case.sync != ALONE:
                baseline = baselines[case.nodes, case.dilation]
                pairs.setdefault(case, []).append((baseline, measured))
    return [row_of(case, case_pairs) for case, case_pairs in pairs.items()]


def link(mbit):
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def step_table(rows):
    """Return the table of the page."""
    head = ["machines", "link", "SYNC", "a step", "efficiency", "sent a step"]
    cells = [
        [f"{row['nodes']}", link(row["mbit"]), f"`{row['sync']}`", f"{row['seconds']:.3f} s",
         f"{row['efficiency']:.2f}", f"{row['sent'] / 1e6:.2f} MB", f"{row['planned']:.3f} s",
         f"{row['error']:+.0%}", f"{row['dilation']}"]
        for row in rows
    ]  # fmt: skip
    return markdown.table([*head, "planned", "off by", "dilation"], cells)


def planned_slowdown(row):
    """Return by how much today's plan has a row's step longer than a step of one machine, whose
    time differs between the rows of a link."""
    return planned_seconds(row["sync"], row["nodes"], row["mbit"], row["alone"]) / row["alone"]


def agreement(rows):
    """Compare today's plan with the rows whose cores were not busy.

    Return a dict. `cells`: number of rows; `median`, `greatest`: of the absolute relative errors of
    the plan; `links`: number of kinds of links; `chosen`: {(nodes, mbit): (row that the plan has
    for the fastest, row that was the fastest)}; `found`: on how many links the former is as good as
    the latter."""
    quiet = [row for row in rows if row["busy"] <= BUSY]
    errors = [abs(planned_slowdown(row) * row["alone"] / row["seconds"] - 1) for row in quiet]
    by_link = {}
    for row in quiet:
        by_link.setdefault((row["nodes"], row["mbit"]), []).append(row)
    chosen = {
        key: (min(candidates, key=planned_slowdown), max(candidates, key=lambda r: r["efficiency"]))
        for key, candidates in by_link.items()
    }
    return {
        "cells": len(errors),
        "median": statistics.median(errors),
        "greatest": max(errors),
        "found": sum(p["efficiency"] >= NEAR * f["efficiency"] for p, f in chosen.values()),
        "links": len(chosen),
        "chosen": chosen,
    }


def agreement_text(rows):
    """Return the result of `agreement` for the page."""
    fit = agreement(rows)
    lines = [
        f"Over the {fit['cells']} cells of the table, by today's formula, the plan's seconds a "
        f"step are off by {fit['median']:.1%} in the median and {fit['greatest']:.1%} at most. "
        "What it has for the fastest is within 3 % of the fastest on "
        f"{fit['found']} of {fit['links']} links:"
    ]
    for (nodes, mbit), (planned, fastest) in fit["chosen"].items():
        lines.append(
            f"- {nodes} machines, {link(mbit)}: planned `{planned['sync']}`, whose efficiency was "
            f"{planned['efficiency']:.2f}; the fastest was `{fastest['sync']}`, "
            f"{fastest['efficiency']:.2f}."
        )
    return fill(lines)


def fill(lines):
    """Join paragraphs and list entries, in lines of at most 100 characters."""
    indents = ("  " if line.startswith("- ") else "" for line in lines)
    wrap = partial(textwrap.fill, width=100, break_on_hyphens=False)
    return "\n".join(wrap(line, subsequent_indent=i) for line, i in zip(lines, indents))


def picture(rows):
    """Draw a horizontal bar of efficiency for each row, as an SVG."""
    bar_height, left, width = 22, 230, 420
    marks = []
    for number, row in enumerate(rows):
        top = 30 + number * bar_height
        name = f"{row['sync']}, {row['nodes']} x {link(row['mbit'])}"
        length = width * min(1.0, row["efficiency"])
        marks += [
            f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.0f}" height="16" fill="#2a6f97"/>',
            f'<text x="{left + length + 6:.0f}" y="{top + 12}">{row["efficiency"]:.2f}</text>',
        ]
    title = "s/step without communication / s/step: 1 is N times one machine"
    box = f'viewBox="0 0 700 {40 + len(rows) * bar_height}"'
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style} role="img">'
    back = '<rect width="100%" height="100%" fill="white"/>'
    return f'{head}\n{back}\n<text x="8" y="18">{title}</text>\n' + "\n".join(marks) + "\n</svg>\n"


def describe_run(case, run, alone):
    """Return a dict on a whole run with its warm-up: seconds from its first step to the beginning
    of its last, as measured, by the plan, and of one machine that trains on as many images."""
    exact = round(case.warmup * (case.steps + 1) / case.epochs)
    step, warm_step = (
        planned_seconds(sync, case.nodes, case.mbit, alone)
        for sync in (case.sync, strategies.EXACT)
    )
    mean = strategies.Phases(case.steps, exact).mean(strategies.parse(case.sync), step, warm_step)
    return {
        **{"nodes": case.nodes, "mbit": case.mbit, "sync": case.sync},
        **{"optimizer": case.optimizer, "dilation": case.dilation},
        **{"steps": case.steps, "exact": exact, "load": round(os.getloadavg()[0], 1)},
        **{"seconds": round(run.seconds * case.steps, 2), "planned": round(mean * case.steps, 2)},
        **{"alone": round(alone * case.nodes * case.steps, 2), "busy": round(run.busy, 2)},
    }


def run_text(runs):
    """Return the whole runs for the page."""
    lines = [
        f"- `{run['sync']}` with {run['optimizer']}, {run['nodes']} machines on "
        f"{link(run['mbit'])}, {run['steps']} steps, {run['exact'] or 'none'} of them exact: "
        f"{run['seconds']:.2f} s measured, {run['planned']:.2f} s by the plan "
        f"({run['planned'] / run['seconds'] - 1:+.1%}). One machine takes {run['alone']:.2f} s for "
        f"as many images, {run['alone'] / run['seconds']:.2f} times as long (dilation "
        f"{run['dilation']}; load of this machine {run['load']}, cores busy {run['busy']:.0%})."
        for run in runs
    ]
    return fill(lines)


def write_rows(rounds):
    """Record new rows in place of earlier ones with the same link and strategy. Return all rows:
    many machines, fast links and efficient strategies first."""
    record = json.loads(RECORD.read_text())
    rows = [*record["rows"], *rows_of(rounds)]
    rows = list({(row["nodes"], row["mbit"], row["sync"]): row for row in rows}.values())
    rows.sort(key=lambda row: (-row["nodes"], -row["mbit"], -row["efficiency"]))
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    write({**record, "forward": FORWARD, "backward": BACKWARD, **machine, "rows": rows})
    (DOCS / "images/slow-links.svg").write_text(picture(rows))
    return rows


def write_run(run):
    """Record a whole run in place of an earlier one with the same optimizer."""
    record = json.loads(RECORD.read_text())
    by_optimizer = {other["optimizer"]: other for other in record.get("whole", [])}
    by_optimizer[run["optimizer"]] = run
    whole = [by_optimizer[optimizer] for optimizer in sorted(by_optimizer, reverse=True)]
    write({**record, "whole": whole})


def write(record):
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for begin, text in (
        ("<!-- made by make bench -->", step_table(record["rows"])),
        ("<!-- agreement, by python -m bench.link_table -->", agreement_text(record["rows"])),
        ("<!-- a whole run, by make bench -->", run_text(record.get("whole", []))),
    ):
        markdown.replace_part(PAGE, begin, END, text)


if __name__ == "__main__":
    written = json.loads(RECORD.read_text())
    write(written)
    print(agreement_text(written["rows"]))
