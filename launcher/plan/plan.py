"""What a run will do, as plain values made from inventory, options and facts; nothing here acts.

A dry run prints a Plan, the watch sends a Plan's argv and env to the guards, and plan.json is a
Plan.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contract import split
from contract.options import Config
from contract.options import Options as TrainerOptions
from contract.text import counted
from launcher import __version__, judge
from launcher.look import FIRST_PORT, PORTS, Facts
from launcher.machines import engine
from launcher.machines.engine import Host
from launcher.node import job
from launcher.options import document, for_trainer
from launcher.plan import devices, models
from launcher.plan.balance import OFF, Balance
from launcher.plan.code import LIBRARY, OWN, Code
from launcher.plan.devices import NodeDevices
from launcher.plan.layer import FOLDER
from launcher.plan.script import WORK, Script
from launcher.problems import Refused, problem

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
class Plan:
    """One attempt of a run, or of a measurement, in which each machine is a run of its own.
    `balance`: each machine's weight, where a step's images are not divided equally. Of a `script`
    (Script.document) nothing is known of what concerns the trainer."""

    run: str
    attempt: int
    created_unix: float
    tandem: str
    model: str | None
    data: str
    epochs: int | None
    sync: str | None
    precision: str | None
    world_size: int
    master_addr: str
    master_port: int
    code_sha256: str
    git_revision: str | None
    git_diff: str
    options: Config
    nodes: tuple[NodePlan, ...]
    precision_why: str = AS_ASKED
    sync_why: str = AS_ASKED
    balance: dict[str, int] = field(default_factory=dict)
    balance_why: str = Balance.why
    predicted: dict[str, Any] | None = None
    script: dict[str, Any] | None = None

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "options": document(self.options)}

    @property
    def unit(self) -> str:
        """The attempt's name on the nodes, of letters, digits, - and _."""
        return f"{self.run}-{self.attempt}"

    @property
    def own_folder(self) -> Path | None:
        """What is sent beside the checkout's own code."""
        return Path(self.script["folder"]) if self.script else models.folder(self.model or "")


def render(plan: Plan) -> str:
    """The plan as shell lines, one block per node, exactly as it is sent."""
    lines = [
        f"run {plan.run}, attempt {plan.attempt}: {counted(len(plan.nodes), 'node')}, "
        f"{counted(plan.world_size, 'process')}, "
        f"master {plan.master_addr} port {plan.master_port}",
        f"code {plan.code_sha256[:12]}",
    ]
    if plan.script:
        lines += script_lines(plan.script)
    else:
        lines.append(f"precision {plan.precision}: {plan.precision_why}")
        lines.append(f"sync {plan.sync}: {plan.sync_why}")
        lines.append(f"balance {balance(plan)}: {plan.balance_why}")
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


def balance(plan: Plan) -> str:
    """The weights of its machines, as BALANCE= takes them; `off` for equal parts."""
    return ":".join(map(str, plan.balance.values())) or OFF


def script_lines(script: dict[str, Any]) -> list[str]:
    """What is sent, and what comes back."""
    back = ", ".join(script["outputs"]) or "nothing but records: OUTPUT= names folders"
    packages = ", ".join(f"{name} {version}" for name, version in script["packages"].items())
    return [
        f"script {shlex.join(script['words'])}, with {script['folder']}",
        f"packages: {packages or 'those of the environment'}",
        f"comes back: {back}",
    ]


def shell_line(node: NodePlan) -> str:
    """`cd CWD && env NAME=value ... argv`, quoted for a POSIX shell."""
    variables = [f"{name}={value}" for name, value in sorted(node.env.items())]
    return f"cd {shlex.quote(node.cwd)} && env {shlex.join([*variables, *node.argv])}"


@dataclass(frozen=True)
class Request:
    """Which attempt a plan is for. A later attempt continues from the newest checkpoint that any of
    its machines holds: the trainer finds and distributes it.

    Both `why`s are a clause on what was decided before. `bar` is the width of
    the control terminal, 0 where there is none; `predicted` is what `make plan` said;
    `instruction_limits` go into each rank's environment. `independent`: each machine is a world
    of its own, and `timetables` (measure.py) say how it measures its links beforehand. `last` is
    the newest checkpoint of a script, below its folder.
    """

    run: str
    unix: float
    attempt: int = 1
    used_ports: frozenset[int] = frozenset()
    bar: int = 0
    extra_env: dict[str, str] = field(default_factory=dict)
    instruction_limits: dict[str, str] = field(default_factory=dict)
    predicted: dict[str, Any] | None = None
    precision_why: str = AS_ASKED
    sync_why: str = AS_ASKED
    balance: Balance = field(default_factory=Balance)
    independent: bool = False
    timetables: dict[str, dict[str, Any]] = field(default_factory=dict)
    last: str | None = None


