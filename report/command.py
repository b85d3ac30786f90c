"""The command line of a run, and of the same run with something changed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from contract import defaults
from report.records import Run
from tools import verbs

# The variables that are said below, or were of this run alone; all others are kept.
OWN = ("NODES", "ARGS", "RESUME", "DETACH", "PORT")


def train_line(
    run: Run, words: Mapping[str, object] | None = None, args: Sequence[str] | None = None
) -> str | None:
    """`make train ...` as it was typed, with other `words` in the place of its own; `args`: the
    trainer's words, if not the run's own. None for a run that make did not start."""
    options = run.plan.get("options")
    if not isinstance(options, dict):
        return None
    typed: dict[str, object] = {"NODES": len(run.plan.get("nodes") or []) or len(run.hosts)}
    for name in verbs.variables_of("train"):
        value = options.get(name.lower())
        if name not in OWN and value and value != defaults.INVENTORY:
            typed[name] = 1 if value is True else value
    typed.update(words or {})
    typed["ARGS"] = shlex.join(own_args(run) if args is None else args)
    return verbs.line("train", **typed)


def own_args(run: Run) -> list[str]:
    """What was passed on to the trainer."""
    options = run.plan.get("options")
    return list(map(str, options.get("trainer") or ())) if isinstance(options, dict) else []
