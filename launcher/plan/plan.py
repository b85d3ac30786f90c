"""Plans a run as plain values, from inventory, options and facts. Nothing here acts.

A dry run prints a Plan, the watch sends a Plan's argv and env to the guards, and plan.json is a
Plan.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from msgspec import structs

from boundary.answers import NodeFacts
from contract.decisions import Measurements, choose_balance, decide
from contract.options import Config
from contract.runs import folder_on_machine
from contract.text import pluralize
from launcher import judge
from launcher.look import FIRST_PORT, PORT_COUNT, OpenMachines
from launcher.machines import engine
from launcher.machines.engine import Host
from launcher.node.machine import PATH
from launcher.options import document
from launcher.plan import devices
from launcher.plan.code import LIBRARY, WORK, Code
from launcher.problems import Refused, problem
from launcher.program import DATA, LAST, Program
from tandem import __version__


@dataclass(frozen=True)
class NodePlan:
    """The part of a plan for one machine: the command for its guard, and its folders."""

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
    code: str
    cwd: str
    output: str
    data: str
    versions: dict[str, str | None]
    owner_signs: tuple[str, ...] = ()
    away_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One attempt of a run, or of a measurement (measure.py). `measured`: what the ranks decide by
    when they start. `check`: the command that runs on node 0 before any rank starts."""

    run: str
    attempt: int
    created_unix: float
    tandem: str
    data: str
    world_size: int
    master_addr: str
    master_port: int
    code_sha256: str
    git_revision: str | None
    git_diff: str
    options: Config
    nodes: tuple[NodePlan, ...]
    program: Program
    measured: Measurements | None = None
    check: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()  # sentences on the files of the user's folder

    def document(self) -> dict[str, Any]:
        """Return the plan as plan.json has it."""
        return {
            **vars(self),
            "nodes": [asdict(node) for node in self.nodes],
            "options": document(self.options),
            "program": self.program.facts(),
            "measured": self.measured.document() if self.measured else None,
        }

    @property
    def unit(self) -> str:
        """Return the attempt's name on the nodes, of letters, digits, - and _."""
        return f"{self.run}-{self.attempt}"


def render(plan: Plan, machines: OpenMachines) -> str:
    """Return the plan as shell lines, one block per node, exactly as it is sent."""
    program = plan.program
    lines = [
        f"run {plan.run}, attempt {plan.attempt}: {pluralize(len(plan.nodes), 'node')}, "
        f"{pluralize(plan.world_size, 'process')}, "
        f"master {plan.master_addr} port {plan.master_port}",
        f"code {plan.code_sha256[:12]}",
    ]
    # Then follow the files that are sent, the files that come back, and the ranks' decisions.
    if program.folder:
        lines += [f"folder {program.folder}", *plan.sent]
    if program.layer:
        packages = ", ".join(f"{name} {v}" for name, v in program.layer.packages.items())
        lines.append(f"packages: {packages or 'those of the environment'}")
    if program.runs_in_folder:
        outputs = ", ".join(program.outputs)
        outputs = outputs or "all that it writes next to its code (OUTPUT= names folders)"
        lines.append(f"comes back: {outputs}")
    if program.request and plan.measured:
        node_devices = devices.assign(machines.hosts, machines.facts, program).values()
        all_devices = [device for host_devices in node_devices for device in host_devices.devices]
        decided = decide(program.request, all_devices, plan.measured, {})
        lines += [
            f"precision {decided.precision.name}: {decided.precision.reason}",
            f"sync {decided.sync.sync}: {decided.sync.reason}",
        ]
    if plan.measured:
        balance = choose_balance(plan.measured)
        weights = ":".join(map(str, balance.weights.values())) or "equal"
        lines.append(f"balance {weights}: {balance.reason}")
    for node in plan.nodes:
        target = f"{node.user or 'you'}@{node.address} port {node.port}"
        target = "this machine" if engine.find_engine(node.connection).is_local else target
        ranks = ", ".join(map(str, node.ranks))
        head = f"# {node.host}: ranks {ranks}, {target}, card {node.interface or '-'}"
        lines += ["", head, shell_line(node)]
    return "\n".join(lines)


