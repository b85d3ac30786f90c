"""Reads a run directory as it is, whole or half written, and says what is missing from it.

The layout is docs/run-directory.md. Nothing found in a file makes reading fail: a value of the
wrong type counts as absent, a line that does not parse is skipped. Steps are folded into columns
while they are read, because a long run has millions of step lines.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

CATEGORIES = (
    "start_stop",
    "data",
    "h2d",
    "forward",
    "backward",
    "sync_exposed",
    "optimizer",
    "evaluate",
    "checkpoint",
    "other",
)


class ReportError(Exception):
    """What the user can put right: one sentence with the thing, the cause and the remedy."""


@dataclass
class StepColumns:
    """One entry per optimizer step of one rank in one attempt, in the order written."""

    step: array = field(default_factory=lambda: array("q"))
    samples: array = field(default_factory=lambda: array("d"))
    clock: array = field(default_factory=lambda: array("d"))  # loop seconds when the step had ended
    total: array = field(default_factory=lambda: array("d"))  # seconds of the step, all categories
    data: array = field(default_factory=lambda: array("d"))
    sync: array = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.step)


@dataclass
class RankRecord:
    """What one rank wrote during one attempt."""

    host: str
    rank: int
    attempt: int
    start: dict = field(default_factory=dict)
    end: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=dict)  # by category, over all lines
    step_seconds: dict = field(default_factory=dict)  # by category, over the step lines
    first_step: dict = field(default_factory=dict)  # by category, the first step line
    steps: StepColumns = field(default_factory=StepColumns)
    evaluations: list = field(default_factory=list)
    checkpoints: list = field(default_factory=list)


@dataclass
class Run:
    """The files of one run. Samples are in the order written; hosts are inventory names."""

    folder: Path
    plan: dict
    attempts: list
    status: str | None
    ranks: list
    exits: dict  # (host, attempt) -> the guard's entry
    iostat: dict  # host -> list of attempts
    net: dict  # host -> list of samples
    gpu: dict
    mounts: dict
    missing: list  # sentences

    @property
    def hosts(self) -> list:
        """All hosts that were planned or left a trace, by node rank where it is known."""
        planned = [node["host"] for node in dicts(self.plan.get("nodes")) if "host" in node]
        seen = {record.host for record in self.ranks} | {host for host, _ in self.exits}
        seen |= set(self.iostat) | set(self.net) | set(self.gpu)
        return planned + sorted(seen - set(planned))


def number(value) -> float | None:
    """The value when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def dicts(value) -> list:
    """The dictionaries in a list; empty when it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_run(folder: Path) -> Run:
    """Reads `folder`. Raises ReportError when there is nothing of a run in it."""
    if not folder.is_dir():
        raise ReportError(f"There is no run at {folder}: `ls runs` shows the runs there are.")
    missing: list = []
    plan = read_object(folder / "plan.json", missing)
    ended = read_object(folder / "attempts.json", missing)
    nodes = folder / "nodes"
    if not plan and not ended and not nodes.is_dir():
        raise ReportError(
            f"{folder} is not a run directory: it has neither plan.json nor nodes/. "
            "Give the folder of one run."
        )
    ranks = read_ranks(nodes, missing)
    return Run(
        folder=folder,
        plan=plan,
        attempts=dicts(ended.get("attempts")),
        status=ended.get("status") if isinstance(ended.get("status"), str) else None,
        ranks=ranks,
        exits=read_exits(nodes),
        iostat={
            path.parent.name: dicts(read_object(path, missing).get("attempts"))
            for path in sorted(nodes.glob("*/iostat.json"))
        },
        net=read_samples(nodes, "net.jsonl"),
        gpu=read_samples(nodes, "gpu.jsonl"),
        mounts=read_samples(nodes, "mounts.jsonl"),
        missing=missing,
    )


def read_object(path: Path, missing: list) -> dict:
    """A JSON object; {} when it cannot be had, with a sentence in `missing`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        missing.append(f"{path.name} is missing.")
        return {}
    except (OSError, ValueError):
        missing.append(f"{'/'.join(path.parts[-2:])} cannot be read as JSON.")
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path):
    """Yields the JSON objects of a JSON Lines file; lines that do not parse are skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    value = json.loads(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value
    except OSError:
        return


def read_samples(nodes: Path, name: str) -> dict:
    """Host -> samples that carry a time (`mono`), for net.jsonl, gpu.jsonl and mounts.jsonl."""
    found = {}
    for path in sorted(nodes.glob(f"*/{name}")):
        found[path.parent.name] = [x for x in read_lines(path) if number(x.get("mono")) is not None]
    return found


def read_exits(nodes: Path) -> dict:
    """(host, attempt) -> the entry of exit.json."""
    found = {}
    for path in sorted(nodes.glob("*/exit.json")):
        for entry in dicts(read_object(path, []).get("attempts")):
            found[path.parent.name, entry.get("attempt", 1)] = entry
    return found


def read_ranks(nodes: Path, missing: list) -> list:
    """One RankRecord for each rank and attempt that left lines, ordered by attempt and rank."""
    records: dict = {}
    for path in sorted(nodes.glob("*/rank*.steps.jsonl")):
        match = re.fullmatch(r"rank(\d+)\.steps\.jsonl", path.name)
        if not match:
            continue
        host, rank = path.parent.name, int(match.group(1))
        for line in read_lines(path):
            attempt = line.get("attempt", 1)
            if not isinstance(attempt, int):
                continue
            key = (attempt, rank, host)
            fold(records.setdefault(key, RankRecord(host, rank, attempt)), line)
    if not records:
        missing.append("No rank wrote its timings (nodes/<host>/rank<k>.steps.jsonl).")
    return [records[key] for key in sorted(records)]


def fold(record: RankRecord, line: dict) -> None:
    """Adds one line of rank<k>.steps.jsonl to the rank's record."""
    kind = line.get("kind")
    if kind == "start":
        record.start = line
        return
    seconds = clean_seconds(line.get("seconds"))
    add(record.seconds, seconds)
    if kind == "step":
        fold_step(record, line, seconds)
    elif kind == "evaluate":
        record.evaluations.append(line)
    elif kind == "checkpoint":
        record.checkpoints.append(line)
    elif kind == "end":
        record.end = line


def fold_step(record: RankRecord, line: dict, seconds: dict) -> None:
    """Adds a step line to the columns."""
    if not record.steps:
        record.first_step = seconds
    add(record.step_seconds, seconds)
    columns = record.steps
    columns.step.append(int(number(line.get("step")) or 0))
    columns.samples.append(number(line.get("samples")) or 0.0)
    columns.clock.append(sum(record.seconds.values()))
    columns.total.append(sum(seconds.values()))
    columns.data.append(seconds.get("data", 0.0))
    columns.sync.append(seconds.get("sync_exposed", 0.0))


def clean_seconds(value) -> dict:
    """The known categories that carry a number."""
    if not isinstance(value, dict):
        return {}
    return {key: number(value[key]) or 0.0 for key in CATEGORIES if key in value}


def add(total: dict, part: dict) -> None:
    """Adds `part` to `total`, key by key."""
    for key, value in part.items():
        total[key] = total.get(key, 0.0) + value
