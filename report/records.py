"""Reads a run directory as it is, whole or half written, and says what is missing from it.

The layout is docs/run-directory.md. Nothing found in a file makes reading fail: a value of the
wrong type counts as absent, a line that does not parse is skipped. Steps are folded into columns
while they are read, because a long run has millions of step lines.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import re
import stat
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

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


LARGEST = 1e18  # no counter of bytes is larger
LONGEST = 1e10  # seconds
LARGEST_FILE = 4 << 30  # bytes
LONGEST_LINE = 1 << 20  # characters; what follows counts as a line that does not parse


class ReportError(Exception):
    """What the user can put right: one sentence with the thing, the cause and the remedy."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one sentence: raises ReportError."""

    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message}. See `{self.prog} --help`.")


@dataclass
class StepColumns:
    """One entry per optimizer step of one rank in one attempt, in the order written."""

    step: array[int] = field(default_factory=lambda: array("q"))
    samples: array[float] = field(default_factory=lambda: array("d"))
    clock: array[float] = field(default_factory=lambda: array("d"))  # of the loop, at its end
    total: array[float] = field(default_factory=lambda: array("d"))  # in all categories
    data: array[float] = field(default_factory=lambda: array("d"))
    sync: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.step)


@dataclass
class RankRecord:
    """What one rank wrote during one attempt."""

    host: str
    rank: int
    attempt: int
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, Any] = field(default_factory=dict)  # by category, over all lines
    step_seconds: dict[str, Any] = field(default_factory=dict)  # by category, over the step lines
    first_step: dict[str, Any] = field(default_factory=dict)  # by category, the first step line
    steps: StepColumns = field(default_factory=StepColumns)
    evaluations: list[Any] = field(default_factory=list)
    checkpoints: list[Any] = field(default_factory=list)


@dataclass
class Run:
    """The files of one run. Samples are in the order written; hosts are inventory names."""

    folder: Path
    plan: dict[str, Any]
    attempts: list[Any]
    status: str | None
    ranks: list[Any]
    exits: dict[tuple[str, int], dict[str, Any]]  # (host, attempt) -> the guard's entry
    iostat: dict[str, Any]  # host -> list of attempts
    net: dict[str, Any]  # host -> list of samples
    gpu: dict[str, Any]
    mounts: dict[str, Any]
    missing: list[Any]  # sentences

    @property
    def hosts(self) -> list[Any]:
        """All hosts that were planned or left a trace, by node rank where it is known."""
        planned = [node.get("host") for node in dicts(self.plan.get("nodes"))]
        planned = [host for host in planned if isinstance(host, str)]
        seen = {record.host for record in self.ranks} | {host for host, _ in self.exits}
        seen |= set(self.iostat) | set(self.net) | set(self.gpu)
        return planned + sorted(seen - set(planned), key=natural)


def number(value) -> float | None:
    """The value when it is a number that a file of a run can mean, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) and abs(value) < LARGEST else None


def time_of(value) -> float | None:
    """The value when it can be seconds, of a clock since boot or of a duration; else None."""
    value = number(value)
    return value if value is not None and 0 <= value < LONGEST else None


def attempt_of(entry: dict[str, Any]) -> int:
    """The attempt that a line or an entry belongs to; the first, where it does not say."""
    value = entry.get("attempt", 1)
    return value if isinstance(value, int) else 1


def clean_attempts(ended: dict[str, Any]) -> list[Any]:
    """The entries of attempts.json, with fields of the right type where they are used."""
    found = []
    for entry in dicts(ended.get("attempts")):
        hosts = entry.get("nodes")
        hosts = [host for host in hosts if isinstance(host, str)] if isinstance(hosts, list) else []
        wall = time_of(entry.get("wall_seconds"))
        known = {"attempt": attempt_of(entry), "nodes": hosts, "wall_seconds": wall}
        found.append({**entry, **known})
    return found


def dicts(value) -> list[Any]:
    """The dictionaries in a list; empty when it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_run(folder: Path) -> Run:
    """Reads `folder`. Raises ReportError when there is nothing of a run in it."""
    if not folder.is_dir():
        raise ReportError(f"There is no run at {folder}: `ls runs` shows the runs there are.")
    missing: list[Any] = []
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


def parse(text: str):
    """A JSON value; NaN and Infinity, which JSON does not have, become null. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def open_record(path: Path) -> TextIO:
    """A regular file of at most LARGEST_FILE bytes, for reading. Raises OSError for a link, a FIFO
    (which would be waited for) or a device (which may have no end)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST_FILE:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file, or too large", str(path))
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def found_in(nodes: Path, pattern: str) -> list[Path]:
    """The files nodes/<host>/<pattern> in order; a name that no text can hold is no host's."""
    return by_host(path for path in nodes.glob(f"*/{pattern}") if str(path).isprintable())


def read_object(path: Path, missing: list[Any]) -> dict[str, Any]:
    """A JSON object; {} when it cannot be had, with a sentence in `missing`."""
    try:
        with open_record(path) as file:
            value = parse(file.read())
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
        with open_record(path) as file:
            while line := file.readline(LONGEST_LINE):
                try:
                    value = parse(line)
                except ValueError:
                    continue
                if isinstance(value, dict):
                    yield value
    except OSError:
        return


def natural(name: str) -> list[Any]:
    """A key that sorts node9 before node10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def by_host(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural(path.parent.name))


def read_samples(nodes: Path, name: str) -> dict[str, Any]:
    """Host -> samples that carry a time (`mono`), for net.jsonl, gpu.jsonl and mounts.jsonl."""
    found = {}
    for path in found_in(nodes, name):
        found[path.parent.name] = [
            x for x in read_lines(path) if time_of(x.get("mono")) is not None
        ]
    return found


def read_exits(nodes: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(host, attempt) -> the entry of exit.json."""
    found = {}
    for path in found_in(nodes, "exit.json"):
        for entry in dicts(read_object(path, []).get("attempts")):
            found[path.parent.name, attempt_of(entry)] = entry
    return found


def read_ranks(nodes: Path, missing: list[Any]) -> list[Any]:
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


def fold(record: RankRecord, line: dict[str, Any]) -> None:
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


def fold_step(record: RankRecord, line: dict[str, Any], seconds: dict[str, Any]) -> None:
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


def clean_seconds(value) -> dict[str, Any]:
    """The known categories that carry a number."""
    if not isinstance(value, dict):
        return {}
    return {key: time_of(value[key]) or 0.0 for key in CATEGORIES if key in value}


def add(total: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds `part` to `total`, key by key."""
    for key, value in part.items():
        total[key] = total.get(key, 0.0) + value
