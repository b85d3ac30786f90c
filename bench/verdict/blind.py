"""Forty trials that a seed draws, so that nobody knows them before: half of the runs are healthy,
and in the others kind, strength, place and time of the fault are drawn.

A fault's `cost` is by how many times it makes a step longer by itself. What is right stands in
bench/verdict.md, and in each trial before it runs.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench.verdict.trials import BATCH, DISK, FILES, LIVE, SLOW_FILES, Fault, Line, Variant
from report.status import Follower

STEPS = 75.0  # seconds of a run after its third step
TIMED = {"middle": (20.0, 30.0), "ends": (25.0, 35.0)}  # where a fault begins or ends
CUT = 5.0  # seconds between two answers of `make status`
GOOD = ("compute", "none")  # verdicts that call nothing wrong
CAUSES = {
    "rate": "network", "slow link": "slow_link", "decoding": "data_decode", "share": "data_share",
    "disk": "data_disk", "copies": "h2d", "slower": "straggler", "duty cycle": "straggler",
    "neighbour": "cpu_contention",
}  # fmt: skip
HEALTHY = ("plain", "unequal", "neighbour below", "busy disk")
FIRST, SECOND = ("rate", "decoding", "copies", "slower"), ("rate", "copies", "slower")


class Blind(NamedTuple):
    """A trial. `usual`: what each machine's /srv/trial.json has from the start; `faults`: methods
    of faults.py with their words; `right`: causes, the larger first; `begins`, `ends`: seconds."""

    name: str
    kinds: tuple[str, ...]
    script: bool
    nodes: int
    usual: Mapping[str, float]
    faults: tuple[tuple[str, Mapping[str, Any]], ...]
    right: tuple[str, ...] = ("compute",)
    begins: float = 0.0
    ends: float | None = None

    @property
    def healthy(self) -> bool:
        return self.right == ("compute",)

    @property
    def variant(self) -> Variant:
        return Variant(self.script, is_share="share" in self.kinds)

    @property
    def fault(self) -> Fault:
        roots = {"decoding": SLOW_FILES, "share": SLOW_FILES, "disk": DISK}
        root = next((roots[kind] for kind in self.kinds if kind in roots), FILES)
        return Fault("", "", self.right[0], root=root)


def draw(seed: str) -> list[Blind]:
    """22 healthy runs, 8 with a fault, 4 with two, 4 with one from the middle on, 2 until then."""
    chance, trials = random.Random(seed), []
    plan = [*["healthy"] * 22, *["one"] * 8, *["two"] * 4, *["middle"] * 4, *["ends"] * 2]
    singles = chance.sample([*CAUSES], 8)
    for number, what in enumerate(plan, 1):
        healthy, nodes = HEALTHY[number % len(HEALTHY)], 4
        # Seconds: steps of 0.24 to 0.96 s; shorter ones, of which 200 are judged, if they change.
        image = round(chance.uniform(*((0.015, 0.025) if what in TIMED else (0.03, 0.12))), 4)
        usual = {"image": image, "width": chance.choice((60_000, 125_000, 250_000))}
        if what == "healthy":
            kinds, costs = (healthy,), [chance.uniform(0.02, 0.1)]
            nodes = chance.randint(1 if healthy == "plain" else 2, 4)
        elif what == "two":
            first = chance.choice(FIRST)
            kinds = (first, chance.choice([kind for kind in SECOND if kind != first]))
            costs = [chance.uniform(0.9, 1.4), chance.uniform(0.3, 0.4)]
        elif what == "one":
            kinds, costs = (singles.pop(),), [chance.uniform(0.6, 1.5)]
        else:
            kinds, costs = (chance.choice(FIRST),), [chance.uniform(1.0, 1.5)]
        trials.append(Blind(
            f"blind-{number}", kinds, chance.random() < 0.5, nodes, usual,
            tuple(make(chance, nodes, usual, kind, cost) for kind, cost in zip(kinds, costs)),
            tuple(CAUSES[kind] for kind in kinds if what != "healthy") or ("compute",),
            round(chance.uniform(*TIMED[what]), 1) if what == "middle" else 0.0,
            round(chance.uniform(*TIMED[what]), 1) if what == "ends" else None,
        ))  # fmt: skip
    chance.shuffle(trials)
    return trials


def make(
    chance: random.Random, nodes: int, usual: Mapping[str, float], kind: str, cost: float
) -> tuple[str, Mapping[str, Any]]:
    """Turn a fault's cost into a method of faults.py and its words, for a model of this size."""
    step, node = BATCH * usual["image"], chance.randint(1, nodes)
    longer = (1 + cost) * step
    if kind in ("rate", "slow link"):
        sent = 2 * (nodes - 1) / nodes * 32 * usual["width"]
        # Three quarters of a step are backward, which hides the transfer.
        mbit = max(1, round(8e-6 * sent / (0.75 * step + cost * step)))
        return "rate", {"mbit": mbit, **({"node": node} if kind == "slow link" else {})}
    if kind in ("decoding", "share"):
        return "slow_files", {"milliseconds": round(1000 * longer / BATCH)}
    if kind == "disk":
        return "slow_disk", {"megabytes": round(BATCH * 0.131 / longer, 3)}
    if kind == "copies":
        return "change", {"copy": round(cost * step, 3)}
    if kind in ("slower", "unequal"):
        return "change", {"node": node, "times": round(1 + cost, 2)}
    if kind == "duty cycle":
        return "duty_cycle", {"node": node, "stopped": round(0.2 * cost / (1 + cost), 3)}
    if kind.startswith("neighbour"):
        programs = 1 if kind == "neighbour below" else chance.randint(4, 6)
        burn = round(cost * step / programs, 3)
        return "neighbours", {"node": node, "programs": programs, "burn": burn}
    return ("busy_disk", {}) if kind == "busy disk" else ("nothing", {})


