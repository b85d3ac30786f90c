"""Everything that can be wrong with machines, said before anything is started or changed."""

from __future__ import annotations

from dataclasses import dataclass

from launcher import connection, mesh, probe
from launcher.build import candidate_ports, check_master
from launcher.errors import UserError
from launcher.inventory import Host
from launcher.options import Options, data_path
from launcher.probe import Facts

CLOCK_SKEW = 5.0
DISK_FREE = 1 << 30


@dataclass(frozen=True)
class Problem:
    """One sentence; FORCE=1 goes on when it is not fatal."""

    text: str
    fatal: bool = True
    busy: bool = False


@dataclass
class Machines:
    """Open connections and what was found over them."""

    hosts: list[Host]
    nodes: dict
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


def look(hosts: list[Host], options: Options, *, without_missing=False) -> Machines:
    """Connect and probe. Raises UserError naming every machine that is not fit.

    With `without_missing` machines that do not answer are left out instead.
    """
    check_master(hosts)
    nodes, failures = connection.open_all(hosts)
    try:
        if failures and not without_missing:
            raise UserError(*failures.values())
        present = [host for host in hosts if host.name in nodes]
        tasks = {host.name: _task(host, present, options) for host in present}
        facts, silent = probe.ask_all(nodes, tasks)
        if silent and not without_missing:
            raise UserError(*silent.values())
        present = [host for host in present if host.name in facts]
        return Machines(present, nodes, facts)
    except BaseException:
        connection.close_all(nodes)
        raise


def _task(host: Host, hosts: list[Host], options: Options) -> dict:
    peers = [other.address for other in hosts if other.name != host.name] or [host.address]
    return {
        "peers": list(dict.fromkeys(peers)),
        "ports": candidate_ports(options),
        "node_dir": host.node_dir,
        "data": data_path(options.data, host.data_root, host.is_local, host.name),
    }


def check(machines: Machines, options: Options) -> list[Problem]:
    """All that is wrong with these machines for this run."""
    problems = []
    for host in machines.hosts:
        facts = machines.facts[host.name]
        problems += _software(host, facts)
        problems += _data(host, facts)
        problems += _state(host, facts)
    problems += _equal_versions(machines)
    problems += _equal_data(machines)
    if not problems and len(machines.hosts) > 1:
        met = mesh.check(machines.hosts, machines.nodes, machines.facts)
        problems += [Problem(text) for text in met]
    return problems


def judge(problems: list[Problem], force: bool) -> list[str]:
    """Raise UserError if the run must not start; return what is to be told anyway."""
    blocking = [problem.text for problem in problems if problem.fatal or not force]
    if blocking:
        soft = any(not problem.fatal for problem in problems)
        hard = any(problem.fatal for problem in problems)
        hint = ["(FORCE=1 starts nevertheless.)"] if soft and not hard else []
        raise UserError(*blocking, *hint)
    return [problem.text for problem in problems]


def _software(host: Host, facts: Facts) -> list[Problem]:
    remedy = "run `make env`" if host.is_local else "run `make provision`"
    missing = [name for name in ("torch", "torchvision") if not facts.versions.get(name)]
    if missing:
        return [
            Problem(
                f"{host.label()}: {' and '.join(missing)} missing in {host.env_python}: {remedy}."
            )
        ]
    if facts.gpus["error"]:
        return [
            Problem(
                f"{host.label()}: nvidia-smi fails ({facts.gpus['error']}): if the driver was "
                f"upgraded, reboot; else run `make provision`.",
            )
        ]
    if host.gpus and host.gpus > facts.gpus["count"]:
        return [
            Problem(
                f"{host.label()}: the inventory says gpus={host.gpus}, but nvidia-smi shows "
                f"{facts.gpus['count']}: correct the inventory."
            )
        ]
    if not host.is_local and not facts.rsync:
        return [Problem(f"{host.label()}: rsync is missing there: {remedy}.")]
    if not host.is_local and not facts.guard_python:
        return [Problem(f"{host.label()}: /usr/bin/python3 is missing there: {remedy}.")]
    return []


def _data(host: Host, facts: Facts) -> list[Problem]:
    data = facts.data
    where = f"{host.label()}: the data folder {data['path']}"
    if host.is_local:
        remedy = "`make data/digits` writes the digits; for your own images give DATA=<folder>"
    else:
        remedy = "`make provision` puts the digits there; for your own images give DATA=/<folder>"
    if not data["exists"]:
        return [Problem(f"{where} is missing: {remedy}.")]
    for split, listing in data["splits"].items():
        if listing is None or not listing["classes"] or not listing["images"]:
            missing = "no folder" if listing is None else "no class folders with images in"
            return [
                Problem(
                    f"{where} has {missing} {split}/: images belong into "
                    f"{split}/<class>/<image>: {remedy}."
                )
            ]
    return []


def _state(host: Host, facts: Facts) -> list[Problem]:
    problems = []
    if not facts.writable:
        problems.append(
            Problem(
                f"{host.label()}: {facts.absolute(host.node_dir)} cannot be written: give it to "
                f"the run user, or set node_dir."
            )
        )
    if facts.disk_free < DISK_FREE:
        problems.append(
            Problem(
                f"{host.label()}: only {facts.disk_free >> 20} MiB free where "
                f"{facts.absolute(host.node_dir)} lies: remove old runs there.",
                fatal=False,
            )
        )
    if abs(facts.skew) > CLOCK_SKEW:
        way = "ahead of" if facts.skew > 0 else "behind"
        problems.append(
            Problem(
                f"{host.label()}: its clock is {abs(facts.skew):.0f} s {way} this machine's: run "
                f"`make provision`, which sets up time.",
                fatal=False,
            )
        )
    if facts.gpus["holders"]:
        held = "; ".join(
            f"{h['user']}: {h['command']} (pid {h['pid']})" for h in facts.gpus["holders"]
        )
        problems.append(
            Problem(
                f"{host.label()}: its GPUs are in use by {held}: wait for it (QUEUE=1), or "
                "ask its owner.",
                fatal=False,
                busy=True,
            )
        )
    return problems


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
        if told := _differing(values):
            label = {"cuda": "torch's CUDA", "nccl": "NCCL"}.get(name, name)
            problems.append(
                Problem(
                    f"{label} differs between machines: {told}: run `make provision`, so that all "
                    f"have the same stack."
                )
            )
    drivers = {
        host: facts.gpus["driver"].split(".")[0]
        for host, facts in machines.facts.items()
        if facts.gpus["driver"]
    }
    if told := _differing(drivers):
        problems.append(
            Problem(
                f"the NVIDIA driver's branch differs: {told}: run `make provision`.", fatal=False
            )
        )
    return problems


def _equal_data(machines: Machines) -> list[Problem]:
    problems = []
    for split in ("train", "val"):
        values = {}
        for host, facts in machines.facts.items():
            listing = facts.data["splits"].get(split) if facts.data else None
            if listing:
                values[host] = (
                    f"{listing['images']} images in {listing['classes']} classes, "
                    f"{listing['sha256'][:8]}"
                )
        if told := _differing(values):
            problems.append(
                Problem(
                    f"{split}/ of the data is not the same on all machines: {told}: copy it anew "
                    f"(`make provision`)."
                )
            )
    return problems
