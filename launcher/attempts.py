"""attempts.json: what became of each attempt."""

from __future__ import annotations

import json
import os
from pathlib import Path

from launcher.cause import document
from launcher.plan import Plan
from launcher.watch import Outcome


def write_json(path: Path, value) -> None:
    """Whole or not at all: readers may look at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


class Attempts:
    """The attempts of a run, old ones included when it is resumed."""

    def __init__(self, folder: Path):
        self.path = folder / "attempts.json"
        self.list: list[dict] = []
        if self.path.exists():
            self.list = json.loads(self.path.read_text(encoding="utf-8"))["attempts"]

    def begin(self, plan: Plan, reason: str, unix: float, resumed_samples: int) -> None:
        self.list.append(
            {
                "attempt": plan.attempt,
                "nodes": [node.host for node in plan.nodes],
                "world_size": plan.world_size,
                "master_port": plan.master_port,
                "started_unix": unix,
                "wall_seconds": None,
                "reason": reason,
                "status": "running",
                "resumed_samples": resumed_samples,
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

    def close(self, status: str) -> None:
        self._write(status)

    def _write(self, status: str) -> None:
        write_json(self.path, {"status": status, "attempts": self.list})
