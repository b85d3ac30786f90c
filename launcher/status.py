"""`make status`: how far a run is, what holds it up, and how its machines are."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from contract.options import DEFAULT_INVENTORY
from contract.text import clean
from launcher import control, folders, terminal
from report.files import last_of
from report.status import Follower, Progress, machine_document, section_of, warnings
from report.text import COLUMNS, section_lines


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
        for line in section_lines(section_of(progress, state == "running")):
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
    state = control.state(folder)
    told: dict[str, Any] = {"run": folder.name, "state": state}
    running = state == "running"
    with contextlib.suppress(KeyError, TypeError, IndexError):  # what a broken file does not have
        told["first_cause"] = control.read(folder / "attempts.json")["attempts"][-1]["first_cause"]
    if progress is not None:
        plain = dataclasses.replace(progress, judgement=None, machines=[])
        told.update(dataclasses.asdict(plain), as_of_seconds_ago=age(progress))
        del told["judgement"]
        told["bottleneck"] = progress.cause
        if not running:  # nothing is of now
            told.update(dict.fromkeys(("hang", "left", "recent_images_per_second")))
        told["machines"] = [
            {**machine_document(machine), "trouble": warnings(machine, running)}
            for machine in progress.machines
        ]
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
        said = [line for line in last_of(path, 4096).splitlines() if line.strip()]
        if said:
            label = f"  [{path.parent.name} {path.stem[4:]}] "
            control.say(label + clean(said[-1])[: COLUMNS - len(label)])
