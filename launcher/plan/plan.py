"""What a run will do, as plain values made from inventory, options and facts; nothing here acts.

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
from contract.decisions import Measurements, decide
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
    """One machine's part: what its guard is told to run, and where its code is."""

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
        """As plan.json has it."""
        return {
            **vars(self),
            "nodes": [asdict(node) for node in self.nodes],
            "options": document(self.options),
            "program": self.program.facts(),
            "measured": self.measured.document() if self.measured else None,
        }

    @property
    def unit(self) -> str:
        """The attempt's name on the nodes, of letters, digits, - and _."""
        return f"{self.run}-{self.attempt}"


def render(plan: Plan, machines: OpenMachines) -> str:
    """The plan as shell lines, one block per node, exactly as it is sent."""
    lines = [
        f"run {plan.run}, attempt {plan.attempt}: {pluralize(len(plan.nodes), 'node')}, "
        f"{pluralize(plan.world_size, 'process')}, "
        f"master {plan.master_addr} port {plan.master_port}",
        f"code {plan.code_sha256[:12]}",
        *program_lines(plan, machines),
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


def program_lines(plan: Plan, machines: OpenMachines) -> list[str]:
    """What is sent, what comes back, and what the ranks will decide when they start."""
    program, lines = plan.program, []
    if program.folder:
        lines += [f"folder {program.folder}", *plan.sent]
    if program.layer:
        packages = ", ".join(f"{name} {v}" for name, v in program.layer.packages.items())
        lines.append(f"packages: {packages or 'those of the environment'}")
    if program.runs_in_folder:
        back = ", ".join(program.outputs)
        lines.append(
            f"comes back: {back or 'what it writes beside its code (OUTPUT= names folders)'}"
        )
    if program.request and plan.measured:
        parts = devices.assign(machines.hosts, machines.facts, program).values()
        found = [device for part in parts for device in part.devices]
        decided = decide(program.request, found, plan.measured, {})
        weights = ":".join(map(str, decided.balance.weights.values())) or "equal"
        lines += [
            f"precision {decided.precision.name}: {decided.precision.why}",
            f"sync {decided.sync.sync}: {decided.sync.why}",
            f"balance {weights}: {decided.balance.why}",
        ]
    return lines


def shell_line(node: NodePlan) -> str:
    """`cd CWD && env NAME=value ... argv`, quoted for a POSIX shell."""
    variables = [f"{name}={value}" for name, value in sorted(node.env.items())]
    return f"cd {shlex.quote(node.cwd)} && env {shlex.join([*variables, *node.argv])}"


@dataclass(frozen=True)
class Request:
    """What a plan is for. `last`: the name of the checkpoint that the attempt continues from; "" if
    the program finds it by itself, None for a new beginning. `bar` is the width of the control
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
    last: str | None = None


def build(hosts: list[Host], facts: dict[str, NodeFacts], request: Request) -> Plan:
    """The plan of one attempt. Raises Refused."""
    options, program, code = request.options, request.program, request.code
    first, used = facts[hosts[0].name], request.used_ports
    parts = devices.assign(hosts, facts, program)
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
        program=program,
        measured=request.measured,
        sent=tuple(code.files.lines()) if program.folder else (),
    )
    port = str(rank_port(first, options.port, used)) if program.needs_port else ""
    on_machine: Counter[str] = Counter()  # several nodes may share a machine, and so its cores
    for host in hosts:
        on_machine[facts[host.name].machine] += parts[host.name].processes
    nodes: list[NodePlan] = []
    for rank, host in enumerate(hosts):
        known, part = facts[host.name], parts[host.name]
        folder = known.absolute(host.node_dir)
        code_folder, output = f"{folder}/{code.folder}", folder_on_machine(folder, plan.run)
        data = host.data_path(plan.data)
        threads = max(1, known.cores // on_machine[known.machine])
        env = _environment(host, interface(host, known), threads)
        env.update({**request.extra_env, **host.env, **part.environment(host.env)})
        # What differs from machine to machine, for every program.
        env.update(TANDEM_OUTPUT=output, TANDEM_DEVICE=part.kind)
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
            env.update(_bar(request.bar, f"[{host.name} {plan.world_size - 1}] "))
        resume = () if request.last is None else program.resume or ()
        words = [*program.words, *(word.replace(LAST, request.last or "") for word in resume)]
        words = [word.replace(DATA, data) if data else word for word in words]
        place = (len(hosts), rank, part.processes, plan.master_addr, plan.master_port)
        first_rank = sum(len(node.ranks) for node in nodes)
        nodes.append(
            NodePlan(
                host=host.name,
                node_rank=rank,
                ranks=tuple(range(first_rank, first_rank + part.processes)),
                connection=host.connection,
                address=host.address,
                port=host.port,
                user=host.user,
                interface=interface(host, known),
                argv=(host.env_python, *launch(*place, plan.unit), *words),
                env=env,
                code=code_folder,
                cwd=cwd,
                output=output,
                data=data,
                versions=structs.asdict(known.versions),
                owner_signs=host.owner.signs,
                away_dir=host.owner.away_dir if host.owner.signs else "",
            )
        )
        if rank == 0 and program.check:
            check = [word.replace(DATA, data) if data else word for word in program.check]
            plan = replace(plan, check=(host.env_python, *check))
    return replace(plan, nodes=tuple(nodes))


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
