"""What the bench of slow links found, as JSON, as a page and as a picture in docs/."""

import json
import os
import statistics
from collections import Counter
from pathlib import Path

import torchvision

from report import formulas
from tests.bench.slow_links import ALONE, BACKWARD, FORWARD
from trainer import strategies
from trainer.strategies import MIB, Payload

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- made by make bench -->", "<!-- end -->"
HEADS = (
    *("machines", "link", "SYNC", "a step", "efficiency", "sent a step", "formula"),
    *("planned", "off by", "cores busy", "dilation", "pairs"),
)


def payload(strategy):
    """Of ResNet-50's gradients, in the strategy's buckets."""
    weights = [parameter.shape for parameter in torchvision.models.resnet50().parameters()]
    sides = Counter((s[0], s.numel() // s[0]) for s in weights if len(s) > 1)
    matrices = tuple((*pair, count) for pair, count in sorted(sides.items()))
    total = 4 * sum(shape.numel() for shape in weights)
    return Payload(total, strategy.rule.bucket_mb * MIB, matrices=matrices)


def row(case, pairs):
    """One line of the table, of (baseline, strategy) as they were seen one after the other."""
    strategy = strategies.parse(case.sync)
    carried, rate = payload(strategy), formulas.goodput(case.mbit)
    alone = statistics.median(baseline.seconds for baseline, _ in pairs)
    seconds = statistics.median(seen.seconds for _, seen in pairs)
    waited = formulas.sync_wait(strategy, case.nodes, carried, rate, BACKWARD, alone)
    planned = alone + waited
    return {
        "nodes": case.nodes,
        "mbit": case.mbit,
        "sync": case.sync,
        "seconds": round(seconds, 4),
        "alone": round(alone, 4),
        "efficiency": round(statistics.median(b.seconds / s.seconds for b, s in pairs), 3),
        "sent": round(statistics.median(seen.sent for _, seen in pairs)),
        "formula": round(strategy.bytes_per_step(case.nodes, carried)),
        "planned": round(planned, 4),
        "error": round(planned / seconds - 1, 3),
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
    """Into docs/: what the machine was, and all cells so far."""
    table = rows(seen)
    document = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "rows": table,
    }
    (DOCS / "slow-links.json").write_text(json.dumps(document, indent=1) + "\n")
    (DOCS / "images/slow-links.svg").write_text(picture(table))
    path = DOCS / "slow-links.md"
    before, _, rest = path.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{page(table)}\n{END}{after}")
    return table
