"""Keeps the attempts of a run (attempts.json), and words how a run ended, for people and as an
exit code for scripts."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins

from boundary import run_files
from boundary.frames import Exit
from boundary.schema import Invalid, decode
from contract.errors import STOPPED, UNWRITTEN
from contract.text import pluralize, write_whole
from launcher.folders import recorded, relative
from launcher.machines.inventory import JOB
from launcher.plan.plan import Plan
from launcher.watch import failures
from launcher.watch.failures import Failure, document
from report.files import before_hole, open_record

LINE = 1 << 20  # bytes; no line that Tandem writes is longer


@dataclass(frozen=True)
class Outcome:
    """Describes how an attempt ended."""

    status: str
    cause: Failure | None
    wall_seconds: float
    gone: list[str]
    exits: dict[str, Exit]
    unresponsive: list[str] = field(default_factory=list)
    regroup: str | None = None  # why the run goes on with other machines
    silent_ranks: Sequence[str] = ()  # where they stood, a line each place


def write_json(path: Path, value: object, mode: int = 0o644) -> None:
    """Write `value` as JSON, whole or not at all. Raises OSError."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode(), mode)


class Attempts:
    """Keeps the attempts of a run, including the earlier ones when it is resumed."""

    def __init__(self, folder: Path):
        self.path = folder / "attempts.json"
        self.list: list[dict[str, Any]] = []
        self.problem: str | None = None  # why the file could not be written
        self.status = "running"
        if self.path.exists():
            document = recorded(self.path, run_files.Attempts)
            self.list, self.status = document["attempts"], document["status"]

    @property
    def ports(self) -> frozenset[int]:
        """The master ports of earlier attempts, which no later one may use: ranks of a machine that
        was frozen would connect to them again."""
        return frozenset(attempt["master_port"] for attempt in self.list)

    def begin(self, plan: Plan, reason: str, unix: float, last: str | None = None) -> None:
        """Add an attempt, that begins now. `last`: the checkpoint from which it resumes."""
        self.list.append(
            {
                "attempt": plan.attempt,
                "nodes": [node.host for node in plan.nodes],
                "ranks": {node.host: list(node.ranks) for node in plan.nodes},
                "world_size": plan.world_size,
                "code_sha256": plan.code_sha256,
                "master_port": plan.master_port,
                "started_unix": unix,
                "wall_seconds": None,
                "reason": reason,
                "status": "running",
                "resumed_samples": 0,
                "decided": None,
                "first_cause": None,
                "silent_ranks": [],
                "to_resume": None,
                "went_on_from": last,
            }
        )
        self._write("running")

    def end(self, outcome: Outcome) -> None:
        """Note how the newest attempt ended. The run lasts until `close`."""
        self.list[-1].update(
            status=outcome.status,
            wall_seconds=outcome.wall_seconds,
            silent_ranks=list(outcome.silent_ranks),
            first_cause=document(outcome.cause) if outcome.cause else None,
        )
        self._write("running")

    def close_broken(self) -> int:
        """End the attempts of a controller that died; return the number of the last attempt."""
        # A controller that lives ends its attempts itself, and holds the lock that resume needs.
        for attempt in self.list:
            if attempt["status"] == "running":
                attempt["status"] = "failed"
                attempt["reason"] += "; its launcher process died"
                attempt["wall_seconds"] = attempt["wall_seconds"] or 0.0
        return max((attempt["attempt"] for attempt in self.list), default=0)

    def read_starts(self) -> None:
        """Copy the position at which each attempt resumed, and the ranks' decisions, from the first
        lines of their records."""
        # One rank's line for each attempt is enough: reading stops when every attempt has one.
        unknown = {attempt["attempt"]: attempt for attempt in self.list}
        paths = self.path.parent.glob("nodes/*/rank*.steps.jsonl")
        for start in (line for path in paths for line in lines_of(path, run_files.Start)):
            if attempt := unknown.pop(start.attempt, None):
                attempt["resumed_samples"] = start.resumed_samples
                attempt["decided"] = to_builtins(start.decided)
            if not unknown:
                break
        self._write(self.status)

    def decided(self) -> dict[str, Any]:
        """Return the decisions of the newest attempt whose ranks decided; {} if there is none."""
        self.read_starts()
        return next((a["decided"] for a in reversed(self.list) if a.get("decided")), {})

    def note_how_to_resume(self, to_resume: str) -> None:
        """Keep what the user has to type now, for the report."""
        if self.list:
            self.list[-1]["to_resume"] = to_resume
            self._write(self.status)

    @staticmethod
    def saved(folder: Path) -> bool:
        """Return whether any rank whose records are here wrote a checkpoint."""
        paths = folder.glob("nodes/*/rank*.steps.jsonl")
        return any(line.file for path in paths for line in lines_of(path, run_files.Checkpoint))

    def unfit(self, folder: Path) -> frozenset[str]:
        """Return the checkpoints from which the last attempts made no step: a rank of each failed
        with an exit code before any step was timed."""
        unfit_names = set()
        # From the newest back, up to an attempt that made a step or failed in another way, as when
        # a machine was lost: before that one the checkpoints were fit.
        for attempt in reversed(self.list):
            name, cause = attempt.get("went_on_from"), attempt.get("first_cause") or {}
            paths = folder.glob(f"nodes/*/rank*.{attempt['attempt']}.steps.jsonl")
            stepped = any(True for path in paths for _ in lines_of(path, run_files.Step))
            if not name or cause.get("rank") is None or not cause.get("exit_code") or stepped:
                break
            unfit_names.add(name)
        return frozenset(unfit_names)

    def close(self, status: str) -> None:
        """Write the status with which the run ended."""
        self._write(status)

    def _write(self, status: str) -> None:
        """Write attempts.json; the old file stays until the new one is whole."""
        # A full disk must not end the training, which needs this file only to be resumed.
        self.status = status
        try:
            write_json(self.path, {"status": status, "attempts": self.list})
            self.problem = None
        except OSError as error:
            self.problem = (
                f"{self.path} could not be written ({error.strerror}): free space on that disk"
            )


