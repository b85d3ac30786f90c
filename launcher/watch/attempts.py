"""Keeps the attempts of a run in attempts.json, and puts into words how a run ended.

lifecycle.py and errand.py begin and end the attempts. lifecycle.py decides whether another attempt
begins. `choose_exit_code` returns the run's exit code.
"""

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
from launcher.folders import read_json, relative
from launcher.machines.inventory import JOB
from launcher.plan.plan import Plan
from launcher.watch.failures import Failure, as_document
from report.files import before_hole, open_record

MAX_LINE_BYTES = 1 << 20  # Tandem writes no longer lines


@dataclass(frozen=True)
class Outcome:
    """Describes how an attempt ended."""

    status: str  # finished, stopped or failed
    cause: Failure | None  # the first cause; None if nothing failed
    wall_seconds: float
    lost_hosts: list[str]  # silent for too long, or their connection broke
    exits: dict[str, Exit]  # by host: the last frame of each guard that sent an exit frame
    unreported_hosts: list[str] = field(default_factory=list)  # their guards sent no exit frame
    regroup_reason: str | None = None  # why it stopped to continue on other machines
    silent_ranks: Sequence[str] = ()  # lines that say at which place in the code ranks waited


def write_json(path: Path, value: object, mode: int = 0o644) -> None:
    """Write `value` as JSON, completely or not at all. Raises OSError."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode(), mode)


class Attempts:
    """Keeps the attempts of a run. A resumed run keeps its earlier attempts."""

    def __init__(self, folder: Path):
        self.path = folder / "attempts.json"
        self.list: list[dict[str, Any]] = []  # boundary.run_files.Attempt
        self.problem: str | None = None  # why the file could not be written
        self.status = "running"  # of the run
        if self.path.exists():
            document = read_json(self.path, run_files.Attempts)
            self.list, self.status = document["attempts"], document["status"]

    @property
    def used_ports(self) -> frozenset[int]:
        """The master ports of earlier attempts. No later attempt may use these ports: ranks on a
        machine that was frozen may still connect to them."""
        return frozenset(attempt["master_port"] for attempt in self.list)

    def begin(self, plan: Plan, reason: str, unix: float, checkpoint: str | None = None) -> None:
        """Add an attempt that begins at the time `unix`. `reason`: why it begins; `checkpoint`:
        the name of the checkpoint from which a script resumes, if Tandem has chosen it."""
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
                # `read_starts` copies these two from the ranks' records.
                "resumed_samples": 0,
                "decided": None,
                "first_cause": None,
                "silent_ranks": [],
                "to_resume": None,  # the command that continues the run (note_how_to_resume)
                "went_on_from": checkpoint,
            }
        )
        self._write("running")

    def end(self, outcome: Outcome) -> None:
        """Record how the newest attempt ended. The run itself ends with `close`."""
        self.list[-1].update(
            status=outcome.status,
            wall_seconds=outcome.wall_seconds,
            silent_ranks=list(outcome.silent_ranks),
            first_cause=as_document(outcome.cause) if outcome.cause else None,
        )
        self._write("running")

    def close_broken(self) -> int:
        """End the attempts of a launcher process that died. Return the last attempt's number, or 0
        without any attempt."""
        # No other launcher process can be using these attempts now: the caller holds the lock.
        for attempt in self.list:
            if attempt["status"] == "running":
                attempt["status"] = "failed"
                attempt["reason"] += "; its launcher process died"
                attempt["wall_seconds"] = attempt["wall_seconds"] or 0.0
        return max((attempt["attempt"] for attempt in self.list), default=0)

    def read_starts(self) -> None:
        """Copy the resumed position and the decisions of each attempt from the ranks' records."""
        # All ranks of an attempt write the same, so one line for each attempt is enough.
        pending = {attempt["attempt"]: attempt for attempt in self.list}
        for start in read_run_lines(self.path.parent, run_files.Start):
            if attempt := pending.pop(start.attempt, None):
                attempt["resumed_samples"] = start.resumed_samples
                attempt["decided"] = to_builtins(start.decided)
            if not pending:
                break
        self._write(self.status)

    def read_decisions(self) -> dict[str, Any]:
        """Return the decisions of the newest attempt that has any; {} if no attempt has any."""
        self.read_starts()
        return next((a["decided"] for a in reversed(self.list) if a.get("decided")), {})

    def note_how_to_resume(self, to_resume: str) -> None:
        """Record the command that the user should type next: the report shows this command."""
        if self.list:
            self.list[-1]["to_resume"] = to_resume
            self._write(self.status)

    @staticmethod
    def has_checkpoint(folder: Path) -> bool:
        """Return whether a rank wrote a checkpoint, by the records in the run's folder."""
        return any(line.file for line in read_run_lines(folder, run_files.Checkpoint))

    def find_unusable_checkpoints(self, folder: Path) -> frozenset[str]:
        """Return the checkpoints from which the newest attempts could not continue: in each of
        these attempts a rank exited with an error before any rank had timed a step."""
        names = set()
        # Going back in time, stop at the first attempt that made a step, or that ended for another
        # reason such as a lost machine. Such an attempt proves nothing against its checkpoint.
        for attempt in reversed(self.list):
            name, cause = attempt.get("went_on_from"), attempt.get("first_cause") or {}
            steps = read_run_lines(folder, run_files.Step, attempt["attempt"])
            has_steps = any(True for _ in steps)
            rank_failed = cause.get("rank") is not None and cause.get("exit_code")
            if not name or not rank_failed or has_steps:
                break
            names.add(name)
        return frozenset(names)

    def close(self, status: str) -> None:
        """Write the status with which the run ended."""
        self._write(status)

    def _write(self, status: str) -> None:
        """Replace attempts.json, or set `problem` if the file cannot be written."""
        # A full disk must not end the training. The run needs this file only to be resumed.
        self.status = status
        try:
            write_json(self.path, {"status": status, "attempts": self.list})
            self.problem = None
        except OSError as error:
            self.problem = (
                f"{self.path} could not be written ({error.strerror}): free space on that disk"
            )


