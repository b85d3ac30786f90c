"""`make evaluate`: evaluates a run's best model on machines, in a single attempt (errand.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from boundary.run_files import Start
from contract.decisions import OFF
from contract.errors import UserError
from contract.options import RESULTS, RESULTS_FOLDER, TRAINER_OPTIONS, Config
from contract.strategies import EXACT
from launcher import build_trainer, collect, folders
from launcher.errand import perform_errand
from launcher.folders import relative
from launcher.lifecycle import run_report
from launcher.options import make_config
from launcher.participants import Waiter
from launcher.plan.checks import check_machines, make_plan, new_id
from launcher.run import in_turn, read_begun_options
from launcher.terminal import Terminal, remember_inventory
from launcher.watch.attempts import explain_uncopied_files, read_run_lines

FOLDER, FILE = "evaluated", "evaluation.json"  # in the folder of the run
# Options of a training run that an evaluation does not have, or sets itself.
OMITTED = ("data", "output", "config", "resume", "trial", "sync", "freeze", "head_lr")


def evaluate(name: str, typed: dict[str, Any]) -> int:
    """Evaluate a run's best model and show the figures. `typed`: options by name, as the user typed
    them. Returns the exit code. Raises UserError."""
    run = folders.find(name)
    began = read_begun_options(run, typed, "RUN")
    if began.script:
        raise UserError(f"run {run.name} is of a script: only the script can evaluate its model.")
    # The ranks' first lines have the image size of the training; 0 if their records are missing.
    image_size = next((line.image_size for line in read_run_lines(run, Start)), 0)
    # The model is evaluated as it was trained. All options are written out, with an empty recipe,
    # because the recipe for the new images may have other options.
    settings = build_trainer.read_settings(began)
    values = {
        name: getattr(settings, name)
        for name in TRAINER_OPTIONS
        if name not in (*OMITTED, *RESULTS)
    }
    options = {name: v for name, v in values.items() if v != TRAINER_OPTIONS[name].default}
    options.update(config="{}", sync=EXACT, weights=str(model_file(run)), evaluate=FILE)
    options.update({"image_size": image_size} if image_size else {})
    # Other machines may be more or fewer than those of the training.
    nodes = None if "inventory" in typed else began.nodes
    evaluation = dataclasses.replace(
        began, trainer=options, balance=OFF, min_nodes=None, nodes=nodes
    )
    config = make_config(typed, evaluation)
    remember_inventory(config.inventory)
    terminal = Terminal()
    figures = in_turn(config, terminal, lambda waiter: evaluate_once(run, config, terminal, waiter))
    name = f"{run.name}, {model_file(run).name}"
    code, lines = run_report("evaluation", str(relative(figures)), name)
    terminal.lines(lines)
    terminal.drain()
    return code


def model_file(run: Path) -> Path:
    """Return the file of the run's best model if it is here, else of its newest one. Raises
    UserError."""
    # A run that ended before its first evaluation has no best.pt. Names such as step-00001200.pt
    # sort by their steps.
    for pattern in ("best.pt", "step-*.pt"):
        files = run.glob(f"checkpoints/*/{pattern}")
        if newest := max(files, key=lambda file: (file.name, file.stat().st_mtime), default=None):
            return newest.resolve()
    raise UserError(
        f"run {run.name} has no checkpoint here: `make train RESUME={run.name}` continues it, "
        "and brings one at its end."
    )


def evaluate_once(run: Path, config: Config, terminal: Terminal, waiter: Waiter) -> Path:
    """Evaluate the run's model and return the file of the figures. Raises UserError."""
    ready = check_machines(config, terminal, waiter)
    # The figures are about the run's model, so its folder has them.
    folder = folders.make_folder(run / FOLDER, new_id(ready))
    try:
        plan = make_plan(ready, ready.machines, run=folder.name, columns=terminal.columns)
        text = f"evaluating {relative(model_file(run))}"
        perform_errand(folder, plan, ready.machines, terminal, text, "evaluated", shows_lines=True)
        outputs = {node.host: node.output for node in plan.nodes}
        names, host = [*ready.program.results], plan.nodes[0].host
        lines, is_complete = collect.fetch_results(
            ready.machines.nodes, outputs, host, names, folder
        )
    except collect.Unwritable as error:
        raise UserError(explain_uncopied_files(folder, error)) from None
    finally:
        ready.machines.close()
    if not is_complete:
        raise UserError(*lines)
    return folder / RESULTS_FOLDER / FILE