def lines_of(path: Path, kind: type[Struct]) -> Iterator[Any]:
    """Yield the lines of a rank's timings that are of this kind. A line that is invalid, or a file
    that cannot be read, is skipped: what a rank wrote is not trusted."""
    word = f'"{kind.__struct_config__.tag}"'.encode()
    with contextlib.suppress(OSError), open_record(path) as text:
        bytes_left, _ = before_hole(text.buffer, 0)
        while line := text.buffer.readline(min(LINE, bytes_left)):
            bytes_left -= len(line)
            # Most lines are steps: only lines that have the word are decoded.
            if word in line:
                with contextlib.suppress(Invalid):
                    yield decode(line, kind, "line")


# Processes that still live on a machine: how many are listed, with how many characters each.
LISTED, LONGEST = 5, 200


def describe(cause: dict[str, Any]) -> list[str]:
    """Return lines about the first cause: what happened, what to do, and its last output."""
    lines = [_sentence(cause["message"]), f"What to do: {_sentence(cause['remedy'])}"]
    if cause["last_lines"]:
        lines += ["Its last lines:", *(f"  {line}" for line in cause["last_lines"])]
    return lines


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def leftovers(outcome: Outcome) -> list[str]:
    """Return a line for each node about the processes that remain of the attempt there."""
    lines = []
    for host, frame in outcome.exits.items():
        processes = [f"{process.pid} {process.command[:LONGEST]}" for process in frame.left]
        # A machine may report any number of processes.
        extra_count = len(processes) - LISTED
        extra = f" and {extra_count} more" if extra_count > 0 else ""
        count = pluralize(len(frame.ended), "leftover process")
        by_tandem = f" (Tandem ended {count})" if frame.ended else ""
        clean = f"all processes of the run have ended{by_tandem}"
        alive = f"still alive: {', '.join(processes[:LISTED])}{extra}"
        lines.append(f"{host}: {alive if processes else clean}")
    # These guards cannot report, but end their processes when their lease or connection ends.
    for host in outcome.gone:
        lines.append(f"{host}: does not answer; its guard ends its processes within 20 s")
    for host in outcome.unresponsive:
        lines.append(f"{host}: its guard has ended; the machine ends its processes within 10 s")
    if len(outcome.gone) > 1 and not outcome.exits and not outcome.unresponsive:
        lines.append(
            "no machine answers: check first that the control node is connected to the network"
        )
    return lines


def exit_code(outcome: Outcome, is_complete: bool = True) -> int:
    """Return the run's exit code. `is_complete`: this machine has all files that a run leaves."""
    if outcome.status == "finished":
        return 0 if is_complete else UNWRITTEN
    if outcome.status == "stopped":
        return STOPPED
    return failures.exit_code(outcome.cause) if outcome.cause else 1


def cannot_go_on() -> str:
    """Word why a script's run cannot be resumed."""
    return "this run cannot be resumed without RESUME_ARGS= (docs/own-script.md): start a new run"


def how_to_resume(run: str, saved: bool, cause: Failure | None) -> str:
    """Word what to type after a run that did not finish. `saved`: it has a checkpoint."""
    if not saved:
        return (
            "this run cannot be resumed, because it ended before its first checkpoint: start "
            "a new run"
        )
    refusal = failures.no_resume(cause, run) if cause else None
    # In a job of Slurm a new job has to be queued.
    command = f"`sbatch runs/{run}.sbatch`" if JOB in os.environ else f"`make train RESUME={run}`"
    return refusal or f"to continue from its checkpoint: {command}"


def not_copied(folder: Path, error: Exception) -> str:
    """Name the folder on the machines with the files that this machine's disk did not take."""
    return (
        f"the control node could not write the run's records and checkpoints ({error}): files "
        f"that are missing in {relative(folder)} are still on the machines, in "
        f"runs/{folder.name} of their node_dir; free disk space, or make your user the owner "
        "of the folder"
    )