def read_run_lines(folder: Path, kind: type[Struct], attempt: int | None = None) -> Iterator[Any]:
    """Yield the lines of this kind from the timings of all ranks in a run's folder, of one attempt
    or of all attempts."""
    names = "rank*.steps.jsonl" if attempt is None else f"rank*.{attempt}.steps.jsonl"
    for path in folder.glob(f"nodes/*/{names}"):
        yield from read_record_lines(path, kind)


def read_record_lines(path: Path, kind: type[Struct]) -> Iterator[Any]:
    """Yield the lines of this kind from a rank's *.steps.jsonl. Records are not trusted, so invalid
    lines and unreadable files are skipped."""
    # A line of kind Start is like {"kind": "start", "attempt": 1, ...}: its tag is "start".
    word = f'"{kind.__struct_config__.tag}"'.encode()
    with contextlib.suppress(OSError), open_record(path) as text:
        bytes_left, _ = before_hole(text.buffer, 0)  # after a power cut a file may end in a hole
        while line := text.buffer.readline(min(MAX_LINE_BYTES, bytes_left)):
            bytes_left -= len(line)
            # Decoding is slow, and most lines are steps. Only lines with the tag are decoded.
            if word in line:
                with contextlib.suppress(Invalid):
                    yield decode(line, kind, "line")


# Limits for the list of processes that are still alive on a machine.
MAX_PROCESSES, MAX_CHARACTERS = 5, 200


def describe_cause(cause: dict[str, Any]) -> list[str]:
    """Return lines about the first cause: what happened, the remedy, and the last output."""
    lines = [_add_full_stop(cause["message"]), f"What to do: {_add_full_stop(cause['remedy'])}"]
    if cause["last_lines"]:
        lines += ["Its last lines:", *(f"  {line}" for line in cause["last_lines"])]
    return lines


def _add_full_stop(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def describe_leftovers(outcome: Outcome) -> list[str]:
    """Return a line for each node that says which processes of the attempt are still alive."""
    lines = []
    for host, frame in outcome.exits.items():
        processes = [f"{process.pid} {process.command[:MAX_CHARACTERS]}" for process in frame.left]
        extra_count = len(processes) - MAX_PROCESSES
        extra = f" and {extra_count} more" if extra_count > 0 else ""
        count = pluralize(len(frame.ended), "leftover process")
        by_tandem = f" (Tandem ended {count})" if frame.ended else ""
        clean = f"all processes of the run have ended{by_tandem}"
        alive = f"still alive: {', '.join(processes[:MAX_PROCESSES])}{extra}"
        lines.append(f"{host}: {alive if processes else clean}")
    # The guard on a lost machine cannot report, but ends the processes once its lease is over.
    for host in outcome.lost_hosts:
        lines.append(f"{host}: does not answer; its guard ends its processes within 20 s")
    for host in outcome.unreported_hosts:
        lines.append(f"{host}: its guard has ended; the machine ends its processes within 10 s")
    # If several machines are lost at once, the control node's own network is the likely cause.
    if len(outcome.lost_hosts) > 1 and not outcome.exits and not outcome.unreported_hosts:
        lines.append(
            "no machine answers: check first that the control node is connected to the network"
        )
    return lines


def choose_exit_code(outcome: Outcome, is_complete: bool = True) -> int:
    """Return the run's exit code. `is_complete`: this machine has all files that it should."""
    if outcome.status == "finished":
        return 0 if is_complete else UNWRITTEN
    if outcome.status == "stopped":
        return STOPPED
    return outcome.cause.run_exit_code if outcome.cause else 1


def explain_missing_resume_args() -> str:
    """Explain that a script cannot be resumed without RESUME_ARGS."""
    return (
        "to continue this run, type `make train RESUME=` with its name, and RESUME_ARGS= with the "
        "arguments by which the script loads a checkpoint (docs/own-script.md)"
    )


def explain_how_to_resume(run: str, has_checkpoint: bool, cause: Failure | None) -> str:
    """Return the command that continues a run, or the reason why the run cannot or should not
    continue."""
    if not has_checkpoint:
        return (
            "this run cannot be resumed, because it ended before its first checkpoint: start "
            "a new run"
        )
    refusal = cause.no_resume if cause else None
    # In a Slurm job the machines belong to the job, so the user has to submit a new job.
    command = f"`sbatch runs/{run}.sbatch`" if JOB in os.environ else f"`make train RESUME={run}`"
    return refusal.format(run=run) if refusal else f"to continue from its checkpoint: {command}"


def explain_uncopied_files(folder: Path, error: Exception) -> str:
    """Return a message about an error of this machine's disk while files were copied into `folder`.
    The message says where the files still are."""
    return (
        f"the control node could not write the run's records and checkpoints ({error}): files "
        f"that are missing in {relative(folder)} are still on the machines, in "
        f"runs/{folder.name} of their node_dir; free disk space, or make your user the owner "
        "of the folder"
    )
