"""What a run will do, as plain values (launcher/plan/build.py makes them); nothing here acts.

A dry run prints a Plan, the watch sends a Plan's argv and env to the guards, and plan.json is a
Plan.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from contract.text import counted
from launcher.machines import engine
from launcher.options import Options

FIRST_PORT = 29500
PORTS = 32
AS_ASKED = "as asked"  # why a precision or a strategy was taken
# Older agents check on their workers every 5 s.
MONITOR_INTERVAL = 0.1


@dataclass(frozen=True)
class NodePlan:
    """One machine's part: what its guard is told to run."""

    host: str
    node_rank: int
    ranks: tuple[int, ...]
    connection: str
    address: str
    port: int
    user: str | None
    interface: str | None
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    output: str
    data: str
    versions: dict[str, str | None]


@dataclass(frozen=True)
class Plan:
    """One attempt of a run; `apart`: each machine is a run of its own, to be measured."""

    run: str
    attempt: int
    created_unix: float
    tandem: str
    model: str
    data: str
    epochs: int
    sync: str
    precision: str
    world_size: int
    master_addr: str
    master_port: int
    code_sha256: str
    git_revision: str | None
    git_diff: str
    options: Options
    nodes: tuple[NodePlan, ...]
    precision_why: str = AS_ASKED
    sync_why: str = AS_ASKED
    apart: bool = False
    predicted: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "options": self.options.flat()}

    @property
    def unit(self) -> str:
        """The attempt's name on the nodes, of letters, digits, - and _."""
        return f"{self.run}-{self.attempt}"


def render(plan: Plan) -> str:
    """The plan as shell lines, one block per node, exactly as it is sent."""
    lines = [
        f"run {plan.run}, attempt {plan.attempt}: {counted(len(plan.nodes), 'node')}, "
        f"{counted(plan.world_size, 'process')}, "
        f"master {plan.master_addr} port {plan.master_port}",
        f"code {plan.code_sha256[:12]}",
        f"precision {plan.precision}: {plan.precision_why}",
        f"sync {plan.sync}: {plan.sync_why}",
    ]
    for node in plan.nodes:
        where = (
            "this machine"
            if engine.of(node.connection).is_local
            else f"{node.user or 'you'}@{node.address} port {node.port}"
        )
        lines += [
            "",
            f"# {node.host}: ranks {', '.join(map(str, node.ranks))}, {where}, card "
            f"{node.interface or '-'}",
        ]
        lines.append(shell_line(node))
    return "\n".join(lines)


def shell_line(node: NodePlan) -> str:
    """`cd CWD && env NAME=value ... argv`, quoted for a POSIX shell."""
    variables = [f"{name}={value}" for name, value in sorted(node.env.items())]
    return f"cd {shlex.quote(node.cwd)} && env {shlex.join([*variables, *node.argv])}"
