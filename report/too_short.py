"""Runs that are too short to say anything about the machines, and which longer run would."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contract import defaults
from report.command import train_line
from report.measure import Step
from report.records import Run
from report.units import seconds

# In a shorter run caches, clocks and connections still warm up, and one disturbance decides.
ENOUGH = 30.0
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


def too_short(run: Run, step: Step | None, epochs: int) -> TooShort | None:
    """What to say of a run that is too short; None where enough was measured. `epochs`: how many
    were trained."""
    measured = step.seconds * step.counted if step else ENOUGH
    if measured >= ENOUGH:
        return None
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
    options = run.plan.get("options")
    return isinstance(options, dict) and options.get("model") == defaults.MODEL


def longer(run: Run, epochs: int, measured: float) -> str:
    """The same run for long enough; for the demo's network one whose cost is that of real work."""
    words: dict[str, object] = {"EPOCHS": enough(epochs, measured)}
    args: list[str] | None = None
    if trained_the_demo(run):
        words, args = {**LONG_ENOUGH}, []
    line = train_line(run, words, args)
    return line or f"python -m trainer ... --epochs {enough(epochs, measured)}"


def enough(epochs: int, measured: float) -> int:
    """How many epochs take long enough for a verdict."""
    return max(epochs + 1, math.ceil(max(1, epochs) * AIM / max(measured, 0.1)))
