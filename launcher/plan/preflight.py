"""Everything that can be wrong with machines, reported before anything is started or changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.errors import UserError
from contract.options import Options as TrainerOptions
from contract.split import refuse_batch
from contract.text import counted
from launcher import folders
from launcher.machines import connection, inventory, mesh, probe
from launcher.machines.engine import Host, Node
from launcher.machines.probe import Facts
from launcher.options import Options, in_words_of_make
from launcher.plan import code, devices, models
from launcher.plan.build import candidate_ports, check_master
from launcher.plan.problems import Problem, of_control, of_machine, together


@dataclass(frozen=True)
class Asked:
    """What the machines must be able to do. `run` is the run to resume, None for a new one."""

    options: Options
    settings: TrainerOptions
    run: str | None = None
    begun: bool = False  # the precision in `settings` is the one that the run began with


@dataclass
class Machines:
    """Open connections and what was found over them."""

    hosts: list[Host]
    nodes: dict[str, Node]
    facts: dict[str, Facts]

    def close(self) -> None:
        connection.close_all(self.nodes)


def select(hosts: list[Host], options: Options) -> list[Host]:
    """The first NODES hosts. Raises UserError."""
    if options.nodes is None:
        return hosts
    if options.nodes < 1:
        raise UserError(f"NODES={options.nodes}: a run needs at least one machine.")
    if options.nodes > len(hosts):
        raise UserError(
            f"NODES={options.nodes}, but {options.inventory} lists {len(hosts)} "
            f"({', '.join(host.name for host in hosts)}): add machines to [cluster] there, "
            f"or give NODES={len(hosts)} or less."
        )
    return hosts[: options.nodes]


def inspect(hosts: list[Host], asked: Asked, *, without_missing: bool = False) -> Machines:
    """Connect and probe. Raises UserError naming every machine that is not fit.

    With `without_missing`, machines that do not answer are left out instead.
    """
    check_master(hosts)
    nodes, failures = connection.open_all(hosts)
    try:
        if failures and not without_missing:
            raise UserError(*unreached(hosts, failures))
        present = [host for host in hosts if host.name in nodes]
        tasks = {host.name: _task(host, present, asked) for host in present}
        facts, silent = probe.ask_all(nodes, tasks)
        if silent and not without_missing:
            raise UserError(*silent.values())
        present = [host for host in present if host.name in facts]
        return Machines(present, nodes, facts)
    except BaseException:
        connection.close_all(nodes)
        raise


def unreached(hosts: list[Host], failures: dict[str, str]) -> list[str]:
    """What to say of machines that cannot be reached, by their names. Where none can, and they are
    those of the inventory as it comes, nobody has listed machines yet."""
    example = all(inventory.EXAMPLE.get(host.name) == host.address for host in hosts)
    if len(failures) < len(hosts) or not example:
        return list(failures.values())
    return [
        f"{', '.join(failures)}: these are the machines of the example, and none can be reached: "
        "list yours in the inventory, or give INVENTORY=examples/demo.ini, which has four nodes on "
        "this machine.",
        next(iter(failures.values())),
    ]


def _task(host: Host, hosts: list[Host], asked: Asked) -> dict[str, Any]:
    options, model = asked.options, asked.settings.model
    packages = models.imports(model)
    if ":" in model and not models.is_path(model):
        packages.append(model.partition(".")[0])
    peers = [other.address for other in hosts if other.name != host.name] or [host.address]
    return {
        "peers": list(dict.fromkeys(peers)),
        "ports": candidate_ports(options),
        "node_dir": host.node_dir,
        "guard_python": host.engine.guard_python,
        # One machine is enough: a torchvision that differs between machines is reported.
        "models": models.rule(model) if host is hosts[0] else None,
        "packages": [*packages, *(["tensorboard"] if asked.settings.tensorboard else [])],
        "paths": [f"{host.cuda_home}/bin"] if host.cuda_home else [],
        "data": host.data_path(options.data),
    }


def check(machines: Machines, asked: Asked) -> list[Problem]:
    """Everything that is wrong with these machines for this run."""
    parts, problems = _parts(machines, asked)
    problems += of_control(folders.disk_free())
    found: list[tuple[Host, Problem]] = []
    for host in machines.hosts:
        facts = machines.facts[host.name]
        wants = devices.wants_gpus(host, asked.settings.device)
        gets = host.name not in parts or parts[host.name].kind == "cuda"
        on_gpus = wants and (gets or bool(facts.gpus["error"]))
        found += [(host, one) for one in of_machine(host, facts, asked.run, on_gpus)]
    problems += together(found)
    problems += model(machines, asked)
    problems += _packages(machines, asked)
    problems += _equal_versions(machines)
    problems += _equal_data(machines)
    problems += _batch(machines, asked)
    if not any(problem.fatal for problem in problems):
        problems += _precision(parts, machines, asked)
    if not problems and len(machines.hosts) > 1:
        met = mesh.check(machines.hosts, machines.nodes, machines.facts)
        problems += [Problem(text) for text in met]
    return problems


def _parts(machines: Machines, asked: Asked) -> tuple[dict[str, devices.Part], list[Problem]]:
    """What each node computes on; nothing if that cannot be decided."""
    try:
        return devices.assign(machines.hosts, machines.facts, asked.settings), []
    except UserError as error:
        return {}, [Problem(text) for text in error.problems]


def _precision(parts: dict[str, Any], machines: Machines, asked: Asked) -> list[Problem]:
    try:
        devices.precision(parts, machines.hosts, machines.facts, asked.settings, asked.begun)
    except UserError as error:
        return [Problem(text) for text in error.problems]
    return []


def _batch(machines: Machines, asked: Asked) -> list[Problem]:
    """The first machine's data count: others that differ are reported."""
    facts = machines.facts[machines.hosts[0].name] if machines.hosts else None
    listing = facts.data["splits"].get("train") if facts else None
    if not listing:
        return []
    batch, typed = asked.settings.per_node_batch_size, asked.options.trainer
    try:
        refuse_batch(listing["images"], batch, len(machines.hosts))
    except UserError as error:
        return [Problem(in_words_of_make(str(error), typed))]
    return []


