"""The command line of a run, of the same run with something changed, and of one that is long enough
to say something about the machines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract import verbs
from contract.options import DEFAULT_INVENTORY, DEFAULT_MODEL
from contract.text import seconds
from report.files import natural_number
from report.measure import Step
from report.read import Run
from report.waits import ENOUGH, enough

# Variables that are set below, or were of this run alone; all others are repeated.
OWN = ("NODES", "ARGS", "RESUME", "DETACH", "PORT", "AT", "UNTIL")


def train_line(
    run: Run, words: Mapping[str, object] | None = None, args: Sequence[str] | None = None
) -> str | None:
    """`make train ...` as it was typed, with other `words` in the place of its own; `args`: the
    trainer's words, if not the run's own. None for a run that make did not start, and for a script
    with words that are our trainer's."""
    options, trainers = run.plan.get("options"), set(words or ()) - {"NODES"}
    if options is None or (run.plan.get("script") and trainers):
        return None
    # NODES as it was typed: a machine may have been away, and those that trained be others.
    nodes = natural_number(options.get("nodes")) or len(run.plan.get("nodes") or run.hosts)
    typed: dict[str, object] = {"NODES": nodes}
    for name in verbs.variables_of("train"):
        value = options.get(name.lower())
        if run.plan.get("script") and name == "BALANCE":
            continue  # of our trainer
        if name not in OWN and value and value != DEFAULT_INVENTORY:
            typed[name] = 1 if value is True else value
    typed.update(words or {})
    typed["ARGS"] = shlex.join(own_args(run) if args is None else args)
    return verbs.line("train", **typed)


def own_args(run: Run) -> list[str]:
    """The trainer's own words, as ARGS had them."""
    return list(run.plan.get("options", {}).get("trainer", ()))


# The longer run aims at twice as much: it may well be faster.
AIM = 60.0
# ResNet-50's gradients and arithmetic are those of real work; the demo's network has 1/250 of them.
LONG_ENOUGH = {"MODEL": "resnet50", "EPOCHS": 10}


@dataclass(frozen=True)
class TooShort:
    """A sentence, its reason, and the command line of a run that says more."""

    headline: str
    because: str
    command: str


def too_short(run: Run, step: Step | None, epochs: int, cause: str) -> TooShort | None:
    """The report on a run that is too short for this cause; None where enough was measured.
    `epochs`: how many were trained."""
    if step is None or step.seconds * step.measured_steps >= enough(cause, step.one_machine):
        return None
    measured = step.seconds * step.measured_steps
    because = f"Less than {seconds(ENOUGH)} is mostly warming up. This one says more"
    if trained_the_demo(run):
        because += " (only its times count: ResNet-50 learns little of the digits)"
    return TooShort(
        f"This run was too short to judge: {seconds(measured)} of steps were measured.",
        f"{because}:",
        longer(run, epochs, measured),
    )


def trained_the_demo(run: Run) -> bool:
    """Whether the run trained the demo's network, as the launcher's plan says."""
    return bool(run.plan.get("options", {}).get("model") == DEFAULT_MODEL)


def longer(run: Run, epochs: int, measured: float) -> str:
    """The command of the same run, long enough; for the demo's network, with a real model."""
    if run.plan.get("script"):
        return "the same script, for longer by its own options (ARGS=)"
    words: dict[str, object] = {"EPOCHS": epochs_enough(epochs, measured)}
    args: list[str] | None = None
    if trained_the_demo(run):
        words, args = {**LONG_ENOUGH}, []
    line = train_line(run, words, args)
    return line or f"python -m trainer ... --epochs {epochs_enough(epochs, measured)}"


def epochs_enough(epochs: int, measured: float) -> int:
    """The number of epochs that is enough for a verdict."""
    return max(epochs + 1, math.ceil(max(1, epochs) * AIM / max(measured, 0.1)))
