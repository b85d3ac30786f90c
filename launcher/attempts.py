"""attempts.json: what became of each attempt."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from launcher.cause import document
from launcher.plan import Plan
from launcher.watch import Outcome


def write_json(path: Path, value, mode: int = 0o644) -> None:
    """Whole or not at all, also when power fails: readers may look at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(made, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Attempts:
    """The attempts of a run, old ones included when it is resumed."""

    def __init__(self, folder: Path):
        self.path = folder / "attempts.json"
        self.list: list[dict[str, Any]] = []
        if self.path.exists():
            self.list = json.loads(self.path.read_text(encoding="utf-8"))["attempts"]

    @property
    def ports(self) -> frozenset[int]:
        """Ports of earlier attempts: a machine that thaws must not find the run at its old one."""
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
        """Where each attempt took up, from what its ranks wrote when they began."""
        for path in folder.glob("nodes/*/rank*.steps.jsonl"):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if '"start"' not in line:
                    continue
                with contextlib.suppress(ValueError, KeyError):
                    start = json.loads(line)
                    for attempt in self.list:
                        if start["kind"] == "start" and attempt["attempt"] == start["attempt"]:
                            attempt["resumed_samples"] = start["resumed_samples"]
        self._write(json.loads(self.path.read_text(encoding="utf-8"))["status"])

    @staticmethod
    def saved(folder: Path) -> bool:
        """Whether any rank whose records are here wrote a checkpoint."""
        for path in folder.glob("nodes/*/rank*.steps.jsonl"):
            with path.open(encoding="utf-8", errors="replace") as file:
                if any('"checkpoint"' in line and _names_a_file(line) for line in file):
                    return True
        return False

    def close(self, status: str) -> None:
        self._write(status)

    def _write(self, status: str) -> None:
        write_json(self.path, {"status": status, "attempts": self.list})


def _names_a_file(line: str) -> bool:
    with contextlib.suppress(ValueError, AttributeError):
        told = json.loads(line)
        return told.get("kind") == "checkpoint" and bool(told.get("file"))
    return False
