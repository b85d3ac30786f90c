"""Plans an attempt as plain values, from inventory, options and facts. Nothing here acts.

checks.py calls `build`. A dry run prints the Plan (`render`), plan.json records it, and guards.py
sends its argv and env to the guards.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable
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
    """Describes the part of a plan for one node: the command for its guard, and its folders."""

    host: str
    node_rank: int
    ranks: tuple[int, ...]
    connection: str  # such as ssh or local; engine.find_engine has all kinds
    address: str
    port: int  # of the ssh server
    user: str | None
    interface: str | None
    argv: tuple[str, ...]  # torch.distributed.launch with the program
    env: dict[str, str]
    # Folders on the node: the sent code, the ranks' working folder, the run's files, the data.
    code: str
    cwd: str
    output: str
    data: str
    versions: dict[str, str | None]  # of Python, torch and so on
    # The signs of an owner for which the guard looks, and the folder of `tandem away` (owned.py).
    owner_signs: tuple[str, ...] = ()
    away_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Describes one attempt of a run, or of a measurement (measure.py)."""

    run: str
    attempt: int
    created_unix: float
    tandem: str  # the version of Tandem
    data: str  # as the user typed it: a name below data_root, or a path
    world_size: int
    master_addr: str
    master_port: int
    code_sha256: str
    git_revision: str | None
    git_diff: str
    options: Config
    nodes: tuple[NodePlan, ...]
    program: Program
    measured: Measurements | None = None  # by which the ranks decide options when they start
    check: tuple[str, ...] = ()  # a command that runs on node 0 before any rank starts
    sent: tuple[str, ...] = ()  # lines about sent and unsent files of the user's folder

    def document(self) -> dict[str, Any]:
        """Return the plan as it is written to plan.json."""
        return {
            **vars(self),
            "nodes": [asdict(node) for node in self.nodes],
            "options": document(self.options),
            "program": self.program.facts(),
            "measured": self.measured.document() if self.measured else None,
        }

    @property
    def unit(self) -> str:
        """The attempt's name on the nodes; it has only letters, digits, - and _."""
        return f"{self.run}-{self.attempt}"


def render(plan: Plan, machines: OpenMachines) -> str:
    """Return the plan for a dry run: a summary, and for each node a line that a POSIX shell could
    run, with exactly the argv and env that its guard gets."""
    program = plan.program
    lines = [
        f"run {plan.run}, attempt {plan.attempt}: {pluralize(len(plan.nodes), 'node')}, "
        f"{pluralize(plan.world_size, 'process')}, "
        f"master {plan.master_addr} port {plan.master_port}",
        f"code {plan.code_sha256[:12]}",
    ]
    # Files that are sent to the machines, and files that come back.
    if program.folder:
        lines += [f"folder {program.folder}", *plan.sent]
    if program.layer:
        versions = program.layer.packages.items()
        packages = ", ".join(f"{name} {version}" for name, version in versions)
        lines.append(f"packages: {packages or 'those of the environment'}")
    if program.runs_in_folder:
        outputs = ", ".join(program.outputs)
        outputs = outputs or "all that it writes next to its code (OUTPUT= names folders)"
        lines.append(f"comes back: {outputs}")
    # Decisions that the ranks will make. A dry run continues from no checkpoint, which could have
    # decisions of its own.
    if program.request and plan.measured:
        node_devices = devices.assign(machines.hosts, machines.facts, program).values()
        all_devices = [device for host_devices in node_devices for device in host_devices.devices]
        decided = decide(program.request, all_devices, plan.measured, stored={})
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
        variables = [f"{name}={value}" for name, value in sorted(node.env.items())]
        command = f"cd {shlex.quote(node.cwd)} && env {shlex.join([*variables, *node.argv])}"
        lines += ["", head, command]
    return "\n".join(lines)


@dataclass(frozen=True)
class PlanRequest:
    """Holds what `build` needs besides the machines. `checkpoint`: the name of the checkpoint from
    which the attempt continues; "" if the program itself finds it, None for a new run."""

    run: str
    unix: float  # the time now
    options: Config
    program: Program
    code: Code
    attempt: int = 1
    used_ports: frozenset[int] = frozenset()  # master ports of earlier attempts
    columns: int = 0  # of the control node's terminal, for a progress bar; 0: no terminal
    extra_env: dict[str, str] = field(default_factory=dict)  # for each rank
    measured: Measurements | None = None
    files: tuple[Code, ...] = ()  # to send; in the order of program.files
    checkpoint: str | None = None


