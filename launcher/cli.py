"""Reads the launcher's command line and calls the function of the verb. Each verb imports its
modules itself: the error about a mistyped option need not wait for Fabric.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract import command_line, interrupts, verbs
from contract.errors import UserError
from contract.options import DEFAULT_INVENTORY
from contract.result_lines import result_line
from launcher import terminal

USAGE_ERROR = 2
PROGRAM = "python -m launcher"
Typed = dict[str, Any]  # command_line.verb_words
# The verbs of make that this program carries out. ROWS also has two verbs that only the Makefile
# types: inventory and gather.
VERBS = (
    *("find", "plan", "train", "dry-run", "slurm", "evaluate"),
    *("status", "top", "attach", "stop", "runs"),
)
ROWS = {
    **{name: verbs.VERBS[name] for name in VERBS},
    "inventory": verbs.Verb("refuse a list of machines that cannot be used", "", "INVENTORY LIMIT"),
    "gather": verbs.Verb(
        "gather what a script or a model needs into bundle/",
        "",
        f"INVENTORY {verbs.PACKAGES} {verbs.PRETRAINED}",
    ),
}


def plan(typed: Typed) -> int:
    """Carry out `make plan`. Returns the exit code. Raises UserError."""
    from launcher import measure
    from launcher.build_trainer import collect_trainer_options
    from launcher.options import make_config, new_config

    report_options = ("epochs", "batch", "precision", "sync", "run", "gpu", "link")
    words = [f"--{key}={typed[key]}" for key in report_options if key in typed]
    words += ["--all"] if typed.get("all") else []
    # With GPU= the report predicts from published speeds: no machine is asked.
    if "gpu" in typed:
        words += [f"--{key}={typed[key]}" for key in ("model", "nodes") if key in typed]
        options = collect_trainer_options(make_config({"data": "", "args": typed.get("args", [])}))
        words += [f"--optimizer={options['optimizer']}"] if "optimizer" in options else []
        return measure.show_report(measure.run_report_plan(words), terminal.Terminal())
    # These options are about the prediction: a measurement trains each machine alone, with no link.
    typed = {key: value for key, value in typed.items() if key not in ("sync", "run", "link")}
    config = new_config(typed)
    if "data" not in typed and not {"model", "config"}.isdisjoint(make_config(typed).trainer):
        config = dataclasses.replace(config, data="")  # no images: train on noise
    return measure.plan(config, words, bool(typed.get("measure")))


def parse(argv: Sequence[str]) -> tuple[str, Typed]:
    """Return the verb, and {name: value} of what was typed for it. Raises UserError."""
    verb = argv[0] if argv else ""
    if verb in ("-h", "--help"):
        lines = [f"  {name:<14} {row.help}" for name, row in ROWS.items()]
        print("\n".join([f"{PROGRAM} VERB NAME=value ...", *lines]))
        raise SystemExit(0)
    if verb not in ROWS:
        nearest = verbs.find_nearest(verb, VERBS)
        hint = f": did you mean {nearest}?" if nearest else f"; there are {', '.join(VERBS)}."
        raise UserError(
            f"there is no command {verb}{hint}" if verb else f"the command is missing{hint}"
        )
    typed = command_line.verb_words(verb, argv[1:], f"{PROGRAM} {verb}", ROWS[verb])
    if {"script", "model"} & typed.keys() or "SCRIPT" in ROWS[verb].variables:
        from launcher.programs import resolve_paths

        resolve_paths(typed)
    return verb, typed


def run_verb(verb: str, typed: Typed, argv: list[str]) -> int:
    """Carry out one of ROWS. Returns the exit code. Raises UserError."""
    if verb == "evaluate":  # before INVENTORY, whose default is that of the run
        from launcher import evaluate

        return evaluate.evaluate(typed.pop("run", verbs.LATEST), typed)
    file, run_name = typed.get("inventory", DEFAULT_INVENTORY), typed.get("run")
    # Commands that this process prints name the same inventory.
    if "INVENTORY" in ROWS[verb].variables:
        terminal.remember_inventory(file)
    if verb in ("train", "dry-run", "slurm"):
        from launcher import run
        from launcher.options import new_config

        config = new_config(typed)
        if verb == "slurm":
            from launcher import slurm

            return slurm.main(config)
        if verb == "dry-run":
            return run.dry_run(config)
        if config.detach:
            from launcher import control

            return control.detach(argv)
        return run.resume(config.resume, typed) if config.resume else run.train(config)
    if verb == "plan":
        return plan(typed)
    if verb == "gather":
        from launcher.folders import relative
        from launcher.gather import gather_files
        from launcher.options import make_config

        for path in gather_files(make_config(typed), terminal.Terminal()):
            terminal.show(f"gathered: {relative(path)}", sys.stdout)
        return 0

    from launcher import control, find, status, top
    from launcher.machines import inventory

    return {
        "inventory": lambda: inventory.check(Path(file), typed.get("limit")),
        "find": lambda: find.find(typed.get("net"), file, typed.get("write", False)),
        "top": lambda: top.top(run_name, file),
        "status": lambda: status.status(run_name or verbs.LATEST, typed.get("json", False)),
        "attach": lambda: control.attach(run_name or verbs.LATEST),
        "stop": lambda: control.stop(run_name or verbs.LATEST),
        "runs": control.list_runs,
    }[verb]()


def main(argv: list[str]) -> int:
    try:
        return interrupts.run_printing_main("tandem", lambda: run_verb(*parse(argv), argv))
    except UserError as error:
        for problem in error.problems:
            terminal.show(problem, sys.stderr)
        # A program that started this one, as `make sweep` does, reads the reason here.
        print(result_line(refused=error.problems[0]), end="", flush=True)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("tandem: interrupted; `make runs` lists the runs that were started", file=sys.stderr)
        return 130
