"""The fields of each file of a run that the report reads, and how each is read: None where a value
is not what it should be, which then counts as absent. What is read through these tables has its
type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from contract.records import CATEGORIES
from report.files import (
    MOST_RANKS,
    Entry,
    count,
    dicts,
    natural_number,
    number,
    only,
    positive,
    text,
    texts,
    time_of,
)

# Of a rank, options and versions, and characters of one.
MOST_SETTINGS, MOST_NAME = 200, 1000
Fields = Mapping[str, Callable[..., Any]]


def instructions(value: object) -> Entry | None:
    return only({"onednn_limit": text}, value) if isinstance(value, dict) else None


def versions(value: object) -> dict[str, str] | None:
    """Name -> version."""
    if not isinstance(value, dict):
        return None
    first = list(value.items())[:MOST_SETTINGS]
    return {name[:MOST_NAME]: v[:MOST_NAME] for name, v in first if isinstance(v, str)}


def settings(value: object) -> Entry | None:
    """The options of the trainer: plain values, short texts and lists of plain values."""
    if not isinstance(value, dict):
        return None
    first = list(value.items())[:MOST_SETTINGS]
    return {name[:MOST_NAME]: v for name, v in first if plain(v) or plain_list(v)}


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
    """The launcher's options: plain values, and the trainer's words."""
    if not isinstance(value, dict):
        return None
    plain = {
        name: option
        for name, option in list(value.items())[:MOST_RANKS]
        if isinstance(option, (str, bool)) or number(option) is not None
    }
    return {**plain, **only({"trainer": texts}, value)}


def prediction(value: object) -> Entry | None:
    if not isinstance(value, dict) or number(value.get("images_per_second")) is None:
        return None
    return only({"images_per_second": number, "made_unix": number}, value)


def nodes(value: object) -> list[Entry]:
    fields = {"host": text, "connection": text, "ranks": ranks, "interface": text}
    return [only(fields, node) for node in dicts(value)[:MOST_RANKS]]


def ranks(value: object) -> list[int]:
    numbers = value if isinstance(value, list) else []
    return [rank for rank in numbers if type(rank) is int and 0 <= rank < MOST_RANKS]


def cause(value: object) -> Entry | None:
    return only(CAUSE, value) if isinstance(value, dict) else None


def script(value: object) -> Entry | None:
    """The script that ran in place of the trainer."""
    fields = {"words": texts, "arguments": texts, "folder": text}
    return only(fields, value) if isinstance(value, dict) else None


def category(value: object) -> str | None:
    return value if isinstance(value, str) and value in CATEGORIES else None


def peaks(value: object) -> list[float] | None:
    """The bytes that each rank had at most."""
    values = list(value.values())[:MOST_RANKS] if isinstance(value, dict) else []
    return [figure for peak in values if (figure := number(peak)) is not None]


PLAN: Fields = {
    **dict.fromkeys(("run", "model", "data", "sync", "precision", "precision_why"), text),
    **dict.fromkeys(("tandem", "git_revision", "git_diff", "code_sha256"), text),
    **{"epochs": count, "world_size": count, "created_unix": number},
    **{"nodes": nodes, "options": options, "predicted": prediction, "script": script},
}
CAUSE: Fields = {
    **dict.fromkeys(("host", "signal", "exception", "message", "remedy"), text),
    **{"rank": natural_number, "exit_code": number, "last_lines": texts},
}
ATTEMPT: Fields = {
    **dict.fromkeys(("reason", "status", "to_resume"), text),
    **{"nodes": texts, "world_size": count, "wall_seconds": time_of},
    **{"resumed_samples": number, "first_cause": cause, "silent_ranks": texts},
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
    **{"world_size": count, "instructions": instructions},
}
END: Fields = {"mono": time_of, "status": text, "peak_memory_bytes": number, "bad_images": number}
STALL: Fields = {"category": category, "step": natural_number, "idle": time_of}
EVALUATION: Fields = dict.fromkeys(("epoch", "top1", "top5", "loss", "train_loss"), number)
EXIT: Fields = {
    **dict.fromkeys(("mono_start", "mono_end"), time_of),
    **{"peak_memory_bytes": peaks, "only_received": positive},
}
