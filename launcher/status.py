"""`make status`: shows the progress of a run, its bottleneck and its machines."""

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
    """Show a run: its state, progress, attempts and machines, and each rank's last line. Returns
    the exit code. Raises UserError."""
    folder = folders.find(name)
    progress = Follower(folder).look()
    if as_json:
        print(json.dumps(document(folder, progress), indent=1))
        return 0
    # The lock and the files of the run are enough: its launcher need not live.
    pid, state = control.launcher_pid(folder), control.read_state(folder)
    control.print_clean(
        f"run {folder.name}: {state}" + (f", controlled by process {pid}" if pid else "")
    )
    if state == "abandoned":
        advice = f"its controller died; `make train RESUME={folder.name}` continues it"
        terminal.show(advice, sys.stdout)
    with contextlib.suppress(KeyError, TypeError):  # what a broken file does not contain
        for attempt in control.read_document(folder / "attempts.json")["attempts"]:
            nodes = ", ".join(attempt["nodes"])
            text = f"{attempt['attempt']}, {attempt['status']}: {nodes}: {attempt['reason']}"
            control.print_clean(f"  attempt {text}")
            if attempt["first_cause"]:
                control.print_clean(f"    {attempt['first_cause']['message']}")
    if progress is not None:
        for line in section_lines(section_of(progress, state == "running")):
            control.print_clean(line)
    logs = folder.glob("nodes/*/rank*.log")
    for path in sorted(logs, key=lambda log: (len(log.stem), log.stem)):  # rank 9, then 10
        lines = [line for line in last_of(path, 4096).splitlines() if line.strip()]
        if lines:
            label = f"  [{path.parent.name} {path.stem.removeprefix('rank')}] "
            control.print_clean(label + clean(lines[-1])[: COLUMNS - len(label)])
    # A run that is over has no live figures of the machines, so name the commands that show them.
    if pid is None:
        options = control.read_document(folder / "plan.json").get("options")
        options = options if isinstance(options, dict) else {}
        terminal.remember_inventory(str(options.get("inventory", DEFAULT_INVENTORY)))
        advice = "between runs, `make top` and `make check` show the state of the machines"
        terminal.show(advice, sys.stdout)
    return 0


def document(folder: Path, progress: Progress | None) -> dict[str, Any]:
    """Return what JSON=1 prints."""
    state = control.read_state(folder)
    # Programs read this: a value that is unknown is absent, not invented.
    values: dict[str, Any] = {"run": folder.name, "state": state}
    is_running = state == "running"
    with contextlib.suppress(KeyError, TypeError, IndexError):  # what a broken file does not have
        attempts = control.read_document(folder / "attempts.json")["attempts"]
        values["first_cause"] = attempts[-1]["first_cause"]
    if progress is not None:
        plain = dataclasses.replace(progress, judgement=None, machines=[])
        age = max(0.0, round(time.time() - progress.unix, 1))
        values.update(dataclasses.asdict(plain), as_of_seconds_ago=age)
        del values["judgement"]
        values["bottleneck"] = progress.cause
        second = progress.judgement and progress.judgement.runner_up
        values["runner_up"] = second and second._asdict()
        if not is_running:  # these figures are valid only while the run trains
            values.update(dict.fromkeys(("hang", "left", "recent_images_per_second")))
        values["machines"] = [
            {**machine_document(machine), "trouble": warnings(machine, is_running)}
            for machine in progress.machines
        ]
    return values
