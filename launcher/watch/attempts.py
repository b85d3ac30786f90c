"""The attempts of a run: what became of each (attempts.json), what people hear of the end, and the
exit code that tells scripts."""

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
from boundary.frames import Exit, Process
from boundary.schema import Invalid, decode
from contract.errors import STOPPED, UNWRITTEN
from contract.text import pluralize, write_whole
from launcher.folders import recorded, relative
from launcher.machines.inventory import JOB
from launcher.plan.plan import Plan
from launcher.watch import failures
from launcher.watch.failures import Failure, document
from report.files import before_hole, open_record

LINE = 1 << 20  # bytes; no line of ours is longer


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    status: str
    cause: Failure | None
    wall_seconds: float
    gone: list[str]
    exits: dict[str, Exit]
    unresponsive: list[str] = field(default_factory=list)
    regroup: str | None = None  # why the run goes on with other machines
    silent_ranks: Sequence[str] = ()  # where they stood, a line each place


def write_json(path: Path, value: object, mode: int = 0o644) -> None:
    """Whole or not at all. Raises OSError."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode(), mode)


class Attempts:
    """The attempts of a run, including the earlier ones when it is resumed."""

    def __init__(self, folder: Path):
        self.path = folder / "attempts.json"
        self.list: list[dict[str, Any]] = []
        self.problem: str | None = None  # why the file is not what it should be
        self.status = "running"
        if self.path.exists():
            found = recorded(self.path, run_files.Attempts)
            self.list, self.status = found["attempts"], found["status"]

    @property
    def ports(self) -> frozenset[int]:
        """Ports of earlier attempts: a machine that thaws must not find the run at its old port."""
        return frozenset(attempt["master_port"] for attempt in self.list)

    def begin(self, plan: Plan, reason: str, unix: float, last: str | None = None) -> None:
        """`last`: the checkpoint that it is told to go on from."""
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
        self.list[-1].update(
            status=outcome.status,
            wall_seconds=outcome.wall_seconds,
            silent_ranks=list(outcome.silent_ranks),
            first_cause=document(outcome.cause) if outcome.cause else None,
        )
        self._write("running")

    def close_broken(self) -> int:
        """End what a controller that died left open; return the number of the last attempt."""
        for attempt in self.list:
            if attempt["status"] == "running":
                attempt["status"] = "failed"
                attempt["reason"] += "; its controller died"
                attempt["wall_seconds"] = attempt["wall_seconds"] or 0.0
        return max((attempt["attempt"] for attempt in self.list), default=0)

    def read_starts(self) -> None:
        """Copy from the ranks' first lines where each attempt resumed and what its ranks decided.
        One rank's line for each attempt is enough, so a file is read no further than the last of
        them."""
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
        """Return what the ranks of the newest attempt decided that came so far; {} if none did."""
        self.read_starts()
        return next((a["decided"] for a in reversed(self.list) if a.get("decided")), {})

    def say_how(self, to_resume: str) -> None:
        """What to type now, for the report."""
        if self.list:
            self.list[-1]["to_resume"] = to_resume
            self._write(self.status)

    @staticmethod
    def saved(folder: Path) -> bool:
        """Whether any rank whose records are here wrote a checkpoint."""
        paths = folder.glob("nodes/*/rank*.steps.jsonl")
        return any(line.file for path in paths for line in lines_of(path, run_files.Checkpoint))

    def unfit(self, folder: Path) -> frozenset[str]:
        """Checkpoints that the last attempts were told to go on from: a rank of each failed by
        itself, and before any step that was timed."""
        found = set()
        for attempt in reversed(self.list):
            name, cause = attempt.get("went_on_from"), attempt.get("first_cause") or {}
            paths = folder.glob(f"nodes/*/rank*.{attempt['attempt']}.steps.jsonl")
            stepped = any(True for path in paths for _ in lines_of(path, run_files.Step))
            if not name or cause.get("rank") is None or not cause.get("exit_code") or stepped:
                break
            found.add(name)
        return frozenset(found)

    def close(self, status: str) -> None:
        self._write(status)

    def _write(self, status: str) -> None:
        """Write attempts.json; the old file stays until the new one is whole."""
        self.status = status
        try:
            write_json(self.path, {"status": status, "attempts": self.list})
            self.problem = None
        except OSError as error:
            self.problem = f"{self.path} could not be written ({error.strerror}): make room"


def lines_of(path: Path, kind: type[Struct]) -> Iterator[Any]:
    """The lines of a rank's timings that are of this kind: what a rank wrote is not trusted."""
    word = f'"{kind.__struct_config__.tag}"'.encode()
    with contextlib.suppress(OSError), open_record(path) as text:
        left, _ = before_hole(text.buffer, 0)
        while line := text.buffer.readline(min(LINE, left)):
            left -= len(line)
            if word in line:
                with contextlib.suppress(Invalid):
                    yield decode(line, kind, "line")


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
        left = _named(frame.left)
        ended = pluralize(len(frame.ended), "leftover process")
        clean = f"clean: {ended} ended" if frame.ended else "clean: nothing was left"
        lines.append(f"{host}: still alive: {left}" if left else f"{host}: {clean}")
    for host in outcome.gone:
        lines.append(f"{host}: does not answer; its guard ends its part by itself within 20 s")
    for host in outcome.unresponsive:
        lines.append(f"{host}: its guard was lost; the machine ends its part within 10 s")
    if len(outcome.gone) > 1 and not outcome.exits and not outcome.unresponsive:
        lines.append("no machine answers: check first that this one is connected to the network")
    return lines


def _named(processes: list[Process]) -> str:
    """Names the first few and counts the rest, since a machine may claim any number."""
    named = [f"{process.pid} {process.command[:LONGEST]}" for process in processes[:NAMED]]
    more = len(processes) - NAMED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def exit_code(outcome: Outcome, whole: bool = True) -> int:
    """The run's exit code. `whole`: whether this machine has all that a run leaves here."""
    if outcome.status == "finished":
        return 0 if whole else UNWRITTEN
    if outcome.status == "stopped":
        return STOPPED
    return failures.exit_code(outcome.cause) if outcome.cause else 1


def cannot_go_on() -> str:
    return (
        "this run cannot be continued: how its script goes on was not said (RESUME_ARGS=, "
        "docs/own-script.md); start it again as a new run"
    )


def how_to_resume(run: str, saved: bool, cause: Failure | None) -> str:
    """What to type after a run that did not finish; `saved` is whether it can go on."""
    if not saved:
        return (
            "this run cannot be continued, since it ended before its first checkpoint: start it "
            "again as a new run"
        )
    refusal = failures.no_resume(cause, run) if cause else None
    again = f"`sbatch runs/{run}.sbatch`" if JOB in os.environ else f"`make train RESUME={run}`"
    return refusal or f"to continue where it was saved: {again}"


def not_copied(folder: Path, error: Exception) -> str:
    """What became of a run's files that this machine's disk did not take."""
    return (
        f"this machine's disk took no more of the run's records and checkpoints ({error}): what is "
        f"not in {relative(folder)} stays on the machines, in runs/{folder.name} of their "
        "node_dir; make room, or give the folder to your user"
    )
