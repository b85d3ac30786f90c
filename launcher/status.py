"""`make status`: how far a run is, what holds it up, and how its machines are."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.options import DEFAULT_INVENTORY
from contract.text import clean, percent, seconds, size, three_digits
from contract.waits import WORDS
from launcher import control, folders, terminal
from launcher.progress import RECENT, STALE, Figures, Follower, Progress

COLUMNS = 80
HOT_GPU, HOT_CPU = 85, 90  # Celsius, from which on they slow themselves down
LOW_DISK = 5e9  # bytes
SWAPS = 256e6  # bytes in use that are worth a word
TAKEN = 90.0  # percent of the memory


def status(name: str, as_json: bool = False) -> int:
    """One run: its state, how far it is, its attempts, its machines, the last line of each rank."""
    folder = folders.find(name)
    progress = Follower(folder).look()
    if as_json:
        print(json.dumps(document(folder, progress), indent=1))
        return 0
    pid = control.controller(folder)
    state = control.state(folder)
    control.say(f"run {folder.name}: {state}" + (f", carried out by process {pid}" if pid else ""))
    if state == "abandoned":
        terminal.show(f"its controller died; `make train RESUME={folder.name}` goes on", sys.stdout)
    attempts(folder)
    if progress is not None:
        for line in lines(progress, pid is not None):
            control.say(line)
    last_lines(folder)
    if pid is None:
        options = control.read(folder / "plan.json").get("options")
        asked = options if isinstance(options, dict) else {}
        terminal.keep_machines(str(asked.get("inventory", DEFAULT_INVENTORY)))
        how = "between runs `make top` and `make check` show how the machines are"
        terminal.show(how, sys.stdout)
    return 0


def document(folder: Path, progress: Progress | None) -> dict[str, Any]:
    """What JSON=1 prints."""
    told: dict[str, Any] = {"run": folder.name, "state": control.state(folder)}
    if progress is not None:
        told.update(dataclasses.asdict(progress), as_of_seconds_ago=age(progress))
        told["bottleneck"] = progress.cause
        for machine, one in zip(told["machines"], progress.machines):
            machine["trouble"] = troubles(one, control.controller(folder) is not None)
    return told


def age(progress: Progress) -> float:
    return max(0.0, round(time.time() - progress.unix, 1))


def attempts(folder: Path) -> None:
    with contextlib.suppress(KeyError, TypeError):  # what a broken file does not contain
        for attempt in control.read(folder / "attempts.json")["attempts"]:
            nodes = ", ".join(attempt["nodes"])
            said = f"{attempt['attempt']}, {attempt['status']}: {nodes}: {attempt['reason']}"
            control.say(f"  attempt {said}")
            if attempt["first_cause"]:
                control.say(f"    {attempt['first_cause']['message']}")


def last_lines(folder: Path) -> None:
    """What each rank printed last."""
    logs = folder.glob("nodes/*/rank*.log")
    for path in sorted(logs, key=lambda log: (len(log.stem), log.stem)):  # rank 9, then 10
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            text = file.read().decode(errors="replace")
        said = [line for line in text.splitlines() if line.strip()]
        if said:
            label = f"  [{path.parent.name} {path.stem[4:]}] "
            control.say(label + clean(said[-1])[: COLUMNS - len(label)])


def lines(progress: Progress, running: bool, width: int = COLUMNS) -> list[str]:
    """How far it is, and its machines."""
    return [*run_lines(progress, width), "", *table(progress.machines, running, width)]


def run_lines(progress: Progress, width: int = COLUMNS) -> list[str]:
    """Where the run stands, how fast it is, what it has learned and what holds it up."""
    place = []
    if progress.epoch is not None:
        place.append(
            f"epoch {progress.epoch}" + (f" of {progress.epochs}" if progress.epochs else "")
        )
    if progress.step is not None:
        place.append(
            f"step {progress.step:,}" + (f" of {progress.steps:,}" if progress.steps else "")
        )
        if progress.steps:
            place[-1] += f" ({100 * progress.step / progress.steps:.1f} %)"
    if progress.left is not None:
        place.append(f"{seconds(progress.left)} to go")
    figures = []
    if progress.images_per_second:
        recent = progress.recent_images_per_second
        now = f" (last {RECENT:.0f} s: {three_digits(recent)})" if recent else ""
        figures.append(f"{three_digits(progress.images_per_second)} images/s{now}")
    figures += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
    figures += [f"top-1 {100 * progress.top1:.2f} %"] if progress.top1 is not None else []
    found = [", ".join(part) for part in (place, figures) if part]
    scores = progress.evaluated
    if scores and scores["top1"] is not None and scores["epoch"] is not None:
        found.append(
            f"evaluated after epoch {scores['epoch'] + 1:.0f}: top-1 {100 * scores['top1']:.2f} %"
        )
    found.append(verdict(progress))
    return [f"  {line}"[:width] for line in found]


def verdict(progress: Progress) -> str:
    """What holds the run up, in words."""
    step = progress.judged
    if step is None:
        return "too early to say what holds it up"
    when = "now" if step is progress.recent else "so far"
    kind, whole = progress.ruling, seconds(step.seconds + step.checkpoint)
    if kind in WORDS:
        wait = f"{when}: {WORDS[kind]}: {seconds(getattr(step, kind))} of {whole} a step"
        slow = f", rank {step.slower}" if kind == "straggler" and step.slower is not None else ""
        slow += ", by its images" if progress.cause != kind else ""
        return f"{wait} ({percent(step.fractions[kind])}){slow}"
    if kind == "compute":
        return f"{when}: computing: {seconds(step.compute)} of {whole} a step, as it should be"
    return f"{when}: no single bottleneck in a step of {whole}"


@dataclass(frozen=True)
class Column:
    head: str
    width: int
    cell: Callable[[Figures], str]


# As many as there is room for. Of disk and network in MB/s.
TABLE = (
    Column("step", 8, lambda one: whole(one.step)),
    Column("GPU%", 5, lambda one: whole(most(one.gpus, 1))),
    Column("GPU C", 6, lambda one: whole(most(one.gpus, 3))),
    Column("CPU%", 5, lambda one: whole(one.cpu)),
    Column("mem%", 5, lambda one: whole(one.memory)),
    Column("swap", 7, lambda one: bytes_of(one.swap)),
    Column("disk%", 6, lambda one: whole(one.disk_busy)),
    Column("MB/s read", 10, lambda one: megabytes(one.disk_read)),
    Column("sent", 7, lambda one: megabytes(one.sent)),
    Column("got", 7, lambda one: megabytes(one.received)),
    Column("CPU C", 7, lambda one: whole(one.temperature)),
    Column("free", 8, lambda one: bytes_of(one.disk_free)),
    Column("again/s", 9, lambda one: whole(one.again)),
    Column("drops/s", 9, lambda one: whole(one.dropped)),
    Column("GPU mem", 9, lambda one: bytes_of(most(one.gpus, 2))),
    Column("GPU W", 7, lambda one: whole(most(one.gpus, 4))),
    Column("GPU MHz", 9, lambda one: whole(most(one.gpus, 5))),
)
NARROWEST, WIDEST = 7, 14  # columns for a machine's name


def table(machines: list[Figures], running: bool, width: int = COLUMNS) -> list[str]:
    """A line a machine, and one for each thing that is wrong with one."""
    names = min(WIDEST, max([NARROWEST, *(len(one.host) for one in machines)]))
    columns, room = [], width - names - 2
    for column in TABLE:
        if all(column.cell(one) == "-" for one in machines):  # nobody knows it: no GPU, no sensor
            continue
        room -= column.width
        if room < 0:
            break
        columns.append(column)
    heads = "".join(column.head.rjust(column.width) for column in columns)
    found = [f"  {'machine'.ljust(names)}{heads}"]
    for one in machines:
        # What is old is not shown as if it were of now.
        old = running and one.age > STALE
        cells = ((c, "-" if old and c.head != "step" else c.cell(one)) for c in columns)
        rest = "".join(cell.rjust(column.width) for column, cell in cells)
        found.append(f"  {one.host[:names].ljust(names)}{rest}")
    for one in machines:
        found += [f"  {one.host[:20]}: {text}" for text in troubles(one, running)]
    return [line[:width] for line in found]


def most(gpus: list[list[Any]], place: int) -> float | None:
    """The largest figure of a machine's GPUs."""
    return max((one[place] for one in gpus if one[place] is not None), default=None)


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def bytes_of(value: float | None) -> str:
    return "-" if value is None else "0" if not value else size(value).replace(" ", "")


def megabytes(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e6:.1f}"


def troubles(one: Figures, running: bool = True) -> list[str]:
    """What is wrong with a machine, in short sentences."""
    found = []
    if running and one.age > STALE:
        found.append(f"silent for {seconds(one.age)}")
    hot = most(one.gpus, 3)
    if hot is not None and hot >= HOT_GPU:
        found.append(f"a GPU has {hot:.0f} C and may slow down: clean fans, give it air")
    if one.temperature is not None and one.temperature >= HOT_CPU:
        found.append(f"its processor has {one.temperature:.0f} C and may slow down")
    if one.swap is not None and one.swap >= SWAPS and (one.memory or 0.0) >= TAKEN:
        found.append(
            f"short of memory: {size(one.swap)} swapped; fewer loaders (--workers) need less"
        )
    if one.disk_free is not None and one.disk_free < LOW_DISK:
        found.append(f"{size(one.disk_free)} free on its disk: remove old runs there")
    if one.dropped >= 1:
        found.append(f"its network card drops {one.dropped:.0f} packets a second")
    return found