@dataclass(frozen=True)
class Shared:
    """What all nodes of an attempt have in common. In a measurement, whose nodes share only the
    code, `own_ports` holds each one's port by name."""

    request: Request
    options: Config
    master_addr: str
    master_port: int
    ranks_per_node: tuple[int, ...]
    parts: dict[str, NodeDevices]
    own_ports: dict[str, int]
    weights: tuple[int, ...]  # of the nodes; none for equal parts
    settings: TrainerOptions | Script
    code: str  # its folder below node_dir


def build(
    hosts: list[Host],
    facts: dict[str, Facts],
    options: Config,
    settings: TrainerOptions | Script,
    code: Code,
    request: Request,
) -> Plan:
    """The plan of one attempt; `settings` is what the trainer makes of the options, its device and
    precision decided, or the script in its place. Raises Refused."""
    parts = devices.assign(hosts, facts, settings)
    counts = tuple(parts[host.name].processes for host in hosts)
    if wrong := judge.master(hosts):
        raise Refused(wrong)
    if isinstance(settings, Script):
        known = _of_script(settings)
    else:
        check_batch([host.name for host in hosts], counts, settings.per_node_batch_size)
        known = _of_trainer(settings, request)
    port = choose_port(facts[hosts[0].name], options.port, set(request.used_ports))
    own_ports = _own_ports(hosts, facts) if request.independent else {}
    weights = () if request.independent else request.balance.of(hosts)
    address = hosts[0].address
    shared = Shared(
        *(request, options, address, port, counts, parts, own_ports, weights, settings),
        code=code.folder,
    )
    return Plan(
        run=request.run,
        attempt=request.attempt,
        created_unix=request.unix,
        tandem=__version__,
        data=options.data,
        world_size=sum(counts),
        master_addr=shared.master_addr,
        master_port=port,
        code_sha256=code.sha256,
        git_revision=code.git_revision,
        git_diff=code.git_diff,
        options=options,
        nodes=tuple(_nodes(hosts, facts, shared)),
        balance={host.name: weight for host, weight in zip(hosts, weights)},
        balance_why=request.balance.why,
        predicted=request.predicted,
        **known,
    )


def _of_trainer(settings: TrainerOptions, request: Request) -> dict[str, Any]:
    """The fields of a Plan that concern the trainer."""
    return {
        "model": settings.model,
        "epochs": settings.epochs,
        "sync": settings.sync,
        "sync_why": request.sync_why,
        "precision": settings.precision,
        "precision_why": request.precision_why,
    }


def _of_script(script: Script) -> dict[str, Any]:
    return {**dict.fromkeys(("model", "epochs", "sync", "precision")), "script": script.document()}


def _own_ports(hosts: list[Host], facts: dict[str, Facts]) -> dict[str, int]:
    """A free port for each machine's own rendezvous. Raises UserError."""
    ports: dict[str, int] = {}
    for host in hosts:
        here = facts[host.name].machine
        taken = {port for name, port in ports.items() if facts[name].machine == here}
        ports[host.name] = choose_port(facts[host.name], None, taken)
    return ports


def _nodes(hosts: list[Host], facts: dict[str, Facts], shared: Shared) -> list[NodePlan]:
    on_machine: Counter[str] = Counter()  # several nodes may share a machine, and so its cores
    for host, count in zip(hosts, shared.ranks_per_node):
        on_machine[facts[host.name].machine] += count
    return [
        _node(rank, host, facts[host.name], on_machine[facts[host.name].machine], shared)
        for rank, host in enumerate(hosts)
    ]


