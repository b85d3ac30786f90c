"""What a run will do, as plain values made from inventory, options and facts; nothing here acts.

A dry run prints a Plan, the watch sends a Plan's argv and env to the guards, and plan.json is a
Plan.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from msgspec import structs

from boundary.answers import NodeFacts
from contract import split
from contract.options import Config
from contract.runs import folder_on_machine
from contract.text import pluralize
from launcher import judge
from launcher.look import FIRST_PORT, PORT_COUNT
from launcher.machines import engine
from launcher.machines.engine import Host
from launcher.node.machine import PATH
from launcher.options import document
from launcher.plan import devices
from launcher.plan.balance import Balance
from launcher.plan.code import Code
from launcher.plan.devices import NodeDevices
from launcher.problems import Refused, problem
from tandem import __version__

AS_ASKED = "as asked"  # why a precision or a strategy was taken


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
    owner_signs: tuple[str, ...] = ()
    away_dir: str = ""


@dataclass(frozen=True)
class NodePart:
    """One machine's part in a plan, as far as it is known before its command. Paths are absolute
    ones there, but for `code`, which lies below `node_dir`."""

    host: Host
    device: str
    node_dir: str
    code: str
    output: str
    data: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Command:
    """What a guard starts: `before` precedes the Python that runs torch's launcher, `program`
    follows that launcher's own arguments, and `env` is added to the environment."""

    program: Sequence[str]
    before: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Planned(Protocol):
    """What a plan and its guards ask of a workload (launcher/workload.py)."""

    is_trainer: bool

    @property
    def device(self) -> str: ...
    @property
    def parallel(self) -> str: ...
    def plan_fields(
        self,
        config: Config,
        hosts: Sequence[Host],
        counts: Sequence[int],
        first: NodeFacts,
        used_ports: Collection[int],
    ) -> dict[str, Any]: ...
    def plan_lines(self, plan: Plan) -> list[str]: ...
    def command(self, plan: Plan, part: NodePart, last: str | None) -> Command: ...
    def when_stopped(self, seconds: int) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One attempt of a run, or of a measurement (measure.py). What only its workload knows has
    defaults: `balance` is each machine's weight, where a step's images are not divided equally."""

    run: str
    attempt: int
    created_unix: float
    tandem: str
    model: str | None = None
    data: str
    epochs: int | None = None
    sync: str | None = None
    precision: str | None = None
    world_size: int
    master_addr: str
    master_port: int
    code_sha256: str
    git_revision: str | None
    git_diff: str
    options: Config
    nodes: tuple[NodePlan, ...]
    workload: Planned
    precision_why: str = AS_ASKED
    sync_why: str = AS_ASKED
    balance: dict[str, int] = field(default_factory=dict)
    balance_why: str = Balance.why
    predicted: dict[str, Any] | None = None
    script: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        """As plan.json has it: the values, without the workload that they come from."""
        values = {name: value for name, value in vars(self).items() if name != "workload"}
        nodes = [asdict(node) for node in self.nodes]
        return {**values, "nodes": nodes, "options": document(self.options)}

    @property
    def unit(self) -> str:
        """The attempt's name on the nodes, of letters, digits, - and _."""
        return f"{self.run}-{self.attempt}"


