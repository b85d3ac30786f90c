"""Write the command line of a run, of a changed run, of one that is long enough to judge, and of a
trial of an advice; find what an earlier advice brought."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from boundary.run_files import EarlierSummary
from boundary.schema import convert_what_fits
from contract import verbs
from contract.options import DEFAULT_INVENTORY
from report.cli import newest_first
from report.files import Entry, number, read_object
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
        if name not in NOT_REPEATED and value and value != DEFAULT_INVENTORY:
            typed[name] = 1 if value is True else value
    typed.update(words or {})
    typed["ARGS"] = shlex.join(run.plan.trainer_words if args is None else args)
    return verbs.line("train", **typed)


# The trainer's options of a trial: steps for so many seconds, without saving or evaluating.
TRIAL = ("--trial", "60", "--sync_warmup", "0")
MOST_EARLIER = 50  # runs whose advice is read


def advised_lines(
    run: RunRecord, words: Mapping[str, object], args: Sequence[str]
) -> tuple[str | None, str | None]:
    """Return the command of a run with a change, and the one that tries the change for a minute;
    None if there is nothing to type."""
    if not (words or args):
        return None, None
    trained = [*run.plan.trainer_words, *args]
    # The words that the launcher recorded may have another order and other digits.
    for option in TRIAL[::2] if TRIAL[0] in trained else ():
        while option in trained:
            del trained[(at := trained.index(option)) : at + 2]
    # A trial saves nothing, and scripts have no trials.
    has_trial = run.program.adjustable and "--checkpoint_every" not in args
    trial = train_line(run, words, [*trained, *TRIAL]) if has_trial else None
    return train_line(run, words, trained), trial


def settings_of(line: str) -> dict[str, tuple[str, ...]]:
    """Return the words of a `make train` line, those of ARGS by their options, without what only
    limits a run's length; {} for a damaged line."""
    try:
        words = shlex.split(line)
        args = [arg for word in words if word.startswith("ARGS=") for arg in shlex.split(word[5:])]
    except ValueError:
        return {}
    limits, option = ("ARGS=", "EPOCHS="), ""
    settings: dict[str, tuple[str, ...]] = {w: () for w in words if not w.startswith(limits)}
    for arg in args:
        # Of an option that is there twice, the last value counts.
        if arg.startswith("--"):
            option, _, arg = arg.partition("=")
            settings[option] = ()
        if arg:
            settings[option] = (*settings.get(option, ()), arg.removesuffix(".0"))
    if "--trial" in settings:
        return {name: values for name, values in settings.items() if name not in TRIAL}
    return settings


def tried_advice(run: RunRecord, reached: float | None) -> Entry | None:
    """Return the newest advice of an earlier run that this run followed, with both speeds."""
    line, folder = train_line(run), run.folder.resolve()
    earlier = [path for path in newest_first(folder.parent) if path.name < folder.name]
    for path in earlier[:MOST_EARLIER] if line and reached else ():
        summary = convert_what_fits(read_object(path / "summary.json", []), EarlierSummary)
        for advice in summary.advice:
            command, predicted = advice.get("command"), advice.get("predicted_images_per_second")
            if not (isinstance(command, str) and number(predicted)):
                continue
            if settings_of(command) == settings_of(line or ""):
                return {
                    "run": path.name,
                    "change": advice.get("change"),
                    "before": summary.images_per_second,
                    "predicted": predicted,
                    "reached": reached,
                }
    return None


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
