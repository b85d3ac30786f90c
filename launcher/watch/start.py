"""How an attempt begins: the code is sent to the nodes and a guard is started on each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from launcher.machines import engine, probe
from launcher.machines.engine import Host, MachineError, Node, Process
from launcher.plan import code, models
from launcher.plan.plan import NodePlan, Plan
from launcher.plan.preflight import Machines


def sync_code(plan: Plan, machines: Machines, say: Callable[[str], None]) -> None:
    """Send the code to machines whose tree differs, and check that it arrived. Raises
    MachineError."""
    now = code.current(models.folder(plan.model))
    stale = [h for h in machines.hosts if machines.facts[h.name].code_sha256 != now.sha256]
    if stale:
        say(f"code {now.sha256[:12]} goes to {', '.join(host.name for host in stale)}")
        folders = {node.host: node.cwd for node in plan.nodes}
        code.send(now, {host.name: machines.nodes[host.name] for host in stale}, folders)
        check_code(now.sha256, stale, machines.nodes, folders)


def check_code(
    sha256: str, hosts: list[Host], nodes: dict[str, Node], folders: dict[str, str]
) -> None:
    """Check that these machines hold the code that is recorded. Raises MachineError for those that
    do not."""

    def one(host: Host) -> str | None:
        found = probe.code_sha256(nodes[host.name], host.engine.guard_python, folders[host.name])
        if found == sha256:
            return None
        return (
            f"{host.label()}: {folders[host.name]} does not hold the code that was sent: see that "
            "nothing else writes there and that its disk is not full, then start again."
        )

    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        results = zip(hosts, pool.map(one, hosts))
        problems = {host.name: problem for host, problem in results if problem}
    if problems:
        raise MachineError([*problems], *problems.values())


def guard_argv(plan: Plan, node: NodePlan) -> list[str]:
    return [engine.of(node.connection).guard_python, "-IB", f"{node.cwd}/launcher/node", plan.unit]


def start_guards(plan: Plan, machines: Machines) -> dict[str, Process]:
    """Start a guard on each node, all at once; the guards then wait for their task."""

    def one(node: NodePlan) -> Process:
        return machines.nodes[node.host].start(guard_argv(plan, node))

    with ThreadPoolExecutor(max_workers=min(64, len(plan.nodes))) as pool:
        return dict(zip([node.host for node in plan.nodes], pool.map(one, plan.nodes)))