def is_right(trial: Blind, line: Line) -> bool:
    """By the rules of bench/verdict.md."""
    second = (line.get("runner_up") or {}).get("cause")
    if trial.ends is not None:  # it cost little of the whole run, and is to be named all the same
        return trial.right[0] in (line["report"], second)
    named = (line["report"], *([second] if len(trial.right) > 1 else []))
    return named == trial.right or (trial.healthy and line["report"] in GOOD)


def answers(folder: Path, begin: float, end: float) -> Iterator[tuple[float, str]]:
    """The seconds since `begin` (Unix time), and the answer that `make status` gave at that time,
    by the records cut there."""
    plan, files = (folder / "plan.json").read_bytes(), sorted(folder.glob("nodes/*/*.jsonl"))
    timed = {path.relative_to(folder): list(timed_lines(path)) for path in files}
    running = {"status": "running", "attempts": []}
    for count in range(1, 1 + int((end - begin) / CUT)):
        now = begin + count * CUT
        with tempfile.TemporaryDirectory() as scratch:
            cut = Path(scratch)
            (cut / "plan.json").write_bytes(plan)
            (cut / "attempts.json").write_text(json.dumps(running))
            for name, lines in timed.items():
                known = [(unix, text) for unix, text in lines if unix <= now]
                if known:
                    (cut / name).parent.mkdir(parents=True, exist_ok=True)
                    (cut / name).write_text("".join(text for _, text in known))
                    os.utime(cut / name, (known[-1][0], known[-1][0]))
            with mock.patch("time.time", lambda now=now: now):
                progress = Follower(cut).look()
        hangs = progress is not None and progress.hang
        yield count * CUT, "stands" if hangs else (progress and progress.cause) or "none"


def timed_lines(path: Path) -> Iterator[tuple[float, str]]:
    """Each line of a record, with the Unix time at which it was written. A machine's lines have
    times; those of a rank add up, except one on a silence."""
    unix = 0.0
    for text in path.read_text().splitlines(keepends=True):
        line = json.loads(text) if text.endswith("\n") else {}
        unix = line.get("unix", unix + sum(line.get("seconds", {}).values()))
        if line:
            yield unix + line.get("idle", 0.0), text


def live_seconds(trial: Blind, series: list[tuple[float, str]]) -> float | None:
    """Seconds since the fault's beginning, or since its end, until two answers in a row are right;
    None if they never are."""
    over = trial.ends is not None or trial.healthy
    right = GOOD if over else {trial.right[0], LIVE.get(trial.right[0])}
    for (since, answer), (_, following) in zip(series, series[1:]):
        if answer in right and following in right:
            return since
    return None


def interval(good: int, total: int) -> str:
    """A share with Wilson's 95 % interval."""
    if not total:
        return "-"
    share, z2 = good / total, 1.96**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = 1.96 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return f"{good} of {total} ({100 * low:.0f} to {100 * high:.0f} %)"


def table(seed: str, lines: list[Line]) -> str:
    """The confusion matrix of a pass, and its figures, in Markdown."""
    trials = {trial.name: trial for trial in draw(seed)}
    whole = [(trials[e["trial"]], e) for e in lines if "broken" not in e and e["trial"] in trials]
    said = sorted({e["report"] for _, e in whole})
    rows = [["what is right", *(f"`{name}`" for name in said), "right"], ["---"] * (len(said) + 2)]
    for right in dict.fromkeys(row_of(trial) for trial in trials.values()):
        own = [(trial, e) for trial, e in whole if row_of(trial) == right]
        counts = Counter(e["report"] for _, e in own)
        good = sum(is_right(trial, e) for trial, e in own)
        rows.append([right, *(str(counts[name] or "") for name in said), interval(good, len(own))])
    calm = [e["report"] in GOOD for trial, e in whole if trial.healthy]
    waits = [(live_seconds(trial, e["live"]), trial) for trial, e in whole if e["live"]]
    faults = [seconds for seconds, trial in waits if not trial.healthy]
    facts = [
        f"Seed {seed}, rules of {', '.join({e['commit'] for _, e in whole})}: {len(whole)} trials.",
        f"- right: {interval(sum(is_right(*pair) for pair in whole), len(whole))}",
        f"- false alarms among healthy runs: {interval(calm.count(False), len(calm))}",
        f"- `make status` right within 60 s of a fault's beginning, or of its end: "
        f"{interval(sum(s is not None and s <= 60 for s in faults), len(faults))}",
    ]
    return "\n".join([*facts, "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def row_of(trial: Blind) -> str:
    """The row of a trial in the table."""
    place = " from the middle" if trial.begins else ", that ends" if trial.ends else ""
    return " before ".join(f"`{cause}`" for cause in trial.right) + place
