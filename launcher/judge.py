"""Judges whether machines are fit for a run: it turns the answers that look.py got into a list of
problems. No function asks a machine or reads a file. The sentences are in problems.py, and
participants.py decides what a problem prevents.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from contract import layout
from contract.errors import UserError
from contract.machines import CLOCK_TOLERANCE
from contract.options import in_words_of_make
from contract.text import pluralize, seconds
from launcher.look import ControlFacts, DataSource, Listing, NodeFacts, OpenMachines, Unreached
from launcher.machines.engine import Host
from launcher.plan import devices
from launcher.problems import ALWAYS, Problem, Refused, merge_problems, problem
from launcher.program import Needs, Program

DISK_LOW = 1 << 30  # bytes free, below which a run is refused unless forced
DISK_FULL = 64 << 20  # bytes free, below which no run can train


def find_problems(machines: OpenMachines, needs: Needs, control: ControlFacts) -> list[Problem]:
    """Return everything that is wrong with these machines for this run, except the connections
    between them."""
    hosts, facts, program = machines.hosts, machines.facts, needs.program
    node_devices: dict[str, devices.NodeDevices] = {}
    findings = check_master_address(hosts)
    if control.disk_free < DISK_LOW:  # logs, records and checkpoints come to the control node
        code = "control-disk-full" if control.disk_free < 2 * DISK_FULL else "control-disk-low"
        findings.append(problem(code, free=control.disk_free >> 20))
    try:
        node_devices = devices.assign(hosts, facts, program)
    except Refused as refused:
        findings += refused.reasons
    # Each machine by itself. Ten machines with the same problem get one sentence.
    machine_problems: list[Problem] = []
    for host in hosts:
        node_facts = facts[host.name]
        # A machine may have GPUs that nobody has found: a driver that fails hides them, and if
        # `assign` refused, no machine has devices. Such a machine is judged as one that has GPUs.
        has_gpus = host.name not in node_devices or node_devices[host.name].kind == "cuda"
        may_have_gpus = has_gpus or bool(node_facts.gpus.error)
        on_gpus = may_have_gpus and devices.wants_gpus(host, program.device)
        machine_problems += _check_software(host, node_facts, on_gpus)
        machine_problems += check_data(host, node_facts, needs)
        machine_problems += _check_state(host, node_facts, needs.run, on_gpus)
    findings += merge_problems(machine_problems)
    # The machines compared with each other, and with the sources of their data.
    findings += [*compare_versions(machines), *compare_data(machines)]
    findings += merge_problems([*compare_with_sources(machines, control.sources)])
    # What the program imports, and its layer: the packages that are sent with it.
    if needs_layer(program, machines):
        findings += compare_pythons(machines)
    for host in hosts:
        # The layer builds on packages of the machine's environment, which may be other ones.
        differing = program.layer and program.layer.differs(facts[host.name].distributions)
        if differing:
            findings.append(problem("script-stack", host, lacks=", ".join(differing)))
    # A missing module never blocks: the launcher has read the program, not run it, and the program
    # may find its modules in another way.
    imports = []
    for host in hosts:
        missing = [name for name in program.modules if name in facts[host.name].missing]
        if missing:
            values = {"missing": ", ".join(missing), "python": host.env_python}
            imports.append(problem("imports", host, program=program.typed, **values))
    findings += merge_problems(imports)
    # For machines that cannot train, their precision would only add a second message.
    if not any(entry.blocks is ALWAYS for entry in findings):
        try:
            # Called for its error only; the ranks choose the precision again.
            devices.choose_precision(program, machines, needs.decided.get("precision"))
        except UserError as error:
            texts = map(in_words_of_make, error.problems)
            findings += [problem("precision", reason=text) for text in texts]
    return findings


def check_master_address(hosts: Sequence[Host]) -> list[Problem]:
    """Refuse a loopback address of node 0, which is torch's MASTER_ADDR: on every other machine it
    means that machine itself. If all addresses are loopback addresses, all nodes are on one PC."""
    addresses = [ipaddress.ip_address(host.address) for host in hosts]
    if not addresses or not addresses[0].is_loopback or all(ip.is_loopback for ip in addresses):
        return []
    return [problem("master-loopback", name=hosts[0].name, address=addresses[0])]


# ---- one machine by itself ----


def _check_software(host: Host, facts: NodeFacts, on_gpus: bool) -> Iterator[Problem]:
    """Name the first thing that a machine's software lacks: others may follow from it."""
    missing = [name for name in ("torch", "torchvision") if not getattr(facts.versions, name)]
    error = facts.gpus.error
    if missing:
        names = " and ".join(missing)
        yield problem("torch-missing", host, missing=names, python=host.env_python)
    elif error and on_gpus:
        # nvidia-smi says so if the driver was upgraded, but the old one is still loaded.
        code = "driver-upgraded" if "version mismatch" in error else "driver-fails"
        yield problem(code, host, error=error)
    elif not facts.toolkit:
        yield problem("toolkit-missing", host, folder=host.cuda_home)
    elif not facts.guard_python:
        yield problem("guard-python-missing", host, python=host.engine.guard_python)


