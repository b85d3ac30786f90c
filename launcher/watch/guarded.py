"""One node's guard as the control machine sees it."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

from launcher.machines.engine import Process
from launcher.node.launch import who
from launcher.plan.plan import NodePlan, Plan
from launcher.watch.frames import Frames

LEASE = 16.0


def task(plan: Plan, node: NodePlan) -> dict[str, Any]:
    """The first line for a node's guard: argv and env exactly as a dry run prints them."""
    return {
        "type": "start",
        "run": plan.run,
        "attempt": plan.attempt,
        "host": node.host,
        "ranks": list(node.ranks),
        "argv": list(node.argv),
        "env": dict(node.env),
        "cwd": node.cwd,
        "output": node.output,
        "data": node.data,
        "lease": LEASE,
        "interface": node.interface,
        "holder": f"{who()[0]}@{socket.gethostname()}",
        "shared": plan.options.force,
    }


class Guarded:
    """One node's guard as the control machine sees it."""

    def __init__(self, node: NodePlan, process: Process, now: float):
        self.node = node
        self.process = process
        self.frames = Frames(node.ranks)
        self.heard = now
        self.exit: dict[str, Any] | None = None
        self.ended = False  # its stream has ended, or it was given up
        self.gone = False
        self._pending = bytearray()

    def send(self, line: dict[str, Any]) -> None:
        self._pending += json.dumps(line).encode() + b"\n"
        self.push()

    def renew(self) -> None:
        """Renew the lease. One renewal that waits for the network is enough: more would only arrive
        all at once."""
        if not self._pending:
            self.send({"type": "lease"})
        else:
            self.push()

    def push(self) -> None:
        with contextlib.suppress(
            OSError, ValueError
        ):  # a broken pipe: the end of its stdout shows it
            while self._pending:
                taken = self.process.write(bytes(self._pending))
                if not taken:
                    return
                del self._pending[:taken]