def build(hosts: list[Host], facts: dict[str, NodeFacts], request: PlanRequest) -> Plan:
    """Return the plan of one attempt. Raises UserError."""
    options, program, code = request.options, request.program, request.code
    leader, used_ports = facts[hosts[0].name], request.used_ports
    node_devices = devices.assign(hosts, facts, program)
    if problems := judge.check_master_address(hosts):
        raise Refused(problems)

    def fill_data(words: Iterable[str], data: str) -> list[str]:
        """Replace the placeholder DATA by the folder of the data, if the program has data."""
        return [word.replace(DATA, data) if data else word for word in words]

    check = fill_data(program.check, hosts[0].data_path(options.data))
    plan = Plan(
        run=request.run,
        attempt=request.attempt,
        created_unix=request.unix,
        tandem=__version__,
        data=options.data,
        world_size=sum(node_devices[host.name].processes for host in hosts),
        master_addr=hosts[0].address,
        master_port=choose_port(leader, options.port, used_ports),
        code_sha256=code.sha256,
        git_revision=code.git_revision,
        git_diff=code.git_diff,
        options=options,
        nodes=(),  # the loop below makes them
        program=program,
        measured=request.measured,
        check=(hosts[0].env_python, *check) if check else (),
        sent=tuple(code.files.lines()) if program.folder else (),
    )
    rank_port = choose_rank_port(leader, options.port, used_ports) if program.needs_port else None
    # Several nodes may be one machine. Their ranks share its cores.
    machine_ranks: Counter[str] = Counter()
    for host in hosts:
        machine_ranks[facts[host.name].machine] += node_devices[host.name].processes
    nodes: list[NodePlan] = []
    for node_rank, host in enumerate(hosts):
        host_facts, host_devices = facts[host.name], node_devices[host.name]
        folder = host_facts.absolute(host.node_dir)
        code_folder, output = f"{folder}/{code.folder}", folder_on_machine(folder, plan.run)
        data = host.data_path(plan.data)
        interface = choose_interface(host, host_facts)
        threads = max(1, host_facts.cores // machine_ranks[host_facts.machine])
        env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        if not host.engine.in_job:  # only clusters with a queue have InfiniBand
            env["NCCL_IB_DISABLE"] = "1"
        if host.cuda_home:
            # Extensions that are compiled during a run need the toolkit. LD_LIBRARY_PATH is never
            # set, because torch would then load the toolkit's libraries instead of its own.
            # In a job of a queue, ranks get the job's environment, so they keep its PATH.
            path = os.environ.get("PATH", PATH) if host.engine.in_job else PATH
            env.update(CUDA_HOME=host.cuda_home, PATH=f"{host.cuda_home}/bin:{path}")
        # Gloo and NCCL guess the wrong interface on machines with docker0 or a VPN. For NCCL, `=`
        # means exactly this name.
        if interface:
            env.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
        # run_env of the inventory (host.env) overrides the variables above. The names of the GPUs
        # come last: devices.py has computed them from run_env.
        env.update({**request.extra_env, **host.env, **host_devices.environment(host.env)})
        # Every program gets the folders and the devices of its machine in these variables.
        env.update(TANDEM_OUTPUT=output, TANDEM_DEVICE=host_devices.kind)
        env.update({"TANDEM_DATA": data} if data else {})
        env.update({"TANDEM_RANK_PORT": str(rank_port)} if rank_port else {})
        for file, sent_file in zip(program.files, request.files):
            env[file.variable] = f"{folder}/{sent_file.folder}/{sent_file.names[0]}"
        env.update(program.env)
        # A script may write next to its code, so it runs in a copy (guards.lay_out).
        cwd = f"{output}/{WORK}/{host.name}" if program.runs_in_folder else code_folder
        paths = [cwd, f"{code_folder}/{LIBRARY}"] if program.runs_in_folder else []
        if program.layer:
            paths.append(f"{folder}/{program.layer.folder}")
        if paths:
            env["PYTHONPATH"] = ":".join([*paths, *filter(None, [env.get("PYTHONPATH")])])
        if request.columns and node_rank == 0:
            # The trainer's bar is as wide as COLUMNS (trainer/screen.py). Older versions of tqdm,
            # in scripts, read COLUMNS only if LINES is set, too. The launcher prints a label before
            # the bar, as wide as the label of the last rank (lines.py). One column stays free: a
            # terminal may wrap a full line.
            label = f"[{host.name} {plan.world_size - 1}] "
            columns = max(20, request.columns - len(label) - 1)
            env.update(TANDEM_PROGRESS="bar", COLUMNS=str(columns), LINES="24")
        checkpoint = request.checkpoint
        resume = () if checkpoint is None else program.resume or ()
        # LAST is a placeholder for the checkpoint's name in the words of RESUME_ARGS.
        words = [*program.words, *(word.replace(LAST, checkpoint or "") for word in resume)]
        first_rank = sum(len(node.ranks) for node in nodes)
        launch = [
            "-m",
            "torch.distributed.launch",
            f"--nnodes={len(hosts)}",
            f"--node_rank={node_rank}",
            f"--nproc_per_node={host_devices.processes}",
            f"--master_addr={plan.master_addr}",
            f"--master_port={plan.master_port}",
            # The id is part of all keys in the store. A process of an earlier attempt that wakes up
            # late finds none of its keys.
            f"--rdzv_id={plan.unit}",
            "--monitor_interval=0.1",  # older versions of launch check their workers every 5 s
        ]
        nodes.append(
            NodePlan(
                host=host.name,
                node_rank=node_rank,
                ranks=tuple(range(first_rank, first_rank + host_devices.processes)),
                connection=host.connection,
                address=host.address,
                port=host.port,
                user=host.user,
                interface=interface,
                argv=(host.env_python, *launch, *fill_data(words, data)),
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
    return replace(plan, nodes=tuple(nodes))


def choose_port(facts: NodeFacts, typed: int | None, used_ports: Collection[int]) -> int:
    """Return a free port on node 0: the `typed` port, or another one if an attempt has used the
    typed port. Raises Refused if another program uses the typed port, or if no port is free."""
    if typed is not None and typed not in facts.free_ports:
        raise Refused([problem("port-taken", name=facts.host, port=typed)])
    free_ports = [port for port in facts.free_ports if port not in used_ports]
    if not free_ports:
        end = FIRST_PORT + PORT_COUNT - 1
        raise Refused([problem("no-port", name=facts.host, first=FIRST_PORT, last=end)])
    # A later attempt must not use the typed port again (Attempts.used_ports).
    return typed if typed is not None and typed not in used_ports else free_ports[0]


def choose_rank_port(facts: NodeFacts, typed: int | None, used_ports: Collection[int]) -> int:
    """Return a free port on node 0 for the ranks' store; the store of launch already has the port
    of `choose_port`. Raises Refused if there is no other free port."""
    avoided_ports = {*used_ports, choose_port(facts, typed, used_ports)}
    free_ports = [port for port in facts.free_ports if port not in avoided_ports]
    if not free_ports:
        return choose_port(facts, None, avoided_ports)  # which raises Refused
    # Ranks on a machine that was frozen must not find the store of a later attempt. So attempt
    # number n takes the n-th port from the end, and master ports come from the beginning.
    attempts_before = len(used_ports)
    return free_ports[-1 - attempts_before % len(free_ports)]


def choose_interface(host: Host, facts: NodeFacts) -> str | None:
    """Return the network interface through which a node reaches its peers; None if it is unknown,
    or without peers. Raises Refused if different peers need different interfaces."""
    if host.interface:  # the inventory names it
        return host.interface
    # Gloo and NCCL use one interface for all peers. facts.interfaces is {peer: interface}.
    names = {name for name in facts.interfaces.values() if name}
    if len(names) > 1:
        ways = ", ".join(f"{peer} by {name}" for peer, name in facts.interfaces.items())
        raise Refused([problem("several-cards", name=host.name, ways=ways)])
    return names.pop() if names else None