def shell_line(node: NodePlan) -> str:
    """Return `cd CWD && env NAME=value ... argv`, quoted for a POSIX shell."""
    variables = [f"{name}={value}" for name, value in sorted(node.env.items())]
    return f"cd {shlex.quote(node.cwd)} && env {shlex.join([*variables, *node.argv])}"


@dataclass(frozen=True)
class Request:
    """A request for a plan. `checkpoint`: the name of the one from which the attempt continues; ""
    if the program looks for it, None for a new beginning. `bar` is the width of the control
    terminal, 0 if there is none; `extra_env` goes into each rank's environment."""

    run: str
    unix: float
    options: Config
    program: Program
    code: Code
    attempt: int = 1
    used_ports: frozenset[int] = frozenset()
    bar: int = 0
    extra_env: dict[str, str] = field(default_factory=dict)
    measured: Measurements | None = None
    files: tuple[Code, ...] = ()  # those of the program, once they are here
    checkpoint: str | None = None


def build(hosts: list[Host], facts: dict[str, NodeFacts], request: Request) -> Plan:
    """Return the plan of one attempt. Raises Refused."""
    options, program, code = request.options, request.program, request.code
    leader, used_ports = facts[hosts[0].name], request.used_ports
    node_devices = devices.assign(hosts, facts, program)
    counts = [node_devices[host.name].processes for host in hosts]
    if problems := judge.master(hosts):
        raise Refused(problems)
    plan = Plan(
        run=request.run,
        attempt=request.attempt,
        created_unix=request.unix,
        tandem=__version__,
        data=options.data,
        world_size=sum(counts),
        master_addr=hosts[0].address,
        master_port=choose_port(leader, options.port, used_ports),
        code_sha256=code.sha256,
        git_revision=code.git_revision,
        git_diff=code.git_diff,
        options=options,
        nodes=(),
        program=program,
        measured=request.measured,
        sent=tuple(code.files.lines()) if program.folder else (),
    )
    port = str(rank_port(leader, options.port, used_ports)) if program.needs_port else ""
    on_machine: Counter[str] = Counter()  # several nodes may share a machine, and so its cores
    for host in hosts:
        on_machine[facts[host.name].machine] += node_devices[host.name].processes
    nodes: list[NodePlan] = []
    for rank, host in enumerate(hosts):
        host_facts, host_devices = facts[host.name], node_devices[host.name]
        folder = host_facts.absolute(host.node_dir)
        code_folder, output = f"{folder}/{code.folder}", folder_on_machine(folder, plan.run)
        data = host.data_path(plan.data)
        interface_name = interface(host, host_facts)
        threads = max(1, host_facts.cores // on_machine[host_facts.machine])
        env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if not host.engine.in_job:  # only clusters with a queue have InfiniBand
            env["NCCL_IB_DISABLE"] = "1"
        if host.cuda_home:
            # What is compiled during a run needs the toolkit. LD_LIBRARY_PATH is never set: torch
            # finds its libraries by itself, and would find others with it.
            path = os.environ.get("PATH", PATH) if host.engine.in_job else PATH
            env.update(CUDA_HOME=host.cuda_home, PATH=f"{host.cuda_home}/bin:{path}")
        if interface_name:  # libraries guess the wrong one on machines with docker0 or a VPN
            env.update(GLOO_SOCKET_IFNAME=interface_name, NCCL_SOCKET_IFNAME=f"={interface_name}")
        # run_env overrides what stands above; the names of the GPUs were computed from it.
        env.update({**request.extra_env, **host.env, **host_devices.environment(host.env)})
        # What differs from machine to machine, for every program.
        env.update(TANDEM_OUTPUT=output, TANDEM_DEVICE=host_devices.kind)
        env.update({"TANDEM_DATA": data} if data else {})
        env.update({"TANDEM_RANK_PORT": port} if port else {})
        for file, sent in zip(program.files, request.files):
            env[file.variable] = f"{folder}/{sent.folder}/{sent.names[0]}"
        env.update(program.env)
        cwd = f"{output}/{WORK}/{host.name}" if program.runs_in_folder else code_folder
        paths = [cwd, f"{code_folder}/{LIBRARY}"] if program.runs_in_folder else []
        if program.layer:
            paths.append(f"{folder}/{program.layer.folder}")
        if paths:
            env["PYTHONPATH"] = ":".join([*paths, *filter(None, [env.get("PYTHONPATH")])])
        if request.bar and rank == 0:
            # tqdm takes its width from these if it writes into a pipe. The launcher prints a label
            # before the bar, and a terminal may wrap a line that fills it.
            label = f"[{host.name} {plan.world_size - 1}] "
            columns = max(20, request.bar - len(label) - 1)
            env.update(TANDEM_PROGRESS="bar", COLUMNS=str(columns), LINES="24")
        checkpoint = request.checkpoint
        resume = () if checkpoint is None else program.resume or ()
        words = [*program.words, *(word.replace(LAST, checkpoint or "") for word in resume)]
        words = [word.replace(DATA, data) if data else word for word in words]
        place = (len(hosts), rank, host_devices.processes, plan.master_addr, plan.master_port)
        first_rank = sum(len(node.ranks) for node in nodes)
        nodes.append(
            NodePlan(
                host=host.name,
                node_rank=rank,
                ranks=tuple(range(first_rank, first_rank + host_devices.processes)),
                connection=host.connection,
                address=host.address,
                port=host.port,
                user=host.user,
                interface=interface_name,
                argv=(host.env_python, *launch(*place, plan.unit), *words),
                env=env,
                code=code_folder,
                cwd=cwd,
                output=output,
                data=data,
                versions=structs.asdict(host_facts.versions),
                owner_signs=host.owner.signs,
                away_dir=host.owner.away_dir if host.owner.signs else "",
            )
        )
        if rank == 0 and program.check:
            check = [word.replace(DATA, data) if data else word for word in program.check]
            plan = replace(plan, check=(host.env_python, *check))
    return replace(plan, nodes=tuple(nodes))


def launch(
    nodes: int, rank: int, processes: int, master_addr: str, master_port: int, name: str
) -> list[str]:
    """Return the words that follow the name of the Python. `name`: the attempt's."""
    # It is part of the prefix of the store's keys, so a process of an earlier attempt that wakes up
    # late finds none of its keys.
    return [
        *("-m", "torch.distributed.launch"),
        *(f"--nnodes={nodes}", f"--node_rank={rank}", f"--nproc_per_node={processes}"),
        *(f"--master_addr={master_addr}", f"--master_port={master_port}"),
        # Older agents check on their workers every 5 s.
        *(f"--rdzv_id={name}", "--monitor_interval=0.1"),
    ]


def choose_port(facts: NodeFacts, typed: int | None, avoid: Collection[int]) -> int:
    """Return a free port on node 0. Raises Refused if the `typed` one is taken."""
    if typed is not None and typed not in facts.free_ports:
        raise Refused([problem("port-taken", name=facts.host, port=typed)])
    free = [port for port in facts.free_ports if port not in avoid]
    if not free:
        end = FIRST_PORT + PORT_COUNT - 1
        raise Refused([problem("no-port", name=facts.host, first=FIRST_PORT, last=end)])
    # A later attempt cannot have the typed port again (Attempts.ports).
    return typed if typed is not None and typed not in avoid else free[0]


def rank_port(facts: NodeFacts, typed: int | None, used: Collection[int]) -> int:
    """Return the port of the store that the ranks make, besides launch's. Raises Refused."""
    avoided = {*used, choose_port(facts, typed, used)}
    free = [port for port in facts.free_ports if port not in avoided]
    # Each attempt takes another port: a machine of an earlier attempt that was frozen must not
    # find the store.
    return free[-1 - len(used) % len(free)] if free else choose_port(facts, None, avoided)


def interface(host: Host, facts: NodeFacts) -> str | None:
    """Return the network interface that leads to the peers. Raises Refused if several do."""
    if host.interface:
        return host.interface
    # A rank uses one interface for all of its peers.
    names = {name for name in facts.interfaces.values() if name}
    if len(names) > 1:
        ways = ", ".join(f"{peer} by {name}" for peer, name in facts.interfaces.items())
        raise Refused([problem("several-cards", name=host.name, ways=ways)])
    return names.pop() if names else None
