"""Everything that can be wrong with machines, reported before anything is started or changed."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from contract.errors import UserError
from contract.options import Config
from contract.options import Options as TrainerOptions
from contract.split import refuse_batch
from contract.text import counted
from launcher import folders
from launcher.machines import engine, inventory, probe
from launcher.machines.engine import Host, Node
from launcher.machines.probe import Facts
from launcher.options import in_words_of_make
from launcher.plan import code, devices, models
from launcher.plan import layer as layers
from launcher.plan.layer import Environment, Layer
from launcher.plan.plan import candidate_ports, check_master
from launcher.plan.problems import Problem, control_problems, machine_problems, together
from launcher.plan.script import Script


@dataclass(frozen=True)
class Requirements:
    """What the machines must be able to do. `run` is the run to resume, None for a new one."""

    options: Config
    settings: TrainerOptions | Script
    run: str | None = None
    begun: bool = False  # the precision in `settings` is the one that the run began with

    @property
    def subject(self) -> str:
        """What is trained, by a name."""
        settings = self.settings
        return settings.name if isinstance(settings, Script) else settings.model


@dataclass
class OpenMachines:
    """Open connections and what was found over them."""

    hosts: list[Host]
    nodes: dict[str, Node]
    facts: dict[str, Facts]

    def close(self) -> None:
        engine.close_all(self.nodes)

    def leave(self, names: Collection[str]) -> None:
        """Go on without these machines."""
        engine.close_all({name: self.nodes[name] for name in names if name in self.nodes})
        for name in names:
            self.nodes.pop(name, None)
            self.facts.pop(name, None)
        self.hosts = [host for host in self.hosts if host.name not in names]


def inspect(
    hosts: list[Host], asked: Requirements, *, without_missing: bool = False
) -> OpenMachines:
    """Connect and probe. Raises UserError naming every machine that is not fit.

    With `without_missing`, machines that do not answer are left out instead.
    """
    check_master(hosts)
    nodes, failures = engine.open_all(hosts)
    try:
        if failures and not without_missing:
            raise UserError(*unreached(hosts, failures))
        present = [host for host in hosts if host.name in nodes]
        tasks = {host.name: _task(host, present, asked) for host in present}
        facts, silent = probe.ask_all(nodes, tasks)
        if silent and not without_missing:
            raise UserError(*silent.values())
        present = [host for host in present if host.name in facts]
        return OpenMachines(present, nodes, facts)
    except BaseException:
        engine.close_all(nodes)
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


def _task(host: Host, hosts: list[Host], asked: Requirements) -> dict[str, Any]:
    options, settings = asked.options, asked.settings
    peers = [other.address for other in hosts if other.name != host.name] or [host.address]
    return {
        "peers": list(dict.fromkeys(peers)),
        "ports": candidate_ports(options),
        "node_dir": host.node_dir,
        "guard_python": host.engine.guard_python,
        # One machine is enough: a torchvision that differs between machines is reported.
        "models": _rule(asked) if host is hosts[0] else None,
        "packages": _packages(asked),
        "distributions": isinstance(settings, Script) and settings.requirements is not None,
        "paths": [f"{host.cuda_home}/bin"] if host.cuda_home else [],
        "data": host.data_path(options.data),
    }


def _rule(asked: Requirements) -> str | None:
    return None if isinstance(asked.settings, Script) else models.rule(asked.settings.model)


def _packages(asked: Requirements) -> list[str]:
    """What is to be imported in the machine's environment, which is asked for it."""
    settings = asked.settings
    if isinstance(settings, Script):
        return [*settings.imports]
    model = settings.model
    packages = models.packages(model)
    if ":" in model and not models.is_path(model):
        packages.append(model.partition(".")[0])
    return packages


def check(machines: OpenMachines, asked: Requirements) -> list[Problem]:
    """Everything that is wrong with these machines for this run."""
    parts, problems = _parts(machines, asked)
    problems += control_problems(folders.disk_free())
    found: list[tuple[Host, Problem]] = []
    for host in machines.hosts:
        facts = machines.facts[host.name]
        wants = devices.wants_gpus(host, asked.settings.device)
        gets = host.name not in parts or parts[host.name].kind == "cuda"
        on_gpus = wants and (gets or bool(facts.gpus["error"]))
        found += [(host, one) for one in machine_problems(host, facts, asked.run, on_gpus)]
    problems += together(found)
    problems += _equal_versions(machines)
    if isinstance(asked.settings, Script):
        problems += _imports(machines, asked.settings)
    else:
        problems += _of_trainer(machines, asked.settings, asked)
        if not any(problem.fatal for problem in problems):
            problems += _precision(parts, machines, asked.settings, asked.begun)
    if not problems and len(machines.hosts) > 1:
        met = probe.check_ways(machines.hosts, machines.nodes, machines.facts)
        problems += [Problem(text) for text in met]
    return problems


def alone(host: Host, machines: OpenMachines, asked: Requirements) -> list[Problem]:
    """Everything that is wrong with one of the machines by itself."""
    return check(
        OpenMachines([host], machines.nodes, {host.name: machines.facts[host.name]}), asked
    )


def apart(machines: OpenMachines, asked: Requirements) -> list[Problem]:
    """What keeps machines, each of which is fit, from training together; nothing is started on
    them to find that out."""
    found = _equal_versions(machines)
    if not isinstance(asked.settings, Script):
        found += _equal_data(machines)
    return [problem for problem in found if problem.fatal]


