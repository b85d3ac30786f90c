"""The acts at the beginning of an attempt: code to the nodes, a guard on each."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from launcher import code
from launcher.plan import NodePlan, Plan
from launcher.preflight import Machines

LOCAL_GUARD_PYTHON = sys.executable
GUARD_PYTHON = "/usr/bin/python3"


def sync_code(plan: Plan, machines: Machines, say) -> None:
    """Send the code to the machines whose tree differs."""
    now = code.current()
    stale = [h for h in machines.hosts if machines.facts[h.name].code_sha256 != now.sha256]
    if stale:
        say(f"code {now.sha256[:12]} goes to {', '.join(host.name for host in stale)}")
        code.send(now, stale, {node.host: node.cwd for node in plan.nodes})


def guard_argv(plan: Plan, node: NodePlan) -> list[str]:
    python = LOCAL_GUARD_PYTHON if node.connection == "local" else GUARD_PYTHON
    return [python, "-IB", f"{node.cwd}/launcher/node", plan.unit]


def start_guards(plan: Plan, machines: Machines) -> dict:
    """A guard on each node, all at once; they wait for their task."""

    def one(node: NodePlan):
        return machines.nodes[node.host].start(guard_argv(plan, node))

    with ThreadPoolExecutor(max_workers=min(64, len(plan.nodes))) as pool:
        return dict(zip([node.host for node in plan.nodes], pool.map(one, plan.nodes)))
