"""Find in which settings and machines runs differ. compare.py and run_view.py call this module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import NamedTuple

from boundary.run_files import RunPlan
from contract.text import link_speed, three_digits
from report.analysis import Analysis, last_hosts, world_size

# Options for paths and notices, which do not affect the figures of a run.
NO_SETTINGS = {"config", "output", "local_rank", "spawn", "resume", "progress", "data"}
# Runs that differ in these cannot be compared, neither by speed nor by accuracy.
TASK = ("model", "data", "training images", "validation images")
UNKNOWN = "not recorded"


class Difference(NamedTuple):
    """A setting that differs: each value, with the labels of the runs that have it."""

    name: str
    values: list[tuple[str, list[str]]]

    def words(self) -> str:
        return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in self.values)


def differences(runs: Mapping[str, Mapping[str, str]]) -> list[Difference]:
    """Return the settings in which runs differ. `runs`: label -> name -> value."""
    names = dict.fromkeys(name for values in runs.values() for name in values)
    result = []
    for name in names:
        labels: dict[str, list[str]] = {}
        for label, values in runs.items():
            labels.setdefault(values.get(name, UNKNOWN), []).append(label)
        if len(labels) > 1:
            result.append(Difference(name, list(labels.items())))
    return result


def settings(analysis: Analysis) -> dict[str, str]:
    """Return name -> value: the task first, then the common settings, then the other options."""
    run, start = analysis.run, analysis.start
    options = start.options
    common: dict[str, object] = {
        "model": start.model or run.program.command,
        "data": run.plan.data or PurePath(str(options.get("data") or UNKNOWN)).name,
        "training images": start.train_images,
        "validation images": start.eval_images,
        "machines": len(last_hosts(run)),
        "ranks": world_size(run),
        "epochs": start.epochs,
        "batch of all ranks": start.global_batch,
        "image_size": start.image_size,
        **{name: getattr(start, name) for name in ("precision", "sync", "accumulate", "workers")},
        "bucket_mb": start.bucket_mb,
    }
    values = {name: words(value) for name, value in common.items() if value is not None}
    extra = {n: words(v) for n, v in options.items() if n not in NO_SETTINGS and n not in values}
    code = {"code": code_of(run.plan)} if run.plan.code_sha256 else {}
    return {**values, **extra, **code}


def machines(analysis: Analysis) -> dict[str, str]:
    """Return name -> value over all ranks of the measured attempt."""
    run = analysis.run
    attempt = analysis.step.attempt if analysis.step else 1
    starts = {record.host: record.start for record in run.ranks_in(attempt) if record.start}
    links = {
        use.host: link_speed(use.speed_mbit) for use in analysis.uses.networks if use.speed_mbit
    }
    values = {
        "machines": ", ".join(last_hosts(run)),
        "connection": "none, one PC" if run.on_one_machine else "a network",
        "device": tally(start.device for start in starts.values()),
        "processor": tally(start.cpu for start in starts.values()),
        "cores": tally(start.cores for start in starts.values()),
        "network card": tally(links.values()),
        "python": tally(start.python for start in starts.values()),
        "torch": tally(start.torch for start in starts.values()),
    }
    # Each program records the versions of its own packages.
    for name in dict.fromkeys(name for start in starts.values() for name in start.versions):
        values[name] = tally(start.versions.get(name) for start in starts.values())
    limits = (start.instructions.onednn_limit for start in starts.values())
    values["oneDNN limited to"] = tally(limits)
    return {name: value for name, value in values.items() if value}


def tally(values: Iterable[object]) -> str:
    """Count equal values: `3 x RTX 3090 and 1 x RTX 2080 Ti`; a single value without its count."""
    counts = Counter(words(value) for value in values if value is not None)
    if len(counts) < 2:
        return next(iter(counts), "")
    return " and ".join(f"{count} x {value}" for value, count in counts.most_common())


def code_of(plan: RunPlan) -> str:
    """Return the commit if nothing was changed since, else the hash of the code."""
    revision = (plan.git_revision or "")[:10]
    if revision and not plan.git_diff:
        return revision
    code_hash = str(plan.code_sha256)[:10]
    return f"{revision} changed, {code_hash}" if revision else code_hash


def words(value: object) -> str:
    """Write a value of an option: True as `on`, [1, 2] as `1 2`, None as `default`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(words, value))
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e6 else three_digits(value)
    return "default" if value is None else str(value) or "none"
