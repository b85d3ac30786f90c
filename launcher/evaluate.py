"""`make evaluate`: how good a run's best model is, on machines as a run has them."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

from boundary.run_files import Start
from contract.errors import UserError
from contract.options import RESULTS_FOLDER, Config
from launcher import build_trainer, collect, folders
from launcher.errand import Errand
from launcher.folders import relative
from launcher.lifecycle import REPORT
from launcher.machines.inventory import CHECKOUT
from launcher.options import config_of
from launcher.participants import Waiter
from launcher.plan.checks import check_machines, make_plan, new_id
from launcher.plan.sending import deliveries
from launcher.run import began_as, in_turn
from launcher.terminal import Terminal, keep_machines
from launcher.watch.attempts import lines_of, not_copied

FOLDER = "evaluated"  # of the run
FILE = "evaluation.json"


def evaluate(name: str, given: dict[str, Any]) -> int:
    """Returns the exit code. Raises UserError."""
    run = folders.find(name)
    config = config_for(run, given)
    keep_machines(config.inventory)
    terminal = Terminal()
    table = in_turn(config, terminal, lambda waiter: carry_out(run, config, terminal, waiter))
    done = subprocess.run(
        [*REPORT, "evaluation", str(relative(table)), f"{run.name}, {model_file(run).name}"],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        terminal.line(line)
    terminal.drain()
    return done.returncode


def config_for(run: Path, given: dict[str, Any]) -> Config:
    """What the machines are to do: the model of the run as it was trained, whatever the recipe for
    other images says. Raises UserError."""
    began = began_as(run, given, "RUN")
    if began.script:
        raise UserError(f"run {run.name} is of a script, which alone knows what its model is for.")
    nodes = None if "inventory" in given else began.nodes
    asked = build_trainer.evaluation_of(began, model_file(run), image_size(run), FILE)
    return config_of(given, dataclasses.replace(asked, nodes=nodes))


def model_file(run: Path) -> Path:
    """The run's best model, as it lies here, else the newest one. Raises UserError."""
    for pattern in ("best.pt", "step-*.pt"):
        files = run.glob(f"checkpoints/*/{pattern}")
        if newest := max(files, key=lambda file: (file.name, file.stat().st_mtime), default=None):
            return newest.resolve()
    raise UserError(
        f"run {run.name} has no checkpoint here: `make train RESUME={run.name}` goes on with it, "
        "and brings one at its end."
    )


def image_size(run: Path) -> int:
    """That with which it trained, by its ranks' first lines; 0 where they are not here."""
    paths = run.glob("nodes/*/rank*.steps.jsonl")
    return next((line.image_size for path in paths for line in lines_of(path, Start)), 0)


def carry_out(run: Path, config: Config, terminal: Terminal, waiter: Waiter) -> Path:
    """The figures, in a file here. Raises UserError."""
    ready = check_machines(config, terminal, waiter)
    folder = folders.begin(run / FOLDER, new_id(ready))
    try:
        plan = make_plan(ready, ready.machines, run=folder.name, bar=terminal.columns)
        sent = deliveries(ready.program)
        errand = Errand(folder, plan, sent, ready.machines, terminal, "evaluated", True)
        errand.perform(f"evaluating {relative(model_file(run))}")
        there = {node.host: node.output for node in plan.nodes}
        names, first = [*ready.program.results], plan.nodes[0].host
        said, whole = collect.bring_results(errand.machines.nodes, there, first, names, folder)
    except collect.Unwritable as error:
        raise UserError(not_copied(folder, error)) from None
    finally:
        ready.machines.close()
    if not whole:
        raise UserError(*said)
    return folder / RESULTS_FOLDER / FILE
