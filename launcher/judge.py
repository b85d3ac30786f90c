"""What is wrong with machines for a run: from their answers to a list of problems. Nothing here
asks a machine or reads a file."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contract import layout
from contract.errors import UserError
from contract.machines import CLOCK_TOLERANCE
from contract.options import in_words_of_make
from contract.text import pluralize, seconds
from launcher.look import (
    Control,
    Listing,
    NodeFacts,
    OpenMachines,
    Source,
    Unreached,
)
from launcher.machines.engine import Host
from launcher.plan import devices
from launcher.problems import ALWAYS, Problem, Refused, problem, together
from launcher.program import Needs, Program

if TYPE_CHECKING:
    from launcher.plan.layer import Layer

DISK_FREE = 1 << 30
DISK_FULL = 64 << 20  # nothing can be trained here


def problems(machines: OpenMachines, needs: Needs, control: Control) -> list[Problem]:
    """Everything that is wrong with these machines for this run, except the connections between
    them."""
    hosts, facts, program = machines.hosts, machines.facts, needs.program
    parts: dict[str, devices.NodeDevices] = {}
    wrong = [*master(hosts), *of_control(control.disk_free)]
    try:
        parts = devices.assign(hosts, facts, program)
    except Refused as refused:
        wrong += refused.reasons
    for_all = []
    for host in hosts:
        own = facts[host.name]
        gets = host.name not in parts or parts[host.name].kind == "cuda"
        on_gpus = devices.wants_gpus(host, program.device) and (gets or bool(own.gpus.error))
        for_all += [*_software(host, own, on_gpus), *data(host, own, needs)]
        for_all += [*_state(host, own), *_busy(host, own, needs.run, on_gpus)]
    wrong += [*together(for_all), *versions(machines)]
    wrong += [*same_data(machines), *together([*missing_data(machines, control.sources)])]
    if needs_layer(program, machines):
        wrong += python(machines)
    wrong += layer(machines, program.layer)
    wrong += together([*lacking_imports(machines, program.modules, program.typed)])
    if not any(entry.blocks is ALWAYS for entry in wrong):
        kept = needs.decided.get("precision")
        wrong += refusal("precision", lambda: devices.precision(program, machines, kept))
    return wrong


def mismatches(machines: OpenMachines) -> list[Problem]:
    """What keeps machines, each of which is fit, from training together."""
    wrong = [*versions(machines), *same_data(machines)]
    return [entry for entry in wrong if entry.blocks is ALWAYS]


def refusal(code: str, decide: Callable[[], object]) -> list[Problem]:
    """What contract/ says of a choice, where it refuses it."""
    try:
        decide()
    except UserError as error:
        return [problem(code, said=in_words_of_make(text)) for text in error.problems]
    return []


# ---- this machine, and node 0 as the others see it ----


def of_control(free: int) -> list[Problem]:
    """Of the disk that logs, records and checkpoints go to."""
    if free >= DISK_FREE:
        return []
    code = "control-disk-full" if free < 2 * DISK_FULL else "control-disk-low"
    return [problem(code, free=free >> 20)]


def master(hosts: Sequence[Host]) -> list[Problem]:
    """A loopback address of node 0 means on every other machine that machine itself."""
    addresses = [ipaddress.ip_address(host.address) for host in hosts]
    if not addresses or not addresses[0].is_loopback or all(ip.is_loopback for ip in addresses):
        return []
    return [problem("master-loopback", name=hosts[0].name, address=addresses[0])]


# ---- one machine by itself ----


def _software(host: Host, facts: NodeFacts, on_gpus: bool) -> Iterator[Problem]:
    """The first thing that its software lacks."""
    missing = [name for name in ("torch", "torchvision") if not getattr(facts.versions, name)]
    error = facts.gpus.error
    if missing:
        lacks = " and ".join(missing)
        yield problem("torch-missing", host, missing=lacks, python=host.env_python)
    elif error and on_gpus:
        code = "driver-upgraded" if "version mismatch" in error else "driver-fails"
        yield problem(code, host, error=error)
    elif not facts.toolkit:
        yield problem("toolkit-missing", host, folder=host.cuda_home)
    elif not facts.guard_python:
        yield problem("guard-python-missing", host, python=host.engine.guard_python)


def data(host: Host, facts: NodeFacts, needs: Needs) -> Iterator[Problem]:
    """Why the folder is not a data set, in the trainer's own words (contract/layout.py)."""
    folder, seen = host.data_path(needs.config.data), facts.data
    if folder and not seen.exists:
        names, be = ", ".join(seen.others), "is" if len(seen.others) == 1 else "are"
        others = f"; there {be} {names}" if names else ""
        remedy = _data_remedy(host, Path(folder).name, needs.program.data_kind)
        yield problem("data-missing", host, folder=folder, others=others, remedy=remedy)
    elif folder and seen.problem:
        yield problem("data-unfit", host, folder=folder, why=seen.problem)
    for listing in seen.splits.values():
        if listing.note:
            yield problem("data-note", host, note=listing.note)