def _parts(
    machines: OpenMachines, asked: Requirements
) -> tuple[dict[str, devices.NodeDevices], list[Problem]]:
    """What each node computes on; nothing if that cannot be decided."""
    try:
        return devices.assign(machines.hosts, machines.facts, asked.settings), []
    except UserError as error:
        return {}, [Problem(text) for text in error.problems]


def environment_of(machines: OpenMachines) -> Environment:
    """What a script's packages have to fit. Raises UserError."""
    facts = [machines.facts[host.name] for host in machines.hosts]
    minors = {one.host: ".".join(str(one.versions["python"]).split(".")[:2]) for one in facts}
    if found := _differing(minors):
        raise UserError(
            f"Python differs between machines: {found}, so the script's packages would, too: run "
            "`make provision`, so that all have the same stack."
        )
    glibc = min(one.glibc for one in facts)
    return Environment.of(str(facts[0].versions["python"]), glibc, facts[0].distributions)


def layer_of(machines: OpenMachines, script: Script) -> Layer | None:
    """The layer of a script's packages for these machines. Raises UserError."""
    if script.requirements is None or not machines.hosts:
        return None
    layer = layers.of(script.requirements, environment_of(machines))
    apart = [
        (host, layer.differs(machines.facts[host.name].distributions)) for host in machines.hosts
    ]
    if lacking := [f"{host.label()}: {', '.join(lacks)}" for host, lacks in apart if lacks]:
        raise UserError(
            *(
                f"{one} is missing in the environment there, or there in another version, and the "
                "script's packages need it: run `make provision`, so that all have the same stack."
                for one in lacking
            )
        )
    return layer


def _imports(machines: OpenMachines, script: Script) -> list[Problem]:
    """What the script imports, and neither its layer nor a machine's environment has."""
    try:
        layer = layer_of(machines, script)
    except UserError as error:
        return [Problem(text) for text in error.problems]
    own, found = layer.modules() if layer else set(), []
    if script.broken and any(map(_reads_no_more, machines.facts.values())):
        return [Problem(f"SCRIPT={script.words[-1]}: {script.broken[0]}: correct it.")]
    for host in machines.hosts:
        there = machines.facts[host.name].packages
        missing = [name for name in script.imports if not there.get(name) and name not in own]
        if missing:
            text = (
                f"{host.label()}: SCRIPT={script.words[-1]} imports {', '.join(missing)}, missing "
                "in the environment there: name it in requirements.txt beside the script, or by "
                "REQUIREMENTS= (some packages have another name than what they are imported by)."
            )
            found.append((host, Problem(text)))
    return together(found)


def _reads_no_more(facts: Facts) -> bool:
    """Whether its Python is not newer than ours, by which the script was read."""
    minor = re.match(r"(\d{1,4})\.(\d{1,4})", str(facts.versions["python"]))
    return minor is None or (int(minor[1]), int(minor[2])) <= sys.version_info[:2]


def _of_trainer(
    machines: OpenMachines, settings: TrainerOptions, asked: Requirements
) -> list[Problem]:
    """What the trainer would refuse."""
    found = model(machines, settings.model)
    return [*found, *_equal_data(machines), *_batch(machines, settings)]


def _precision(
    parts: dict[str, Any], machines: OpenMachines, settings: TrainerOptions, begun: bool
) -> list[Problem]:
    try:
        devices.precision(parts, machines.hosts, machines.facts, settings, begun)
    except UserError as error:
        return [Problem(text) for text in error.problems]
    return []


def _batch(machines: OpenMachines, settings: TrainerOptions) -> list[Problem]:
    """The first machine's data count: others that differ are reported."""
    facts = machines.facts[machines.hosts[0].name] if machines.hosts else None
    listing = facts.data["splits"].get("train") if facts else None
    if not listing:
        return []
    try:
        refuse_batch(listing["images"], settings.per_node_batch_size, len(machines.hosts))
    except UserError as error:
        return [Problem(in_words_of_make(str(error)))]
    return []


def model(machines: OpenMachines, name: str) -> list[Problem]:
    """Asks one machine alone for the name, since all have the same torchvision, or the difference
    is reported; and all for what one's own model imports."""
    if not machines.hosts:
        return []
    host = machines.hosts[0]
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


def _equal_versions(machines: OpenMachines) -> list[Problem]:
    problems = []
    for name in ("torch", "torchvision", "cuda", "nccl"):
        values = {host: str(facts.versions.get(name)) for host, facts in machines.facts.items()}
        if found := _differing(values):
            label = {"cuda": "torch's CUDA", "nccl": "NCCL"}.get(name, name)
            problems.append(
                Problem(
                    f"{label} differs between machines: {found}: run `make provision`, so that all "
                    f"have the same stack."
                )
            )
    drivers = {
        host: facts.gpus["driver"].split(".")[0]
        for host, facts in machines.facts.items()
        if facts.gpus["driver"]
    }
    if found := _differing(drivers):
        problems.append(
            Problem(
                f"the NVIDIA driver's branch differs: {found}: run `make provision`.",
                fatal=False,
            )
        )
    return problems


def _equal_data(machines: OpenMachines) -> list[Problem]:
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
        if found := _differing(values):
            problems.append(
                Problem(
                    f"{split}/ of the data is not the same on all machines: {found}: copy it anew "
                    f"(`make provision`)."
                )
            )
    return problems
