"""Reads a run directory, whole or half written, and says what is missing from it.

The layout is docs/run-directory.md. Steps are folded into columns while they are read, because a
long run has millions of step lines.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract import digests
from contract.errors import UserError
from report.files import (
    MOST_ATTEMPTS,
    MOST_RANKS,
    Entry,
    count,
    dicts,
    found_in,
    natural,
    number,
    only,
    read_lines,
    read_object,
    text,
    texts,
    time_of,
)

# Of the times of a line. Digests have no start and no stop in them.
CATEGORIES = ("start_stop", *digests.CATEGORIES)

# Of all ranks together, steps that are kept one by one (56 bytes each), and of each rank in an
# attempt, evaluations. All times are summed up to the last line whatever their number.
MOST_STEPS, MOST_EVALUATIONS, MOST_RECORDS = 2_000_000, 2000, 4096
# Of a rank, options and versions, and characters of one.
MOST_SETTINGS, MOST_NAME = 200, 1000


def matrices(value: object) -> list[list[int]] | None:
    """`[rows, columns, how many]` of the trained weights."""
    rows = value if isinstance(value, list) and len(value) <= MOST_RANKS else None
    good = rows is not None and all(
        isinstance(row, list) and len(row) == 3 and all(count(one, 10**12) for one in row)
        for row in rows
    )
    return rows if good else None


# How each field of an entry is read: None where it is not what it should be.
Fields = Mapping[str, Callable[..., Any]]


def instructions(value: object) -> Entry | None:
    return only({"onednn_limit": text}, value) if isinstance(value, dict) else None


def versions(value: object) -> dict[str, str] | None:
    """Name -> version."""
    if not isinstance(value, dict):
        return None
    first = list(value.items())[:MOST_SETTINGS]
    return {name[:MOST_NAME]: one[:MOST_NAME] for name, one in first if isinstance(one, str)}


def settings(value: object) -> Entry | None:
    """The options of the trainer: plain values, short texts and lists of plain values."""
    if not isinstance(value, dict):
        return None
    first = list(value.items())[:MOST_SETTINGS]
    return {name[:MOST_NAME]: one for name, one in first if plain(one) or plain_list(one)}


def plain(value: object) -> bool:
    return (
        value is None
        or isinstance(value, bool)
        or number(value) is not None
        or (isinstance(value, str) and len(value) < MOST_NAME)
    )


def plain_list(value: object) -> bool:
    return isinstance(value, list) and len(value) < MOST_SETTINGS and all(map(plain, value))


def options(value: object) -> Entry | None:
    """What was asked of the launcher: plain values, and the trainer's words."""
    if not isinstance(value, dict):
        return None
    plain = {
        name: one
        for name, one in list(value.items())[:MOST_RANKS]
        if isinstance(one, (str, bool)) or number(one) is not None
    }
    return {**plain, **only({"trainer": texts}, value)}


def predicted(value: object) -> Entry | None:
    if not isinstance(value, dict) or number(value.get("images_per_second")) is None:
        return None
    return only({"images_per_second": number, "made_unix": number}, value)


def nodes(value: object) -> list[Entry]:
    fields = {"host": text, "connection": text, "ranks": ranks, "interface": text}
    return [only(fields, node) for node in dicts(value)[:MOST_RANKS]]


def ranks(value: object) -> list[int]:
    every = value if isinstance(value, list) else []
    return [one for one in every if type(one) is int and 0 <= one < MOST_RANKS]


def cause(value: object) -> Entry | None:
    return only(CAUSE, value) if isinstance(value, dict) else None


def script(value: object) -> Entry | None:
    """What ran in the place of the trainer."""
    fields = {"words": texts, "arguments": texts, "folder": text}
    return only(fields, value) if isinstance(value, dict) else None


def positive(value: object) -> float | None:
    found = number(value)
    return found if found is not None and found > 0 else None