def _data_remedy(host: Host, name: str, kind: str) -> str:
    if kind == layout.FILES:
        entry = f"`data_sets: [{{name: {name}, kind: files}}]`"
        brings = f": {entry} in group_vars/all.yml brings data/{name} there"
        return f"correct DATA, or copy the folder{'' if host.engine.is_local else brings}"
    if name == "digits":
        return host.engine.data_hint
    if name == "imagenet":
        return (
            "`make imagenet SRC=<folder of its archives>` makes data/imagenet here, and `make "
            "provision` with imagenet in data_sets copies it to every machine, or mounts the disk "
            "that has it (docs/shares.md)"
        )
    brings = " (data_sets in group_vars/all.yml brings them there)"
    there = "" if host.engine.is_local else brings
    return f"correct DATA, or put class folders into its train/ and val/{there}"


def _state(host: Host, facts: NodeFacts) -> Iterator[Problem]:
    folder = facts.absolute(host.node_dir)
    if not facts.writable:
        yield problem("not-writable", host, folder=folder)
    if facts.disk_free < DISK_FREE:
        code = "disk-full" if facts.disk_free < DISK_FULL else "disk-low"
        yield problem(code, host, free=facts.disk_free >> 20, folder=folder)
    if abs(facts.skew) > CLOCK_TOLERANCE:
        way = "ahead of" if facts.skew > 0 else "behind"
        yield problem("clock", host, seconds=abs(facts.skew), way=way)


def _busy(host: Host, facts: NodeFacts, run: str | None, on_gpus: bool) -> Iterator[Problem]:
    """Of a run on this machine, with GPUs or without; otherwise of whoever else uses its GPUs. What
    is left of `run` itself is no problem."""
    others = {
        f"{other.holder}: run {other.run}, for {seconds(other.seconds)}"
        for other in facts.runs
        if other.run != run
    }
    if others:
        yield problem("machine-busy", host, holders="; ".join(sorted(others)))
    elif not facts.runs and on_gpus and facts.gpus.processes:
        held = [f"{job.user}: {job.command} (pid {job.pid})" for job in facts.gpus.processes]
        yield problem("gpus-busy", host, holders="; ".join(held))


# ---- what the program imports ----


def needs_layer(program: Program, machines: OpenMachines) -> bool:
    """Return whether the program's packages have to be sent to these machines."""
    if program.requirements is None:
        return False
    name, facts = program.unless_module, machines.facts
    return name is None or any(name in facts[host.name].missing for host in machines.hosts)


def layer(machines: OpenMachines, packages: Layer | None) -> list[Problem]:
    """Machines that lack what a layer of packages needs of the environment."""
    wrong = []
    for host in machines.hosts:
        own = machines.facts[host.name].distributions
        if lacks := packages.differs(own) if packages else []:
            wrong.append(problem("script-stack", host, lacks=", ".join(lacks)))
    return wrong