def render(plan: Plan) -> str:
    """The plan as shell lines, one block per node, exactly as it is sent."""
    lines = [
        f"run {plan.run}, attempt {plan.attempt}: {pluralize(len(plan.nodes), 'node')}, "
        f"{pluralize(plan.world_size, 'process')}, "
        f"master {plan.master_addr} port {plan.master_port}",
        f"code {plan.code_sha256[:12]}",
        *plan.workload.plan_lines(plan),
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


@dataclass(frozen=True)
class Request:
    """What a plan is for. `workload`: with all that is decided. `last`: the checkpoint that was
    found for this attempt (Workload.find_checkpoint). `bar` is the width of the control terminal, 0
    where there is none; `extra_env` goes into each rank's environment."""

    run: str
    unix: float
    options: Config
    workload: Planned
    code: Code
    attempt: int = 1
    used_ports: frozenset[int] = frozenset()
    bar: int = 0
    extra_env: dict[str, str] = field(default_factory=dict)
    last: str | None = None


def build(hosts: list[Host], facts: dict[str, NodeFacts], request: Request) -> Plan:
    """The plan of one attempt. Raises Refused."""
    options, workload, code = request.options, request.workload, request.code
    first, used = facts[hosts[0].name], request.used_ports
    parts = devices.assign(hosts, facts, workload)
    counts = [parts[host.name].processes for host in hosts]
    if wrong := judge.master(hosts):
        raise Refused(wrong)
    plan = Plan(
        run=request.run,
        attempt=request.attempt,
        created_unix=request.unix,
        tandem=__version__,
        data=options.data,
        world_size=sum(counts),
        master_addr=hosts[0].address,
        master_port=choose_port(first, options.port, used),
        code_sha256=code.sha256,
        git_revision=code.git_revision,
        git_diff=code.git_diff,
        options=options,
        nodes=(),
        workload=workload,
        **workload.plan_fields(options, hosts, counts, first, used),
    )
    return replace(plan, nodes=tuple(_nodes(hosts, facts, plan, request, parts)))


def _nodes(
    hosts: list[Host],
    facts: dict[str, NodeFacts],
    plan: Plan,
    request: Request,
    parts: dict[str, NodeDevices],
) -> Iterator[NodePlan]:
    """The machines' parts of a plan."""
    on_machine: Counter[str] = Counter()  # several nodes may share a machine, and so its cores
    for host in hosts:
        on_machine[facts[host.name].machine] += parts[host.name].processes
    first = 0
    for rank, host in enumerate(hosts):
        own, part = facts[host.name], parts[host.name]
        place = (len(hosts), rank, part.processes, plan.master_addr, plan.master_port)
        threads = max(1, own.cores // on_machine[own.machine])
        env = _environment(host, interface(host, own), threads)
        yield _node(host, own, part, plan, request, rank, first, place, env)
        first += part.processes


def _node(
    host: Host,
    own: NodeFacts,
    part: NodeDevices,
    plan: Plan,
    request: Request,
    rank: int,
    first: int,
    place: tuple[int, int, int, str, int],
    env: dict[str, str],
) -> NodePlan:
    """One node's part; `first` is its first rank, `place` launch's arguments."""
    folder, code = own.absolute(host.node_dir), request.code.folder
    output, data = folder_on_machine(folder, plan.run), host.data_path(plan.data)
    env.update({**request.extra_env, **host.env, **part.environment(host.env)})
    known = NodePart(host, part.kind, folder, code, output, data, env)
    command = plan.workload.command(plan, known, request.last)
    env.update(command.env)
    if request.bar and rank == 0:
        env.update(_bar(request.bar, f"[{host.name} {plan.world_size - 1}] "))
    launcher = [host.env_python, *launch(*place, plan.unit)]
    return NodePlan(
        host=host.name,
        node_rank=rank,
        ranks=tuple(range(first, first + part.processes)),
        connection=host.connection,
        address=host.address,
        port=host.port,
        user=host.user,
        interface=interface(host, own),
        argv=(*command.before, *launcher, *command.program),
        env=env,
        cwd=f"{folder}/{code}",
        output=output,
        data=data,
        versions=structs.asdict(own.versions),
        owner_signs=host.owner.signs,
        away_dir=host.owner.away_dir if host.owner.signs else "",
    )


def _bar(columns: int, label: str) -> dict[str, str]:
    """For a bar in so many columns behind a label: tqdm takes the width from these where it writes
    into a pipe. One column stays free, since a terminal may wrap a line that fills it."""
    width = max(20, columns - len(label) - 1)
    return {"TANDEM_PROGRESS": "bar", "COLUMNS": str(width), "LINES": "24"}


def launch(
    nodes: int, rank: int, processes: int, master_addr: str, master_port: int, name: str
) -> list[str]:
    """What follows the name of the Python. `name` is part of the prefix of the store's keys, so a
    process of an earlier attempt that wakes up late finds nothing of its own there."""
    return [
        *("-m", "torch.distributed.launch"),
        *(f"--nnodes={nodes}", f"--node_rank={rank}", f"--nproc_per_node={processes}"),
        *(f"--master_addr={master_addr}", f"--master_port={master_port}"),
        # Older agents check on their workers every 5 s.
        *(f"--rdzv_id={name}", "--monitor_interval=0.1"),
    ]


def _environment(host: Host, card: str | None, threads: int) -> dict[str, str]:
    """What the network libraries must know, since they guess the wrong card where there is docker0
    or a VPN; and where the CUDA toolkit is, for what is compiled during a run. InfiniBand is for
    clusters with a queue alone.

    Never LD_LIBRARY_PATH: torch finds its libraries by itself, and would find others with it.
    """
    env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if not host.engine.in_job:
        env["NCCL_IB_DISABLE"] = "1"
    if host.cuda_home:
        path = os.environ.get("PATH", PATH) if host.engine.in_job else PATH
        env.update(CUDA_HOME=host.cuda_home, PATH=f"{host.cuda_home}/bin:{path}")
    if card:
        env.update(GLOO_SOCKET_IFNAME=card, NCCL_SOCKET_IFNAME=f"={card}")
    return env


def check_batch(names: Sequence[str], counts: Sequence[int], per_node: int) -> None:
    """Raises Refused for a batch that the trainer could not split over `counts` ranks a node."""
    least = split.least_batch(counts)
    if per_node < least:
        name, count = max(zip(names, counts), key=lambda pair: pair[1])
        processes = f"{count} processes" if count > 1 else "one process"
        about = {"batch": per_node, "least": least, "smallest": split.SMALLEST}
        raise Refused([problem("batch-small", name=name, processes=processes, **about)])


def choose_port(facts: NodeFacts, wanted: int | None, avoid: Collection[int]) -> int:
    """A free port on node 0. Raises Refused when the one that was asked for is taken."""
    if wanted is not None and wanted not in facts.free_ports:
        raise Refused([problem("port-taken", name=facts.host, port=wanted)])
    free = [port for port in facts.free_ports if port not in avoid]
    if not free:
        last = FIRST_PORT + PORT_COUNT - 1
        raise Refused([problem("no-port", name=facts.host, first=FIRST_PORT, last=last)])
    return wanted if wanted is not None and wanted not in avoid else free[0]


def rank_port(facts: NodeFacts, wanted: int | None, used: Collection[int]) -> int:
    """The port at which ranks meet that make a store of their own, beside launch's. Each attempt,
    which has used one more of these, takes another: a machine that thaws must not find it. Raises
    Refused."""
    own = choose_port(facts, wanted, used)
    free = [port for port in facts.free_ports if port not in {*used, own}]
    return free[-1 - len(used) % len(free)] if free else choose_port(facts, None, {*used, own})


def interface(host: Host, facts: NodeFacts) -> str | None:
    """The card that leads to the peers. Raises Refused if several cards do."""
    if host.interface:
        return host.interface
    cards = {card for card in facts.interfaces.values() if card}
    if len(cards) > 1:
        ways = ", ".join(f"{peer} by {card}" for peer, card in facts.interfaces.items())
        raise Refused([problem("several-cards", name=host.name, ways=ways)])
    return cards.pop() if cards else None
