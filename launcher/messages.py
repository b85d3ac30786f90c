"""What people are told about how an attempt ended, and the exit code that tells scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from contract.errors import STOPPED, UNWRITTEN
from contract.text import counted
from launcher.folders import relative
from launcher.watch import failures
from launcher.watch.failures import Failure
from launcher.watch.watch import Outcome

# Of the processes that still live on a machine: how many are named, with how many characters each.
NAMED, LONGEST = 5, 200


def describe(cause: dict[str, Any]) -> list[str]:
    """The first cause: what happened, what to do about it, and the last lines of output."""
    lines = [_sentence(cause["message"]), f"What to do: {_sentence(cause['remedy'])}"]
    if cause["last_lines"]:
        lines += ["Its last lines:", *(f"  {line}" for line in cause["last_lines"])]
    return lines


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def leftovers(outcome: Outcome) -> list[str]:
    """What each node's guard says is left of the attempt there."""
    lines = []
    for host, frame in outcome.exits.items():
        left = _named(frame["left"])
        ended = counted(len(frame["ended"]), "leftover process")
        clean = f"clean: {ended} ended" if frame["ended"] else "clean: nothing was left"
        lines.append(f"{host}: still alive: {left}" if left else f"{host}: {clean}")
    for host in outcome.gone:
        lines.append(f"{host}: does not answer; its guard ends its part by itself within 20 s")
    for host in outcome.lingering:
        lines.append(f"{host}: its guard was lost; the machine ends its part within 10 s")
    if len(outcome.gone) > 1 and not outcome.exits and not outcome.lingering:
        lines.append("no machine answers: check first that this one is connected to the network")
    return lines


def _named(processes: list[dict[str, Any]]) -> str:
    """Names the first few and counts the rest, since a machine may claim any number."""
    named = [f"{process['pid']} {process['command'][:LONGEST]}" for process in processes[:NAMED]]
    more = len(processes) - NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def exit_code(outcome: Outcome, whole: bool = True) -> int:
    """The run's exit code. `whole`: whether this machine has all that a run leaves here."""
    if outcome.status == "finished":
        return 0 if whole else UNWRITTEN
    if outcome.status == "stopped":
        return STOPPED
    return failures.exit_code(outcome.cause) if outcome.cause else 1


def how_to_resume(run: str, saved: bool, cause: Failure | None) -> str:
    """What to type after a run that did not finish."""
    if not saved:
        return (
            "this run cannot be continued, since it ended before its first checkpoint: start it "
            "again as a new run"
        )
    refusal = failures.no_resume(cause, run) if cause else None
    return refusal or f"to continue where it was saved: `make train RESUME={run}`"


def not_copied(folder: Path, error: Exception) -> str:
    """What became of a run's files that this machine's disk did not take."""
    return (
        f"this machine's disk took no more of the run's records and checkpoints ({error}): what is "
        f"not in {relative(folder)} stays on the machines, in runs/{folder.name} of their "
        "node_dir; make room, or give the folder to your user"
    )
