"""Runs that began before a machine's records were one file: their files as lines of that one.

Then a card's counters were in net.jsonl, shares in mounts.jsonl, GPUs in gpu.jsonl, processors and
memory in machine.jsonl, disks in iostat.json and exits in exit.json, with all attempts in one file.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

from report.files import (
    DECODER,
    MOST_ATTEMPTS,
    Entry,
    Growing,
    count,
    dicts,
    open_record,
    parse,
    positive,
    read_object,
    text,
    time_of,
)

NAMES = ("machine.jsonl", "net.jsonl", "gpu.jsonl", "mounts.jsonl", "iostat.json")


def parts(paths: list[Path]) -> list[Callable[[], Iterator[Entry]]]:
    """Functions that yield a machine's lines; [] where it has none of NAMES."""
    own = [path for path in paths if path.name in NAMES]
    return [partial(lines, own)] if own else []


def lines(paths: list[Path]) -> Iterator[Entry]:
    """The lines of all files, in the order of their time."""
    streams = [disks(path) if path.name == "iostat.json" else samples(path) for path in paths]
    return heapq.merge(*streams, key=place)


def place(line: Entry) -> tuple[int, float]:
    attempt = count(line.get("attempt"), MOST_ATTEMPTS) or 1
    return attempt, time_of(line.get("mono")) or 0.0


def samples(path: Path) -> Iterator[Entry]:
    """A file's lines as parts of a sample."""
    for line in Growing(path).lines():
        head = {"kind": "sample", "attempt": line.get("attempt"), "mono": line.get("mono")}
        if path.name == "net.jsonl":
            yield {**head, "card": line}
        elif path.name == "gpu.jsonl":
            yield {**head, "gpus": [line]}
        elif path.name == "mounts.jsonl":
            yield {**head, "mounts": {text(line.get("mount")) or "?": line}}
        else:
            yield {**head, **line}


def exits(paths: list[Path]) -> Iterator[tuple[int, Entry]]:
    """Each attempt with its entry of exit.json."""
    for path in paths:
        if path.name == "exit.json":
            for entry in dicts(read_object(path, []).get("attempts"))[:MOST_ATTEMPTS]:
                yield count(entry.get("attempt"), MOST_ATTEMPTS) or 1, entry


def disks(path: Path) -> Iterator[Entry]:
    """iostat's reports, each at the end of its interval."""
    try:
        with open_record(path) as file:
            for entry, index, report in reports_in(file):
                start, interval = time_of(entry.get("mono_start")), positive(entry.get("interval"))
                rates = {
                    text(disk.get("disk_device")) or "?": disk for disk in dicts(report.get("disk"))
                }
                yield {
                    "kind": "sample",
                    "attempt": entry.get("attempt"),
                    "mono": (start or 0.0) + (index + 1) * (interval or 1.0),
                    "data_disk": entry.get("data_disk"),
                    "disks": rates,
                }
    except (OSError, ValueError, RecursionError):
        return


REPORTS = re.compile(r'"statistics"\s*:\s*\[')
BETWEEN = re.compile(r"[\s,]*")
CHUNK = 1 << 18  # characters; no report, and no beginning of an attempt, is longer


def reports_in(file: TextIO) -> Iterator[tuple[Entry, int, Entry]]:
    """Each report of iostat.json with its number in its attempt and that attempt's entry without
    reports, one after the other: two weeks of them are a gigabyte. (sysstat: {hosts: [{statistics:
    [{disk: [...]}]}]}.) Raises ValueError, and RecursionError, where the file is damaged."""
    rest, opening = file.read(CHUNK), ""
    for _ in range(MOST_ATTEMPTS):
        if len(rest) < CHUNK:
            rest += file.read(CHUNK)
        match = REPORTS.search(rest)
        if match is None:
            return
        # What was opened before the reports is closed, so that it is JSON by itself.
        head = parse(f"{opening}{rest[: match.end()]}]}}]}}}}]}}")
        entries = dicts(head.get("attempts")) if isinstance(head, dict) else []
        if not entries:
            raise ValueError("it has reports of no attempt")
        rest = yield from reports_of(entries[-1], rest[match.end() :], file)
        opening = '{"attempts": [{"sysstat": {"hosts": [{"statistics": ['


def reports_of(
    entry: Entry, rest: str, file: TextIO
) -> Generator[tuple[Entry, int, Entry], None, str]:
    """The reports of one attempt; `rest` is what was read of them. Returns what follows them."""
    index = at = 0
    more = True
    while True:
        if more and len(rest) - at < CHUNK:
            chunk = file.read(CHUNK)
            rest, at, more = rest[at:] + chunk, 0, bool(chunk)
        at = BETWEEN.match(rest, at).end()  # type: ignore[union-attr]
        if rest[at : at + 1] == "]":
            return rest[at:]
        report, at = DECODER.raw_decode(rest, at)
        if isinstance(report, dict):
            yield entry, index, report
        index += 1
