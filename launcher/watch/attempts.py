"""attempts.json: what became of each attempt."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract import validate
from contract.validate import NATURAL, Each, Invalid, One
from launcher.folders import recorded, write_whole
from launcher.plan.plan import Plan
from launcher.watch.failures import document
from launcher.watch.watch import Outcome


def write_json(path: Path, value: object, mode: int = 0o644) -> None:
    """Whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(value, indent=1) + "\n", mode)


SPARE = 1 << 20  # bytes
LINE = 1 << 20  # bytes; no line of ours is longer
START = {"kind": One(("start",)), "attempt": NATURAL, "resumed_samples": NATURAL}
# What a run that goes on reads of attempts.json.
ATTEMPT = {
    **{"attempt": NATURAL, "nodes": [str], "ranks": Each([NATURAL]), "status": str, "reason": str},
    **{"master_port": One(range(1 << 16)), "wall_seconds": (None, float)},
}
RECORDED: dict[str, object] = {"status": str, "attempts": [ATTEMPT]}
CHECKPOINT = {"kind": One(("checkpoint",)), "file": str}


class Attempts:
    """The attempts of a run, including the earlier ones when it is resumed."""

    def __init__(self, folder: Path):
        self.path = folder / "attempts.json"
        self.list: list[dict[str, Any]] = []
        self.problem: str | None = None  # why the file is not what it should be
        self._spare = folder / ".spare"
        self.status = "running"
        if self.path.exists():
            found = recorded(self.path, RECORDED)
            self.list, self.status = found["attempts"], found["status"]

    @property
    def ports(self) -> frozenset[int]:
        """Ports of earlier attempts: a machine that thaws must not find the run at its old port."""
        return frozenset(attempt["master_port"] for attempt in self.list)

    def begin(self, plan: Plan, reason: str, unix: float) -> None:
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
                "first_cause": None,
            }
        )
        with contextlib.suppress(OSError):  # there is little room: reported when it matters
            reserve(self._spare)
        self._write("running")

    def end(self, outcome: Outcome) -> None:
        self.list[-1].update(
            status=outcome.status,
            wall_seconds=outcome.wall_seconds,
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

    def read_resumed(self, folder: Path) -> None:
        """Where each attempt resumed, from what its ranks wrote when they began. One rank's line
        for each attempt is enough, so a file is read no further than the last of them."""
        unknown = {attempt["attempt"]: attempt for attempt in self.list}
        paths = folder.glob("nodes/*/rank*.steps.jsonl")
        for start in (line for path in paths for line in lines_of(path, START)):
            if attempt := unknown.pop(start["attempt"], None):
                attempt["resumed_samples"] = start["resumed_samples"]
            if not unknown:
                break
        self._write(self.status)

    @staticmethod
    def saved(folder: Path) -> bool:
        """Whether any rank whose records are here wrote a checkpoint."""
        paths = folder.glob("nodes/*/rank*.steps.jsonl")
        return any(line["file"] for path in paths for line in lines_of(path, CHECKPOINT))

    def close(self, status: str) -> None:
        self._write(status)
        self._give_back()

    def _give_back(self) -> None:
        """Release the reserved space. Where nothing can be written, it stays."""
        with contextlib.suppress(OSError):
            self._spare.unlink(missing_ok=True)

    def _write(self, status: str) -> None:
        """Write attempts.json, on a full disk into the space reserved for it; the old file stays
        until the new one is whole."""
        self.status = status
        value = {"status": status, "attempts": self.list}
        try:
            write_json(self.path, value)
            self.problem = None
        except OSError:
            self._give_back()
            try:
                write_json(self.path, value)
                self.problem = None
            except OSError as error:
                self.problem = f"{self.path} could not be written ({error.strerror}): make room"


def reserve(path: Path) -> None:
    """Make a file that reserves space on the disk. Raises OSError."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SPARE)


def lines_of(path: Path, shape: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of a rank's timings that have this shape: what a rank wrote is not trusted."""
    word = f'"{shape["kind"].values[0]}"'.encode()
    with contextlib.suppress(OSError), path.open("rb") as file:
        while line := file.readline(LINE):
            if word in line:
                with contextlib.suppress(Invalid):
                    yield validate.check(validate.parse(line), shape, "line")