def natural_number(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


def peaks(value: object) -> list[float] | None:
    """The bytes that each rank had at most."""
    every = list(value.values())[:MOST_RANKS] if isinstance(value, dict) else []
    return [found for one in every if (found := number(one)) is not None]


# Of each file the fields that the report reads: others are not kept, and what is of another kind
# counts as absent. What is read behind this has its type.
PLAN: Fields = {
    **dict.fromkeys(("run", "model", "data", "sync", "precision", "precision_why"), text),
    **dict.fromkeys(("tandem", "git_revision", "git_diff", "code_sha256"), text),
    **{"epochs": count, "world_size": count, "created_unix": number},
    **{"nodes": nodes, "options": options, "predicted": predicted, "script": script},
}
CAUSE: Fields = {
    **dict.fromkeys(("host", "signal", "exception", "message", "remedy"), text),
    **{"rank": natural_number, "exit_code": number, "last_lines": texts},
}
ATTEMPT: Fields = {
    **dict.fromkeys(("reason", "status"), text),
    **{"nodes": texts, "world_size": count, "wall_seconds": time_of},
    **{"resumed_samples": number, "first_cause": cause},
}
START: Fields = {
    **dict.fromkeys(("model", "device", "torch", "python", "cpu", "sync", "precision"), text),
    **dict.fromkeys(("mono_process", "mono"), time_of),
    **dict.fromkeys(
        ("parameters", "gradient_bytes", "bucket_mb", "global_batch", "accumulate", "train_images"),
        positive,
    ),
    **dict.fromkeys(("eval_images", "steps_per_epoch", "image_size", "epochs"), positive),
    **{"warmup": positive, "unix": number, "workers": natural_number, "record": natural_number},
    **{"cores": positive, "versions": versions, "options": settings},
    **{"world_size": count, "matrices": matrices, "instructions": instructions},
}
END: Fields = {"mono": time_of, "status": text, "peak_memory_bytes": number, "bad_images": number}
EVALUATION: Fields = dict.fromkeys(("epoch", "top1", "top5", "loss", "train_loss"), number)
EXIT: Fields = {"mono_start": time_of, "mono_end": time_of, "peak_memory_bytes": peaks}


@dataclass
class StepColumns:
    """One entry per optimizer step of one rank in one attempt, in the order written, up to `most`
    of them. `beyond`: seconds of the steps that followed."""

    step: array[int] = field(default_factory=lambda: array("q"))
    samples: array[float] = field(default_factory=lambda: array("d"))
    clock: array[float] = field(default_factory=lambda: array("d"))  # of the loop, at its end
    total: array[float] = field(default_factory=lambda: array("d"))  # in all categories
    data: array[float] = field(default_factory=lambda: array("d"))
    sync: array[float] = field(default_factory=lambda: array("d"))
    loss: array[float] = field(default_factory=lambda: array("d"))  # NaN between log points
    exact: array[int] = field(default_factory=lambda: array("b"))  # 1 in the warm-up of a strategy
    most: int = MOST_STEPS
    beyond: float = 0.0

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
    least_wait: float | None = None  # of all ranks, mean over steps; None: it follows from `steps`


@dataclass(frozen=True)
class Samples:
    """A machine's lines of one kind: those of a file, then what was told and is not in it."""

    path: Path | None
    told: list[Entry] = field(default_factory=list)

    def __iter__(self) -> Iterator[Entry]:
        if self.path is not None:
            yield from read_lines(self.path)
        yield from self.told


@dataclass
class Run:
    """The files of one run. Samples are in the order written; hosts are inventory names. What is
    long is read when it is gone through: from `iostat` to `machines` they are files by host."""

    folder: Path
    plan: Entry
    attempts: list[Entry]
    status: str | None
    ranks: list[RankRecord]
    exits: dict[tuple[str, int], Entry]  # (host, attempt) -> the guard's entry
    iostat: dict[str, Path]
    net: dict[str, Samples]
    gpu: dict[str, Samples]
    mounts: dict[str, Samples]
    machines: dict[str, Samples]
    missing: list[str]  # sentences
    # Of attempts that are known by digests alone: lines of digest.jsonl by host, and when the last
    # of them was told.
    told: dict[str, list[Entry]] = field(default_factory=dict)
    told_until: float | None = None

    @property
    def untimed(self) -> bool:
        """Whether it is a script that timed no steps."""
        return bool(self.plan.get("script")) and not self.ranks

    @property
    def hosts(self) -> list[str]:
        """All hosts that were planned or left a trace, by node rank where it is known."""
        planned = [node["host"] for node in self.plan.get("nodes", []) if "host" in node]
        seen = {record.host for record in self.ranks} | {host for host, _ in self.exits}
        seen |= set(self.iostat) | set(self.net) | set(self.gpu)
        return planned + sorted(seen - set(planned), key=natural)


def attempt_of(entry: Entry) -> int:
    """The attempt that a line or an entry belongs to; the first, where it does not say."""
    return count(entry.get("attempt"), MOST_ATTEMPTS) or 1


def clean_attempts(ended: Entry) -> list[Entry]:
    """The entries of attempts.json; those without a list of machines have an empty one."""
    entries = dicts(ended.get("attempts"))[:MOST_ATTEMPTS]
    usual: Entry = {"nodes": [], "wall_seconds": None}
    return [{**usual, **only(ATTEMPT, one), "attempt": attempt_of(one)} for one in entries]


def read_run(folder: Path) -> Run:
    """Reads `folder`. Raises UserError when it holds nothing of a run."""
    if not folder.is_dir():
        raise UserError(f"There is no run at {folder}: `ls runs` shows the runs there are.")
    missing: list[str] = []
    plan = read_object(folder / "plan.json", missing)
    ended = read_object(folder / "attempts.json", missing)
    of_nodes = folder / "nodes"
    if not plan and not ended and not of_nodes.is_dir():
        raise UserError(
            f"{folder} is not a run directory: it has neither plan.json nor nodes/. "
            "Give the folder of one run."
        )
    return Run(
        folder=folder,
        plan=only(PLAN, plan),
        attempts=clean_attempts(ended),
        status=text(ended.get("status")),
        ranks=read_ranks(of_nodes, missing, "script" not in only(PLAN, plan)),
        exits=read_exits(of_nodes),
        iostat=by_name(of_nodes, "iostat.json"),
        net=samples(of_nodes, "net.jsonl"),
        gpu=samples(of_nodes, "gpu.jsonl"),
        mounts=samples(of_nodes, "mounts.jsonl"),
        machines=samples(of_nodes, "machine.jsonl"),
        missing=missing,
    )


def samples(of_nodes: Path, name: str) -> dict[str, Samples]:
    return {host: Samples(path) for host, path in by_name(of_nodes, name).items()}


def by_name(of_nodes: Path, name: str) -> dict[str, Path]:
    """Host -> its file of that name."""
    return {path.parent.name: path for path in found_in(of_nodes, name)}


def read_exits(of_nodes: Path) -> dict[tuple[str, int], Entry]:
    """(host, attempt) -> when the guard began and ended, and the `ranks` that it had."""
    found = {}
    for path in found_in(of_nodes, "exit.json"):
        for entry in dicts(read_object(path, []).get("attempts"))[:MOST_ATTEMPTS]:
            workers = entry.get("workers")
            names = list(workers)[:MOST_RANKS] if isinstance(workers, dict) else []
            numbers = [int(name) for name in names if re.fullmatch("[0-9]{1,9}", name)]
            had = sorted({one for one in numbers if one < MOST_RANKS})
            found[path.parent.name, attempt_of(entry)] = {**only(EXIT, entry), "ranks": had}
    return found


def read_ranks(of_nodes: Path, missing: list[str], timed: bool = True) -> list[RankRecord]:
    """One RankRecord for each rank and attempt that left lines, ordered by attempt and rank.
    `timed`: whether every run of this kind leaves some."""
    records: dict[tuple[int, int, str], RankRecord] = {}
    paths = found_in(of_nodes, "rank*.steps.jsonl")
    most = MOST_STEPS // max(1, len(paths))
    for path in paths:
        match = re.fullmatch(r"rank([0-9]{1,9})\.steps\.jsonl", path.name)
        if not match or int(match.group(1)) >= MOST_RANKS:
            continue
        host, rank = path.parent.name, int(match.group(1))
        left = most  # over the attempts of this file
        for line in read_lines(path):
            attempt = attempt_of(line)
            key = (attempt, rank, host)
            if key not in records:
                if len(records) == MOST_RECORDS:
                    break
                columns = StepColumns(most=left)
                records[key] = RankRecord(host, rank, attempt, steps=columns)
            before = len(records[key].steps)
            fold(records[key], line)
            left -= len(records[key].steps) - before
        shorter = [one for (_, k, h), one in records.items() if (k, h) == (rank, host)]
        if any(one.steps.beyond for one in shorter):
            missing.append(
                f"{host}, rank {rank}: the mean step and the charts are of its first {most:,} "
                "steps; the times of all of them are counted."
            )
    if timed and not records:
        missing.append("No rank wrote its timings (nodes/<host>/rank<k>.steps.jsonl).")
    return [records[key] for key in sorted(records)]


def fold(record: RankRecord, line: Entry) -> None:
    """Adds one line of rank<k>.steps.jsonl to the rank's record."""
    kind = line.get("kind")
    if kind == "start":
        record.start = only(START, line)
        return
    seconds = clean_seconds(line.get("seconds"))
    add(record.seconds, seconds)
    if kind == "step":
        fold_step(record, line, seconds)
    elif kind == "evaluate" and len(record.evaluations) < MOST_EVALUATIONS:
        clock = sum(record.seconds.values())  # of the loop, when it was evaluated
        record.evaluations.append({**only(EVALUATION, line), "clock": clock})
    elif kind == "end":
        record.end = only(END, line)


def fold_step(record: RankRecord, line: Entry, seconds: dict[str, float]) -> None:
    """Adds a step line to the columns."""
    columns = record.steps
    if len(columns) >= columns.most:
        columns.beyond += sum(seconds.values())
        return
    if not columns:
        record.first_step = seconds
    add(record.step_seconds, seconds)
    exact = line.get("exact") is True
    if exact and columns:
        add(record.warm_seconds, seconds)
    loss = number(line.get("loss"))
    columns.loss.append(math.nan if loss is None else loss)
    columns.exact.append(int(exact))
    columns.step.append(natural_number(line.get("step")) or 0)
    columns.samples.append(positive(line.get("samples")) or 0.0)
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