def _packages(machines: Machines, asked: Asked) -> list[Problem]:
    if not asked.settings.tensorboard:
        return []
    lacking = [h for h in machines.hosts if not machines.facts[h.name].packages["tensorboard"]]
    said = (
        "{}: --tensorboard, and the environment there has no tensorboard: `{} -m pip install "
        "tensorboard`, or leave the option out."
    )
    return together([(h, Problem(said.format(h.label(), h.env_python))) for h in lacking])


def model(machines: Machines, asked: Asked) -> list[Problem]:
    """Asks one machine alone for the name, since all have the same torchvision, or the difference
    is reported; and all for what one's own model imports."""
    if not machines.hosts:
        return []
    host, name = machines.hosts[0], asked.settings.model
    sent = code.current(models.folder(name)).names
    refusal = models.problem(name, host, machines.facts[host.name], sent)
    if refusal:
        return [Problem(refusal)]
    missing = [(one, models.lacking(name, one, machines.facts[one.name])) for one in machines.hosts]
    return together([(one, Problem(text)) for one, text in missing if text])


def refuse_or_warn(problems: list[Problem], force: bool) -> list[str]:
    """Raise UserError if the run must not start; return the warnings otherwise."""
    blocking = [problem.text for problem in problems if problem.fatal or not force]
    if blocking:
        soft = any(not problem.fatal for problem in problems)
        hard = any(problem.fatal for problem in problems)
        hint = ["(FORCE=1 starts anyway.)"] if soft and not hard else []
        raise UserError(*blocking, *hint)
    return [problem.text for problem in problems]


def _differing(values: dict[str, str]) -> str | None:
    """`2.1 (node1, node2), 2.2 (node3)` if there is more than one value."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    if len(groups) < 2:
        return None
    return ", ".join(f"{value} ({', '.join(hosts)})" for value, hosts in groups.items())


def _equal_versions(machines: Machines) -> list[Problem]:
    problems = []
    for name in ("torch", "torchvision", "cuda", "nccl"):
        values = {host: str(facts.versions.get(name)) for host, facts in machines.facts.items()}
        if apart := _differing(values):
            label = {"cuda": "torch's CUDA", "nccl": "NCCL"}.get(name, name)
            problems.append(
                Problem(
                    f"{label} differs between machines: {apart}: run `make provision`, so that all "
                    f"have the same stack."
                )
            )
    drivers = {
        host: facts.gpus["driver"].split(".")[0]
        for host, facts in machines.facts.items()
        if facts.gpus["driver"]
    }
    if apart := _differing(drivers):
        problems.append(
            Problem(
                f"the NVIDIA driver's branch differs: {apart}: run `make provision`.",
                fatal=False,
            )
        )
    return problems


def _equal_data(machines: Machines) -> list[Problem]:
    problems = []
    for split in ("train", "val"):
        values = {}
        for host, facts in machines.facts.items():
            listing = facts.data["splits"].get(split)
            if listing:
                values[host] = (
                    f"{counted(listing['images'], 'image')} in "
                    f"{counted(listing['classes'], 'class')}, "
                    f"{listing['sha256'][:8]}"
                )
        if apart := _differing(values):
            problems.append(
                Problem(
                    f"{split}/ of the data is not the same on all machines: {apart}: copy it anew "
                    f"(`make provision`)."
                )
            )
    return problems
