"""Draw forty trials by a seed, so that nobody knows them before they run. Half of the runs are
healthy. In the others, the kind, strength, machine and time of the fault are drawn.

A fault of `cost` c alone makes a step 1 + c times as long. bench/verdict.md has the rules."""

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
# Faults that begin in the middle, or end before the run does: the range of that second.
TIMED = {"middle": (20.0, 30.0), "ends": (25.0, 35.0)}
CUT = 5.0  # seconds between two answers of `make status`
GOOD = ("compute", "none")  # verdicts that report no fault
# {kind of fault: the right verdict}.
CAUSES = {
    "rate": "network", "slow link": "slow_link", "decoding": "data_decode", "share": "data_share",
    "disk": "data_disk", "copies": "h2d", "slower": "straggler", "duty cycle": "straggler",
    "neighbour": "cpu_contention",
}  # fmt: skip
# Kinds of healthy runs: what differs between machines is too small to matter.
HEALTHY = ("plain", "unequal", "neighbour below", "busy disk")
# Of two faults, the larger one and the smaller one.
FIRST, SECOND = ("rate", "decoding", "copies", "slower"), ("rate", "copies", "slower")


class Blind(NamedTuple):
    """A trial. `usual`: what each machine's /srv/trial.json has from the start. `faults`: methods
    of faults.py with their arguments. `right`: the right causes, that of the larger fault first.
    `begins`, `ends`: seconds after the third step; None for a fault that stays."""

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
    """Return 22 healthy runs, 8 with a fault, 4 with two faults, 4 with a fault from the middle on,
    and 2 with a fault until the middle, shuffled."""
    chance, trials = random.Random(seed), []
    plan = [*["healthy"] * 22, *["one"] * 8, *["two"] * 4, *["middle"] * 4, *["ends"] * 2]
    singles = chance.sample([*CAUSES], 8)
    for number, what in enumerate(plan, 1):
        healthy, nodes = HEALTHY[number % len(HEALTHY)], 4
        # Steps of 0.24 to 0.96 s; shorter if the fault changes, since a verdict needs 200 of them.
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
    """Return (method of faults.py, its arguments) for a fault of this kind and cost."""
    step, node = BATCH * usual["image"], chance.randint(1, nodes)
    longer = (1 + cost) * step
    if kind in ("rate", "slow link"):
        # 8 layers of fp32 values.
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
    """Judge the verdict of a trial's line, by the rules of bench/verdict.md."""
    second = (line.get("runner_up") or {}).get("cause")
    if trial.ends is not None:  # it cost little of the whole run, so being second is enough
        return trial.right[0] in (line["report"], second)
    named = (line["report"], *([second] if len(trial.right) > 1 else []))
    return named == trial.right or (trial.healthy and line["report"] in GOOD)


def answers(folder: Path, begin: float, end: float) -> Iterator[tuple[float, str]]:
    """Yield (seconds since `begin`, the answer of `make status` at that time). It is computed from
    the records that were there at that time. `begin`, `end`: Unix time."""
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
    """Yield (Unix time at which it was written, line) for each line of a record. A machine's lines
    have a time. A rank's lines have durations that add up, except that of a stall (`idle`)."""
    unix = 0.0
    for text in path.read_text().splitlines(keepends=True):
        line = json.loads(text) if text.endswith("\n") else {}
        unix = line.get("unix", unix + sum(line.get("seconds", {}).values()))
        if line:
            yield unix + line.get("idle", 0.0), text


def live_seconds(trial: Blind, series: list[tuple[float, str]]) -> float | None:
    """Return the seconds from the fault's beginning, or its end, until two answers in a row are
    right; None if they never are."""
    is_over = trial.ends is not None or trial.healthy
    right = GOOD if is_over else {trial.right[0], LIVE.get(trial.right[0])}
    for (since, answer), (_, following) in zip(series, series[1:]):
        if answer in right and following in right:
            return since
    return None


def interval(good: int, total: int) -> str:
    """Format a share with Wilson's 95 % interval."""
    if not total:
        return "-"
    share, z2 = good / total, 1.96**2
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = 1.96 * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return f"{good} of {total} ({100 * low:.0f} to {100 * high:.0f} %)"


def table(seed: str, lines: list[Line]) -> str:
    """Return the figures and the confusion matrix of a seed's trials, in Markdown."""
    trials = {trial.name: trial for trial in draw(seed)}
    whole = [(trials[e["trial"]], e) for e in lines if "broken" not in e and e["trial"] in trials]
    names = sorted({e["report"] for _, e in whole})
    head = ["what is right", *(f"`{name}`" for name in names), "right"]
    rows = [head, ["---"] * (len(names) + 2)]
    for right in dict.fromkeys(row_of(trial) for trial in trials.values()):
        pairs = [(trial, e) for trial, e in whole if row_of(trial) == right]
        counts = Counter(e["report"] for _, e in pairs)
        good = sum(is_right(trial, e) for trial, e in pairs)
        cells = [str(counts[name] or "") for name in names]
        rows.append([right, *cells, interval(good, len(pairs))])
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
    """Return the title of a trial's row in the table."""
    place = " from the middle" if trial.begins else ", that ends" if trial.ends else ""
    return " before ".join(f"`{cause}`" for cause in trial.right) + place