def check_data(host: Host, facts: NodeFacts, needs: Needs) -> Iterator[Problem]:
    """Name why a machine's data folder is missing or is not a data set (contract/layout.py)."""
    folder, answer = host.data_path(needs.config.data), facts.data
    if folder and not answer.exists:
        # `others`: the data sets next to the missing folder.
        verb = "is" if len(answer.others) == 1 else "are"
        neighbours = f"; there {verb} {', '.join(answer.others)}" if answer.others else ""
        name, is_local = Path(folder).name, host.engine.is_local
        # Provisioning copies data to other machines only: on the control node the user puts the
        # data in place.
        hint = "" if is_local else " (data_sets in group_vars/all.yml copies them to the machines)"
        remedy = f"correct DATA, or put class folders into its folders train and val{hint}"
        if needs.program.data_kind == layout.FILES:
            entry = f"`data_sets: [{{name: {name}, kind: files}}]`"
            hint = f": {entry} in group_vars/all.yml copies data/{name} to the machines"
            remedy = f"correct DATA, or copy the folder{'' if is_local else hint}"
        elif name == "digits":  # the small data set that Tandem makes itself
            remedy = host.engine.data_hint
        elif name == "imagenet":
            remedy = (
                "`make imagenet SRC=<folder of its archives>` makes data/imagenet here, and `make "
                "provision` with imagenet in data_sets copies it to every machine, or mounts the "
                "disk that has it (docs/shares.md)"
            )
        yield problem("data-missing", host, folder=folder, others=neighbours, remedy=remedy)
    elif folder and answer.problem:
        yield problem("data-unfit", host, folder=folder, why=answer.problem)
    for listing in answer.splits.values():
        if listing.note:
            yield problem("data-note", host, note=listing.note)


def _check_state(host: Host, facts: NodeFacts, run: str | None, on_gpus: bool) -> Iterator[Problem]:
    """Judge a machine's folder, disk and clock, and who uses the machine. Processes of an earlier
    attempt of `run` do not make it busy."""
    folder = facts.absolute(host.node_dir)
    if not facts.writable:
        yield problem("not-writable", host, folder=folder)
    if facts.disk_free < DISK_LOW:
        code = "disk-full" if facts.disk_free < DISK_FULL else "disk-low"
        yield problem(code, host, free=facts.disk_free >> 20, folder=folder)
    if abs(facts.skew) > CLOCK_TOLERANCE:
        direction = "ahead of" if facts.skew > 0 else "behind"
        yield problem("clock", host, seconds=abs(facts.skew), way=direction)
    # Another run needs the processors, too; programs that are no run matter only on GPUs.
    other_runs = {
        f"{entry.holder}: run {entry.run}, for {seconds(entry.seconds)}"
        for entry in facts.runs
        if entry.run != run
    }
    if other_runs:
        yield problem("machine-busy", host, holders="; ".join(sorted(other_runs)))
    # If `run` itself still holds the machine, the processes on its GPUs may be those of `run`.
    elif not facts.runs and on_gpus and facts.gpus.processes:
        holders = [f"{job.user}: {job.command} (pid {job.pid})" for job in facts.gpus.processes]
        yield problem("gpus-busy", host, holders="; ".join(holders))


# ---- what the program imports ----


def needs_layer(program: Program, machines: OpenMachines) -> bool:
    """Return whether the program's packages have to be sent to these machines."""
    if program.requirements is None:
        return False
    # Machines that all have the module `unless_module` need no layer. If one machine lacks it, all
    # get the same version of it.
    name, facts = program.unless_module, machines.facts
    return name is None or any(name in facts[host.name].missing for host in machines.hosts)


# ---- machines compared with each other ----