def _node(rank: int, host: Host, fact: Facts, on_machine: int, shared: Shared) -> NodePlan:
    """One node's part of the plan; `on_machine` processes share the machine's cores."""
    folder, part = fact.absolute(host.node_dir), shared.parts[host.name]
    output = f"{folder}/runs/{shared.request.run}"
    data = host.data_path(shared.options.data)
    card = interface(host, fact)
    env = job.environment(card, max(1, fact.cores // on_machine), host.cuda_home)
    request = shared.request
    if isinstance(shared.settings, TrainerOptions) and models.folder(shared.settings.model):
        env["TANDEM_MODEL_FOLDER"] = OWN
    env.update({**request.instruction_limits, **request.extra_env, **host.env})
    env.update(part.environment(host.env))
    before = []
    if host.name in request.timetables:
        env["TANDEM_LINKS"] = json.dumps(request.timetables[host.name])
        figures = f"{output}/nodes/{host.name}/links.json"
        before = [host.env_python, "-m", "launcher.node.prepare", "links", figures]
    if isinstance(shared.settings, Script):
        before = _script(shared.settings, host, folder, shared.code, output, env)
    if request.bar and rank == 0:
        env.update(_bar(request.bar, f"[{host.name} {sum(shared.ranks_per_node) - 1}] "))
    first = 0 if shared.own_ports else sum(shared.ranks_per_node[:rank])
    return NodePlan(
        host=host.name,
        node_rank=rank,
        ranks=tuple(range(first, first + shared.ranks_per_node[rank])),
        connection=host.connection,
        address=host.address,
        port=host.port,
        user=host.user,
        interface=card,
        argv=(*before, *_launch(rank, host, shared), *_program(data, output, shared, part)),
        env=env,
        cwd=f"{folder}/{shared.code}",
        output=output,
        data=data,
        versions=asdict(fact.versions),
        owner_signs=host.owner.signs,
        away_dir=host.owner.away_dir if host.owner.signs else "",
    )


def _script(
    script: Script, host: Host, folder: str, code: str, output: str, env: dict[str, str]
) -> list[str]:
    """The words before the launch of a script of one's own, and to `env` what it finds there."""
    work, sent = f"{output}/{WORK}/{host.name}", f"{folder}/{code}/{OWN}"
    layer = f"{folder}/{FOLDER}/{script.layer.key}" if script.layer else ""
    paths = [work, f"{folder}/{code}/{LIBRARY}", layer, env.get("PYTHONPATH", "")]
    env.update(script.environment(), TANDEM_OUTPUT=output)
    env["PYTHONPATH"] = ":".join(filter(None, paths))
    return [host.env_python, "-m", "launcher.node.prepare", "folder", sent, work]


def _bar(columns: int, label: str) -> dict[str, str]:
    """For a bar in so many columns behind a label: tqdm takes the width from these where it writes
    into a pipe. One column stays free, since a terminal may wrap a line that fills it."""
    width = max(20, columns - len(label) - 1)
    return {"TANDEM_PROGRESS": "bar", "COLUMNS": str(width), "LINES": "24"}


def _launch(rank: int, host: Host, shared: Shared) -> list[str]:
    counts, request = shared.ranks_per_node, shared.request
    name = f"{request.run}-{request.attempt}"
    place = (len(counts), rank, counts[rank], shared.master_addr, shared.master_port)
    if shared.own_ports:
        place = (1, 0, counts[rank], host.address, shared.own_ports[host.name])
    return [host.env_python, *job.launch(*place, name)]


def _program(data: str, output: str, shared: Shared, part: NodeDevices) -> list[str]:
    """What launch starts, with its arguments."""
    if isinstance(shared.settings, Script):
        return ["--use_env", *shared.settings.argv(shared.request.last)]
    given: dict[str, Any] = {"data": data} if data else {}
    given.update(output=output, **for_trainer(shared.options))
    given["device"] = part.kind
    if shared.weights:
        given["balance"] = shared.weights
    if shared.request.attempt > 1:
        given["resume"] = "auto"
    return ["-m", "trainer", "--config", json.dumps(given)]


def check_batch(names: Sequence[str], counts: Sequence[int], per_node: int) -> None:
    """Raises Refused for a batch that the trainer could not split over `counts` ranks a node."""
    least = split.least_batch(counts)
    if per_node < least:
        name, count = max(zip(names, counts), key=lambda pair: pair[1])
        processes = f"{count} processes" if count > 1 else "one process"
        about = {"batch": per_node, "least": least, "smallest": split.SMALLEST}
        raise Refused([problem("batch-small", name=name, processes=processes, **about)])


def choose_port(facts: Facts, wanted: int | None, avoid: set[int]) -> int:
    """A free port on node 0. Raises Refused when the one that was asked for is taken."""
    if wanted is not None and wanted not in facts.free_ports:
        raise Refused([problem("port-taken", name=facts.host, port=wanted)])
    free = [port for port in facts.free_ports if port not in avoid]
    if not free:
        last = FIRST_PORT + PORTS - 1
        raise Refused([problem("no-port", name=facts.host, first=FIRST_PORT, last=last)])
    return wanted if wanted is not None and wanted not in avoid else free[0]


def interface(host: Host, facts: Facts) -> str | None:
    """The card that leads to the peers. Raises Refused if several cards do."""
    if host.interface:
        return host.interface
    cards = {card for card in facts.interfaces.values() if card}
    if len(cards) > 1:
        ways = ", ".join(f"{peer} by {card}" for peer, card in facts.interfaces.items())
        raise Refused([problem("several-cards", name=host.name, ways=ways)])
    return cards.pop() if cards else None
