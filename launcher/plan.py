"""What a run will do, as plain values: built from inventory, options and facts; nothing here acts.

Dry run prints a Plan, the watch sends a Plan's argv and env to the guards, plan.json is a Plan.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import time
from collections import Counter
from dataclasses import asdict, dataclass

from launcher.errors import UserError
from launcher.inventory import Host
from launcher.options import Options, data_path
from launcher.probe import Facts

FIRST_PORT = 29500
PORTS = 32
# Older agents look at their workers every 5 s.
MONITOR_INTERVAL = 0.1


@dataclass(frozen=True)
class NodePlan:
    """One machine's part: what its guard gets to run."""

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
    """One attempt of a run."""

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
    predicted: dict | None = None

    def document(self) -> dict:
        return asdict(self)

    @property
    def unit(self) -> str:
        """The name of the attempt on the nodes: letters, digits, - and _."""
        return f"{self.run}-{self.attempt}"


def run_id(model: str, nodes: int, unix: float) -> str:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix))
    return f"{stamp}-{re.sub(r'[^A-Za-z0-9_]+', '-', model)}-{nodes}n"


def local_ranks(host: Host, facts: Facts) -> int:
    """One process per GPU; a machine without any computes with one process on its cores."""
    return max(1, host.gpus if host.gpus is not None else facts.gpus["count"])


def choose_port(facts: Facts, wanted: int | None, avoid: set[int]) -> int:
    """A port that nobody uses on node 0. Raises UserError when the wanted one is taken."""
    if wanted is not None and wanted not in facts.free_ports:
        raise UserError(
            f"{facts.host}: port {wanted} is in use there: leave --port out, and a free one "
            "is taken, or give another."
        )
    free = [port for port in facts.free_ports if port not in avoid]
    if not free:
        raise UserError(
            f"{facts.host}: no free port in {FIRST_PORT}-{FIRST_PORT + PORTS - 1}: give "
            "another with --port."
        )
    return wanted if wanted is not None and wanted not in avoid else free[0]


def candidate_ports(options: Options) -> list[int]:
    ports = list(range(FIRST_PORT, FIRST_PORT + PORTS))
    return ports if options.port is None else [options.port, *ports]


def interface(host: Host, facts: Facts) -> str | None:
    """The card that leads to the peers. Raises UserError when the routes leave by several."""
    if host.interface:
        return host.interface
    cards = {route["interface"] for route in facts.routes.values() if route["interface"]}
    if len(cards) > 1:
        ways = ", ".join(f"{peer} by {route['interface']}" for peer, route in facts.routes.items())
        raise UserError(
            f"{host.name}: its peers are reached through several network cards ({ways}): "
            "put all machines in one "
            f"network, or give interface=<card> for {host.name} in the inventory."
        )
    return cards.pop() if cards else None


