"""Write the command line of a run, of a changed or longer run, and of a trial of an advice. Find
the earlier advice that a run followed. This module only writes commands, and starts no run."""

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
    """Return `make train ...` as the user typed it, with the variables `words` and the trainer's
    options `args` replaced. Return None for a run that make did not start, and if the program lacks
    the options that `words` would change."""
    options, changes = run.plan.options, set(words or ()) - {"NODES"}
    if options is None or (changes and not run.program.adjustable):
        return None
    # The user's NODES counts, because a machine may have been away in this run.
    nodes = options.get("nodes")
    machines = int(nodes) if isinstance(nodes, (int, float)) and nodes >= 1 else 0
    typed: dict[str, object] = {"NODES": machines or len(run.plan.nodes or run.hosts)}
    for name in verbs.VERBS["train"].variables:
        value = options.get(name.lower())
        if name not in NOT_REPEATED and value and value != DEFAULT_INVENTORY:
            typed[name] = 1 if value is True else value
    typed.update(words or {})
    typed["ARGS"] = shlex.join(run.plan.trainer_words if args is None else args)
    return verbs.format_command("train", **typed)


# The trainer's options of a trial, each with its value: steps for 60 seconds, without saving or
# evaluating, and without a warm-up.
TRIAL = ("--trial", "60", "--sync_warmup", "0")
MOST_EARLIER = 50  # runs whose advice is read, the newest first


def advised_lines(
    run: RunRecord, words: Mapping[str, object], args: Sequence[str]
) -> tuple[str | None, str | None]:
    """Return the command of a run with a change, and the command that tries the change for a
    minute. Both are None if there is nothing to type."""
    if not (words or args):
        return None, None
    trainer_args = [*run.plan.trainer_words, *args]
    # If this run was a trial itself, a real run must not have the options of a trial. They are
    # removed one by one with their values, because the launcher may have recorded other values.
    for option in TRIAL[::2] if TRIAL[0] in trainer_args else ():
        while option in trainer_args:
            index = trainer_args.index(option)
            del trainer_args[index : index + 2]
    # A trial saves nothing, and scripts have no trials.
    has_trial = run.program.adjustable and "--checkpoint_every" not in args
    trial = train_line(run, words, [*trainer_args, *TRIAL]) if has_trial else None
    return train_line(run, words, trainer_args), trial


def settings_of(line: str) -> dict[str, tuple[str, ...]]:
    """Return the settings of a `make train` line without those that only limit a run's length; {}
    for a damaged line. Lines with equal settings start comparable runs."""
    # `make train NODES=4 EPOCHS=2 ARGS='--lr 0.1'` has the settings
    # {"make": (), "train": (), "NODES=4": (), "--lr": ("0.1",)}.
    try:
        words = shlex.split(line)
        values = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
        args = [arg for value in values for arg in shlex.split(value)]
    except ValueError:
        return {}
    left_out, option = ("ARGS=", "EPOCHS="), ""
    settings: dict[str, tuple[str, ...]] = {w: () for w in words if not w.startswith(left_out)}
    for arg in args:
        # If an option occurs twice, its last value counts.
        if arg.startswith("--"):
            option, _, arg = arg.partition("=")
            settings[option] = ()
        if arg:
            settings[option] = (*settings.get(option, ()), arg.removesuffix(".0"))
    if "--trial" in settings:
        return {name: values for name, values in settings.items() if name not in TRIAL}
    return settings


def find_tried_advice(run: RunRecord, reached: float | None) -> Entry | None:
    """Return the newest advice of an earlier run that this run followed, with the predicted speed
    and the speed that this run reached. Return None if it followed none. `reached`: images/s."""
    line, folder = train_line(run), run.folder.resolve()
    # The name of a run begins with its time.
    earlier = [path for path in newest_first(folder.parent) if path.name < folder.name]
    for path in earlier[:MOST_EARLIER] if line and reached else ():
        summary = convert_what_fits(read_object(path / "summary.json", []), EarlierSummary)
        for advice in summary.advice:
            command, predicted = advice.get("command"), advice.get("predicted_images_per_second")
            # The summary of another run may be damaged.
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


def check_length(run: RunRecord, step: Step | None, epochs: int) -> TooShort | None:
    """Return why a run is too short to judge, and the command of a longer run. Return None if
    enough was measured. `epochs`: how many were trained."""
    if step is None or not step.missing_for_verdict:
        return None
    headline = f"This run was too short to judge: {step.missing_for_verdict}."
    # After SETTLED_STEPS a run is judged even if its steps still change. A longer run therefore
    # has `factor` times as many epochs, and at least one epoch more.
    factor = SETTLED_STEPS / max(1, step.measured_steps)
    epochs = max(epochs + 1, math.ceil(max(1, epochs) * factor))
    command = train_line(run, {"EPOCHS": epochs}) or run.program.phrases.longer
    return TooShort(headline, command)
