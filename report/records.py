"""Reads a run directory, whole or half written, and says what is missing from it.

The layout is docs/run-directory.md. Steps are folded into columns while they are read, because a
long run has millions of step lines.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from report.errors import ReportError
from report.files import (
    Entry,
    dicts,
    found_in,
    natural,
    number,
    read_lines,
    read_object,
    time_of,
)

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


@dataclass
class StepColumns:
    """One entry per optimizer step of one rank in one attempt, in the order written."""

    step: array[int] = field(default_factory=lambda: array("q"))
    samples: array[float] = field(default_factory=lambda: array("d"))
    clock: array[float] = field(default_factory=lambda: array("d"))  # of the loop, at its end
    total: array[float] = field(default_factory=lambda: array("d"))  # in all categories
    data: array[float] = field(default_factory=lambda: array("d"))
    sync: array[float] = field(default_factory=lambda: array("d"))
    exact: array[int] = field(default_factory=lambda: array("b"))  # 1 in the warm-up of a strategy

    def __len__(self) -> int:
        return len(self.step)


@dataclass
class RankRecord:
    """What one rank wrote during one attempt."""

    host: str
    rank: int
    attempt: int
    start: Entry = field(default_factory=dict)
    end: Entry = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # by category, over all lines
    step_seconds: dict[str, float] = field(default_factory=dict)  # by category, over the step lines
    first_step: dict[str, float] = field(default_factory=dict)  # by category, the first step line
    warm_seconds: dict[str, float] = field(default_factory=dict)  # the exact ones without the first
    steps: StepColumns = field(default_factory=StepColumns)
    evaluations: list[Entry] = field(default_factory=list)
    checkpoints: list[Entry] = field(default_factory=list)


@dataclass
class Run:
    """The files of one run. Samples are in the order written; hosts are inventory names."""

    folder: Path
    plan: Entry
    attempts: list[Entry]
    status: str | None
    ranks: list[RankRecord]
    exits: dict[tuple[str, int], Entry]  # (host, attempt) -> the guard's entry
    iostat: dict[str, list[Entry]]  # host -> attempts
    net: dict[str, list[Entry]]  # host -> samples
    gpu: dict[str, list[Entry]]
    mounts: dict[str, list[Entry]]
    missing: list[str]  # sentences

    @property
    def hosts(self) -> list[str]:
        """All hosts that were planned or left a trace, by node rank where it is known."""
        named = [node.get("host") for node in dicts(self.plan.get("nodes"))]
        planned = [host for host in named if isinstance(host, str)]
        seen = {record.host for record in self.ranks} | {host for host, _ in self.exits}
        seen |= set(self.iostat) | set(self.net) | set(self.gpu)
        return planned + sorted(seen - set(planned), key=natural)


def attempt_of(entry: Entry) -> int:
    """The attempt that a line or an entry belongs to; the first, where it does not say."""
    value = entry.get("attempt", 1)
    return value if isinstance(value, int) else 1


def clean_attempts(ended: Entry) -> list[Entry]:
    """The entries of attempts.json, with fields of the right type where they are used."""
    found = []
    for entry in dicts(ended.get("attempts")):
        hosts = entry.get("nodes")
        hosts = [host for host in hosts if isinstance(host, str)] if isinstance(hosts, list) else []
        wall = time_of(entry.get("wall_seconds"))
        known = {"attempt": attempt_of(entry), "nodes": hosts, "wall_seconds": wall}
        found.append({**entry, **known})
    return found


def read_run(folder: Path) -> Run:
    """Reads `folder`. Raises ReportError when it holds nothing of a run."""
    if not folder.is_dir():
        raise ReportError(f"There is no run at {folder}: `ls runs` shows the runs there are.")
    missing: list[str] = []
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
        attempts=clean_attempts(ended),
        status=ended.get("status") if isinstance(ended.get("status"), str) else None,
        ranks=ranks,
        exits=read_exits(nodes),
        iostat={
            path.parent.name: dicts(read_object(path, missing).get("attempts"))
            for path in found_in(nodes, "iostat.json")
        },
        net=read_samples(nodes, "net.jsonl"),
        gpu=read_samples(nodes, "gpu.jsonl"),
        mounts=read_samples(nodes, "mounts.jsonl"),
        missing=missing,
    )


def read_samples(nodes: Path, name: str) -> dict[str, list[Entry]]:
    """Host -> samples that carry a time (`mono`), for net.jsonl, gpu.jsonl and mounts.jsonl."""
    found = {}
    for path in found_in(nodes, name):
        found[path.parent.name] = [
            x for x in read_lines(path) if time_of(x.get("mono")) is not None
        ]
    return found


def read_exits(nodes: Path) -> dict[tuple[str, int], Entry]:
    """(host, attempt) -> the entry of exit.json."""
    found = {}
    for path in found_in(nodes, "exit.json"):
        for entry in dicts(read_object(path, []).get("attempts")):
            found[path.parent.name, attempt_of(entry)] = entry
    return found


def read_ranks(nodes: Path, missing: list[str]) -> list[RankRecord]:
    """One RankRecord for each rank and attempt that left lines, ordered by attempt and rank."""
    records: dict[tuple[int, int, str], RankRecord] = {}
    for path in found_in(nodes, "rank*.steps.jsonl"):
        match = re.fullmatch(r"rank(\d+)\.steps\.jsonl", path.name)
        if not match:
            continue
        host, rank = path.parent.name, int(match.group(1))
        for line in read_lines(path):
            attempt = attempt_of(line)
            key = (attempt, rank, host)
            fold(records.setdefault(key, RankRecord(host, rank, attempt)), line)
    if not records:
        missing.append("No rank wrote its timings (nodes/<host>/rank<k>.steps.jsonl).")
    return [records[key] for key in sorted(records)]


def fold(record: RankRecord, line: Entry) -> None:
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


def fold_step(record: RankRecord, line: Entry, seconds: dict[str, float]) -> None:
    """Adds a step line to the columns."""
    if not record.steps:
        record.first_step = seconds
    add(record.step_seconds, seconds)
    columns, exact = record.steps, line.get("exact") is True
    if exact and record.steps:
        add(record.warm_seconds, seconds)
    columns.exact.append(int(exact))
    columns.step.append(int(number(line.get("step")) or 0))
    columns.samples.append(number(line.get("samples")) or 0.0)
    columns.clock.append(sum(record.seconds.values()))
    columns.total.append(sum(seconds.values()))
    columns.data.append(seconds.get("data", 0.0))
    columns.sync.append(seconds.get("sync_exposed", 0.0))


def clean_seconds(value: object) -> dict[str, float]:
    """The known categories that carry a number."""
    if not isinstance(value, dict):
        return {}
    return {key: time_of(value[key]) or 0.0 for key in CATEGORIES if key in value}


def add(total: dict[str, float], part: dict[str, float]) -> None:
    """Adds `part` to `total`, key by key."""
    for key, value in part.items():
        total[key] = total.get(key, 0.0) + value
