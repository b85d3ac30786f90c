"""The command line of the launcher."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract import command_line, interrupts, verbs
from contract.errors import UserError
from contract.options import DEFAULT_INVENTORY
from launcher import terminal

USAGE_ERROR = 2
PROGRAM = "python -m launcher"
# The verbs of make that this program carries out, and two that only the Makefile types.
VERBS = ("find", "plan", "train", "dry-run", "slurm", "status", "top", "attach", "stop", "runs")
ROWS: dict[str, verbs.Verb] = {
    **{name: verbs.VERBS[name] for name in VERBS},
    "inventory": verbs.Verb(
        "refuse a list of machines that cannot be used", (verbs.INVENTORY, verbs.LIMIT)
    ),
    "gather": verbs.Verb(
        "gather the packages of a script into bundle/", (verbs.INVENTORY, *verbs.PACKAGES)
    ),
}


def _predict(given: dict[str, Any]) -> int:
    from launcher import measure
    from launcher.options import config_of, for_trainer, new_config

    reports = ("epochs", "batch", "precision", "sync", "run", "gpu", "link")
    words = [f"--{key}={given[key]}" for key in reports if key in given]
    words += ["--all"] if given.get("all") else []
    if "gpu" in given:
        words += [f"--{key}={given[key]}" for key in ("model", "nodes") if key in given]
        typed = for_trainer(config_of({"data": "", "args": given.get("args", [])}))
        words += [f"--optimizer={typed['optimizer']}"] if "optimizer" in typed else []
        return measure.on_paper(words)
    own = {key: value for key, value in given.items() if key not in ("sync", "run", "link")}
    config = new_config(own)
    if "data" not in given and not {"model", "config"}.isdisjoint(config_of(own).trainer):
        config = dataclasses.replace(config, data="")  # noise: no images were named
    return measure.plan(config, words, bool(given.get("measure")))


def parse(argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The verb, and {key: value} of what was typed for it. Raises UserError."""
    verb = argv[0] if argv else ""
    if verb in ("-h", "--help"):
        lines = [f"  {name:<14} {row.help}" for name, row in ROWS.items()]
        command_line.show("\n".join([f"{PROGRAM} VERB NAME=value ...", *lines]))
    if verb not in ROWS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(
            f"{f'there is no verb {verb}' if verb else 'a verb is missing'}: it is one of "
            f"{', '.join(VERBS)}.{hint} See `{PROGRAM} --help`."
        )
    given = command_line.verb_words(verb, argv[1:], f"{PROGRAM} {verb}", ROWS[verb])
    if verb in ("train", "dry-run", "gather"):
        from launcher.plan import script

        script.check_together(given)
        if "script" in given:
            given["script"], given["folder"] = script.by_path(given["script"], given.get("folder"))
    if "model" in given:
        from launcher.plan import models

        given["model"] = models.by_path(given["model"])
    return verb, given


def _carry_out(verb: str, given: dict[str, Any], argv: list[str]) -> int:
    # Fabric takes a quarter of a second to import; a mistyped option need not wait for it.
    from launcher.machines import inventory

    file = given.get("inventory", DEFAULT_INVENTORY)
    run = given.get("run", verbs.RUN.default)
    if "INVENTORY" in ROWS[verb].variables:
        terminal.keep_machines(file)
    if verb == "inventory":
        return inventory.refuse(Path(file), given.get("limit"))
    if verb == "gather":
        return _gather(given)
    if verb == "find":
        from launcher import find

        return find.find(given.get("net"), file, given.get("write", False))
    if verb == "status":
        from launcher import status

        return status.status(run, given.get("json", False))
    if verb == "top":
        from launcher import top

        return top.top(given.get("run"), file)
    if verb in ("runs", "stop", "attach"):
        from launcher import control

        act = getattr(control, verb)
        return act() if verb == "runs" else act(run)
    if verb == "plan":
        return _predict(given)
    return _train(verb, given, argv)


def _gather(given: dict[str, Any]) -> int:
    from launcher.folders import relative
    from launcher.options import config_of
    from launcher.plan import checks

    folder = checks.gather(config_of(given), terminal.Terminal())
    terminal.show(f"the packages of the script are in {relative(folder)}", sys.stdout)
    return 0


def _train(verb: str, given: dict[str, Any], argv: list[str]) -> int:
    from launcher import run
    from launcher.options import new_config

    if "script" not in given and not {"-h", "--help"}.isdisjoint(given.get("args", [])):
        command_line.show(command_line.trainer_help())
    config = new_config(given)
    if verb == "slurm":
        from launcher import slurm

        return slurm.main(config)
    if verb == "dry-run":
        return run.dry_run(config)
    if config.detach:
        from launcher import control

        return control.detach(argv)
    if config.resume:
        return run.resume(config.resume, given)
    return run.train(config)


def main(argv: list[str]) -> int:
    try:
        return interrupts.printed("tandem", lambda: _carry_out(*parse(argv), argv))
    except UserError as error:
        for problem in error.problems:
            terminal.show(problem, sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("tandem: interrupted; `make runs` shows what was begun", file=sys.stderr)
        return 130