def build(
    hosts: list[Host],
    facts: dict[str, Facts],
    options: Options,
    settings: dict,
    code,
    *,
    run: str,
    attempt: int = 1,
    unix: float,
    used_ports: frozenset[int] = frozenset(),
    bar: int = 0,
    extra_env: dict[str, str] | None = None,
    predicted: dict | None = None,
    tandem: str = "0.1.0",
) -> Plan:
    """The plan of one attempt.

    `settings` is what the trainer makes of the options, `bar` the width of the control terminal, 0
    where there is none. A later attempt goes on from the newest checkpoint that any of its machines
    holds: the trainer finds and spreads it. Raises UserError.
    """
    counts = [local_ranks(host, facts[host.name]) for host in hosts]
    per_node = settings["per_node_batch_size"]
    for host, count in zip(hosts, counts):
        if per_node < count:
            raise UserError(
                f"BATCH={per_node} is split over the {count} processes of {host.name}, so "
                f"{count - per_node} of them "
                f"would have no sample: give BATCH={count} or more."
            )
    master = hosts[0].address
    check_master(hosts)
    port = choose_port(facts[hosts[0].name], options.port, set(used_ports))
    sharing = Counter()
    for host, count in zip(hosts, counts):
        sharing[facts[host.name].machine] += count
    nodes = []
    first = 0
    for rank, (host, count) in enumerate(zip(hosts, counts)):
        fact = facts[host.name]
        folder = fact.absolute(host.node_dir)
        output = f"{folder}/runs/{run}"
        data = data_path(options.data, host.data_root, host.is_local, host.name)
        card = interface(host, fact)
        env = environment(card, max(1, fact.cores // sharing[fact.machine]))
        env.update(extra_env or {})
        env.update(host.env)
        if bar and rank == 0:
            # tqdm takes the width from these two where it writes into a pipe.
            label = len(f"[{host.name} {sum(counts) - 1}] ")
            env.update(TANDEM_PROGRESS="bar", COLUMNS=str(max(20, bar - label)), LINES="24")
        argv = [host.env_python, "-m", "torch.distributed.launch"]
        argv += [f"--nnodes={len(hosts)}", f"--node_rank={rank}", f"--nproc_per_node={count}"]
        # The id is a part of the store's key prefix: a machine that wakes up late finds nothing of
        # its own there.
        argv += [f"--master_addr={master}", f"--master_port={port}", f"--rdzv_id={run}-{attempt}"]
        argv += [f"--monitor_interval={MONITOR_INTERVAL}", "-m", "trainer"]
        argv += ["--data", data, "--output", output, *options.trainer_args()]
        argv += ["--resume", "auto"] if attempt > 1 else []
        nodes.append(
            NodePlan(
                host=host.name,
                node_rank=rank,
                ranks=tuple(range(first, first + count)),
                connection=host.connection,
                address=host.address,
                port=host.port,
                user=host.user,
                interface=card,
                argv=tuple(argv),
                env=env,
                cwd=f"{folder}/code",
                output=output,
                data=data,
                versions=fact.versions,
            )
        )
        first += count
    return Plan(
        run=run,
        attempt=attempt,
        created_unix=unix,
        tandem=tandem,
        model=settings["model"],
        data=options.data,
        epochs=settings["epochs"],
        sync=settings["sync"],
        precision=settings["precision"],
        world_size=first,
        master_addr=master,
        master_port=port,
        code_sha256=code.sha256,
        git_revision=code.git_revision,
        git_diff=code.git_diff,
        options=options,
        nodes=tuple(nodes),
        predicted=predicted,
    )


def check_master(hosts: list[Host]) -> None:
    """Other machines cannot find node 0 at an address that means "this machine" on each of them."""
    address = ipaddress.ip_address(hosts[0].address)
    if address.is_loopback and any(
        host.address != hosts[0].address or not host.is_local for host in hosts[1:]
    ):
        if all(ipaddress.ip_address(host.address).is_loopback for host in hosts):
            return
        raise UserError(
            f"{hosts[0].name}: its address is {address}, which means on each other machine "
            "that machine itself: "
            f"give its address in the LAN as ansible_host."
        )


def environment(card: str | None, threads: int) -> dict[str, str]:
    """What the network libraries must know, since their own guess takes the wrong card with
    docker0 or a VPN."""
    env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", "NCCL_IB_DISABLE": "1"}
    if card:
        env["GLOO_SOCKET_IFNAME"] = card
        env["NCCL_SOCKET_IFNAME"] = "=" + card
    return env


def render(plan: Plan) -> str:
    """The plan as shell lines, one block a node, exactly as it is sent."""
    lines = [
        f"run {plan.run}, attempt {plan.attempt}: {len(plan.nodes)} nodes, "
        f"{plan.world_size} processes, "
        f"master {plan.master_addr} port {plan.master_port}",
        f"code {plan.code_sha256[:12]}",
    ]
    for node in plan.nodes:
        where = (
            "this machine"
            if node.connection == "local"
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
