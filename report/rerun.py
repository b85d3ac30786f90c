"""The command line of a run, of the same run with something changed, and of one that is long enough
to judge."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract import verbs
from contract.options import DEFAULT_INVENTORY
from report.files import natural_number
from report.measure import SETTLED_STEPS, Step
from report.read import Run

# Variables that are set below, or were of this run alone; all others are repeated.
OWN = ("NODES", "ARGS", "RESUME", "DETACH", "PORT", "AT", "UNTIL")


def train_line(
    run: Run, words: Mapping[str, object] | None = None, args: Sequence[str] | None = None
) -> str | None:
    """`make train ...` as it was typed, with other `words` in the place of its own; `args`: the
    trainer's words, if not the run's own. None for a run that make did not start, and where `words`
    would not change the program."""
    options, changes = run.plan.options, set(words or ()) - {"NODES"}
    if options is None or (changes and not run.program.adjustable):
        return None
    # NODES as it was typed: a machine may have been away, and those that trained be others.
    nodes = natural_number(options.get("nodes")) or len(run.plan.nodes or run.hosts)
    typed: dict[str, object] = {"NODES": nodes}
    for name in verbs.VERBS["train"].variables:
        value = options.get(name.lower())
        if name == "BALANCE" and not run.program.adjustable:
            continue
        if name not in OWN and value and value != DEFAULT_INVENTORY:
            typed[name] = 1 if value is True else value
    typed.update(words or {})
    typed["ARGS"] = shlex.join(run.plan.trainer_words if args is None else args)
    return verbs.line("train", **typed)


@dataclass(frozen=True)
class TooShort:
    """A sentence, and the command line of a run that says more."""

    headline: str
    command: str


def too_short(run: Run, step: Step | None, epochs: int) -> TooShort | None:
    """The report on a run that is too short to judge; None where enough was measured. `epochs`: how
    many were trained."""
    if step is None or not step.missing_for_verdict:
        return None
    headline = f"This run was too short to judge: {step.missing_for_verdict}."
    return TooShort(headline, longer(run, epochs, step.measured_steps))


def longer(run: Run, epochs: int, measured_steps: int) -> str:
    """The command of the same run, long enough."""
    parts = SETTLED_STEPS / max(1, measured_steps)
    epochs = max(epochs + 1, math.ceil(max(1, epochs) * parts))
    return train_line(run, {"EPOCHS": epochs}) or run.program.phrases.longer