def lacking_imports(
    machines: OpenMachines, modules: Sequence[str], program: str
) -> Iterator[Problem]:
    """A problem for each machine that seems to lack modules that the program imports. It never
    blocks: the program was read here, not run, and may find them in another way."""
    for host in machines.hosts:
        missing = [name for name in modules if name in machines.facts[host.name].missing]
        if missing:
            yield problem(
                "imports",
                host,
                program=program,
                missing=", ".join(missing),
                python=host.env_python,
            )


# ---- machines beside each other ----


def _differing(values: Mapping[str, str]) -> str:
    """`2.1 (node1, node2), 2.2 (node3)` if there is more than one value."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    named = [f"{value} ({', '.join(hosts)})" for value, hosts in groups.items()]
    return ", ".join(named) if len(named) > 1 else ""


STACK = {"torch": "torch", "torchvision": "torchvision", "cuda": "torch's CUDA", "nccl": "NCCL"}


def versions(machines: OpenMachines) -> list[Problem]:
    facts = {host.name: machines.facts[host.name] for host in machines.hosts}
    wrong = []
    for name, what in STACK.items():
        if values := _differing({h: str(getattr(f.versions, name)) for h, f in facts.items()}):
            wrong.append(problem("versions-differ", what=what, values=values))
    if values := _differing({h: f.architecture for h, f in facts.items()}):
        wrong.append(problem("architectures-differ", values=values))
    drivers = {h: f.gpus.driver.split(".")[0] for h, f in facts.items() if f.gpus.driver}
    if values := _differing(drivers):
        wrong.append(problem("drivers-differ", values=values))
    return wrong


def python(machines: OpenMachines) -> list[Problem]:
    """Machines whose Pythons a layer cannot be made for together."""
    values = _differing({host.name: machines.facts[host.name].python for host in machines.hosts})
    return [problem("python-differs", values=values)] if values else []


def same_data(machines: OpenMachines) -> list[Problem]:
    wrong = []
    for split in (*layout.SPLITS, layout.FILES):
        values = {}
        for host in machines.hosts:
            if listing := machines.facts[host.name].data.splits.get(split):
                values[host.name] = f"{_size(listing)}, {listing.sha256[:8]}"
        if differing := _differing(values):
            # A script may want other files on each machine, such as shards.
            code = "files-differ" if split == layout.FILES else "data-differs"
            wrong.append(problem(code, what=_name(split), values=differing))
    return wrong


def _name(split: str) -> str:
    return "the data folder" if split == layout.FILES else f"{split}/ of the data"


def _size(listing: Listing) -> str:
    if listing.classes:
        return f"{pluralize(listing.images, 'image')} in {pluralize(listing.classes, 'class')}"
    return f"{pluralize(listing.images, 'file')} of {listing.bytes:,} bytes"


def missing_data(machines: OpenMachines, sources: Mapping[str, Source]) -> Iterator[Problem]:
    """Less than what the data were copied from has, or the machine that shares them."""
    for host in machines.hosts:
        if (source := sources.get(host.name)) is None:
            continue
        for split, whole in source.splits.items():
            # It has none where it is no data set, which is a problem of its own.
            own = machines.facts[host.name].data.splits.get(split, whole)
            # Of a folder of any files, also less in its files.
            less = any(
                getattr(own, name) < getattr(whole, name) for name in ("images", "classes", "bytes")
            )
            if less or own.sha256 != whole.sha256:
                kind = "copy" if source.is_copied else "share"
                values = {"own": _size(own), "whole": _size(whole), "source": source.name}
                code = f"{kind}-lacks" if less else f"{kind}-differs"
                yield problem(code, host, what=_name(split), **values)


def unreachable_pairs(
    machines: OpenMachines, answers: Mapping[str, Sequence[Unreached] | str]
) -> Iterator[Problem]:
    """The pairs of machines that cannot connect."""
    names = {host.address: host.name for host in machines.hosts}
    for host in machines.hosts:
        answer = answers.get(host.name, ())
        if isinstance(answer, str):
            yield problem("ways-unknown", host, why=answer)
            continue
        for far in answer:
            where = {"peer": names[far.address], "address": far.address, "port": far.port}
            yield problem("no-way", of=host.label(), why=far.why, **where)