def _list_differing(values: Mapping[str, str]) -> str:
    """Return `2.1 (node1, node2), 2.2 (node3)` for {machine: value}; "" if all are equal."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    texts = [f"{value} ({', '.join(hosts)})" for value, hosts in groups.items()]
    return ", ".join(texts) if len(texts) > 1 else ""


# What must be the same everywhere: a field of the machine's versions, and its name for people.
STACK = {"torch": "torch", "torchvision": "torchvision", "cuda": "torch's CUDA", "nccl": "NCCL"}


def compare_versions(machines: OpenMachines) -> list[Problem]:
    """Name differences in torch's stack, the processors' architectures and the drivers."""
    facts = {host.name: machines.facts[host.name] for host in machines.hosts}
    findings = []
    for name, label in STACK.items():
        versions_by_host = {host: str(getattr(f.versions, name)) for host, f in facts.items()}
        if values := _list_differing(versions_by_host):
            findings.append(problem("versions-differ", what=label, values=values))
    if values := _list_differing({host: f.architecture for host, f in facts.items()}):
        findings.append(problem("architectures-differ", values=values))
    # Only the branch counts: drivers of one branch run the same CUDA.
    drivers = {host: f.gpus.driver for host, f in facts.items() if f.gpus.driver}
    branches = {host: driver.partition(".")[0] for host, driver in drivers.items()}  # 535 of 535.86
    if values := _list_differing(branches):
        findings.append(problem("drivers-differ", values=values))
    return findings


def compare_pythons(machines: OpenMachines) -> list[Problem]:
    """Refuse machines whose Pythons differ: no layer fits them all."""
    values = _list_differing(
        {host.name: machines.facts[host.name].python for host in machines.hosts}
    )
    return [problem("python-differs", values=values)] if values else []


def compare_data(machines: OpenMachines) -> list[Problem]:
    """Name parts of the data that differ between machines."""
    findings = []
    # Data of the kind FILES have one listing, which has the name of the kind instead of a split's.
    for split in (*layout.SPLITS, layout.FILES):
        values = {}
        for host in machines.hosts:
            if listing := machines.facts[host.name].data.splits.get(split):
                # The hash shows a difference of which the sizes say nothing.
                values[host.name] = f"{_describe_size(listing)}, {listing.sha256[:8]}"
        if differing := _list_differing(values):
            # A script may want other files on each machine, such as shards.
            code = "files-differ" if split == layout.FILES else "data-differs"
            findings.append(problem(code, what=_describe_split(split), values=differing))
    return findings


def _describe_split(split: str) -> str:
    """Return what a listing is called in a sentence."""
    return "the data folder" if split == layout.FILES else f"the data's {split} folder"


def _describe_size(listing: Listing) -> str:
    """Return the size of a listing, for people."""
    if listing.classes:
        return f"{pluralize(listing.images, 'image')} in {pluralize(listing.classes, 'class')}"
    # Without classes it lists files of any kind, which count as `images`.
    return f"{pluralize(listing.images, 'file')} of {listing.bytes:,} bytes"


def compare_with_sources(
    machines: OpenMachines, sources: Mapping[str, DataSource]
) -> Iterator[Problem]:
    """Name machines whose data differ from their source: the folder that was copied to them, or the
    machine that shares its own."""
    for host in machines.hosts:
        if (source := sources.get(host.name)) is None:
            continue
        for split, listing in source.splits.items():
            # `check_data` reports a machine without this split.
            local = machines.facts[host.name].data.splits.get(split, listing)
            is_smaller = (
                local.images < listing.images
                or local.classes < listing.classes
                or local.bytes < listing.bytes  # in a folder of any files, one may be shorter
            )
            if is_smaller or local.sha256 != listing.sha256:
                values = {"own": _describe_size(local), "whole": _describe_size(listing)}
                kind = "copy" if source.is_copied else "share"
                code = f"{kind}-lacks" if is_smaller else f"{kind}-differs"
                yield problem(code, host, what=_describe_split(split), source=source.name, **values)


def name_unreachable_pairs(
    machines: OpenMachines, answers: Mapping[str, Sequence[Unreached] | str]
) -> Iterator[Problem]:
    """Name the pairs of machines that cannot connect. `answers`: by machine, the peers that it does
    not reach, or why it gave no answer (look.find_unreachable_peers)."""
    names = {host.address: host.name for host in machines.hosts}
    for host in machines.hosts:
        answer = answers.get(host.name, ())
        if isinstance(answer, str):
            yield problem("ways-unknown", host, why=answer)
            continue
        for peer in answer:
            target = {"peer": names[peer.address], "address": peer.address, "port": peer.port}
            yield problem("no-way", of=host.label(), why=peer.why, **target)
