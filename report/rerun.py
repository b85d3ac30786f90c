"""Write the command line of a run, of a changed run, and of one that is long enough to judge."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract import verbs
from contract.options import DEFAULT_INVENTORY
from report.measure import SETTLED_STEPS, Step
from report.read import RunRecord

# Variables that are set below, or belong to one run only; all others are repeated.
NOT_REPEATED = ("NODES", "ARGS", "RESUME", "DETACH", "PORT", "AT", "UNTIL")


def train_line(
    run: RunRecord, words: Mapping[str, object] | None = None, args: Sequence[str] | None = None
) -> str | None:
    """Return `make train ...` as the user typed it, with `words` and the trainer's `args` replaced;
    None for a run that make did not start, and if `words` would not change the program."""
    options, changes = run.plan.options, set(words or ()) - {"NODES"}
    if options is None or (changes and not run.program.adjustable):
        return None
    # NODES as the user typed it: a machine may have been away.
    nodes = options.get("nodes")
    machines = int(nodes) if isinstance(nodes, (int, float)) and nodes >= 1 else 0
    typed: dict[str, object] = {"NODES": machines or len(run.plan.nodes or run.hosts)}
    for name in verbs.VERBS["train"].variables:
        value = options.get(name.lower())
        # Only our trainer divides a batch by the speeds of machines.
        if name == "BALANCE" and not run.program.adjustable:
            continue
        if name not in NOT_REPEATED and value and value != DEFAULT_INVENTORY:
            typed[name] = 1 if value is True else value
    typed.update(words or {})
    typed["ARGS"] = shlex.join(run.plan.trainer_words if args is None else args)
    return verbs.line("train", **typed)


@dataclass(frozen=True)
class TooShort:
    """The report on a run that is too short to judge."""

    headline: str
    command: str  # of a longer run


def too_short(run: RunRecord, step: Step | None, epochs: int) -> TooShort | None:
    """Return None if enough was measured. `epochs`: how many were trained."""
    if step is None or not step.missing_for_verdict:
        return None
    headline = f"This run was too short to judge: {step.missing_for_verdict}."
    # Enough epochs for steps that are accepted in any case.
    factor = SETTLED_STEPS / max(1, step.measured_steps)
    epochs = max(epochs + 1, math.ceil(max(1, epochs) * factor))
    command = train_line(run, {"EPOCHS": epochs}) or run.program.phrases.longer
    return TooShort(headline, command)
