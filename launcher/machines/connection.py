"""The connections to all machines, opened and closed together."""

from __future__ import annotations

import resource
from concurrent.futures import ThreadPoolExecutor

from contract.errors import UserError
from launcher.machines.engine import Node
from launcher.machines.errors import MachineError
from launcher.machines.inventory import Host

# Open files: for each host (its socket, and the pipes of paramiko's channels), and for all else.
PER_HOST, BESIDE = 8, 128


def make_room(hosts: int) -> None:
    """Allow this process the open files that so many hosts need: the usual 1024 suffice for some
    200.

    Raises UserError where the system allows fewer.
    """
    needed = BESIDE + PER_HOST * hosts
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= needed:
        return
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(
            f"{hosts} machines need about {needed} open files, and this machine allows {most} "
            "(`ulimit -Hn`): raise nofile in /etc/security/limits.conf, or give fewer NODES."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def open_all(hosts: list[Host]) -> tuple[dict[str, Node], dict[str, str]]:
    """Connect to all at once. Returns the nodes by name, and for the unreachable ones what ssh
    said. Raises UserError when this machine allows too few open files."""
    make_room(len(hosts))
    nodes = {host.name: host.engine.node(host) for host in hosts}
    failures: dict[str, str] = {}

    def attempt(node: Node) -> None:
        try:
            node.open()
        except MachineError as error:
            failures[node.host.name] = str(error)

    with ThreadPoolExecutor(max_workers=min(64, len(hosts) or 1)) as pool:
        list(pool.map(attempt, nodes.values()))
    return {name: nodes[name] for name in nodes if name not in failures}, failures


def close_all(nodes: dict[str, Node]) -> None:
    with ThreadPoolExecutor(max_workers=min(64, len(nodes) or 1)) as pool:
        list(pool.map(lambda one: one.close(), nodes.values()))
