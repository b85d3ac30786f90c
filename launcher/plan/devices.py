"""Decides on which devices each node's processes compute, from inventory and facts, and the
precision that follows by the rule in contract/precisions.py."""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from boundary.answers import NodeFacts
from contract import precisions
from contract.errors import UserError
from contract.precisions import Device, Level
from launcher.look import OpenMachines
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.problems import Problem, Refused, problem
from launcher.program import Program

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIMIT = "ONEDNN_MAX_CPU_ISA"


@dataclass(frozen=True)
class NodeDevices:
    """One node's devices. `visible`: its GPUs, as CUDA_VISIBLE_DEVICES names them, none if it
    computes on its CPU. `processes`: one per device, or one for all with --parallel dp."""

    visible: tuple[str, ...]
    devices: tuple[Device, ...]
    processes: int

    @property
    def kind(self) -> str:
        return "cuda" if self.visible else "cpu"

    def environment(self, run_env: dict[str, str]) -> dict[str, str]:
        """Return the variables that name the devices for CUDA and Accelerate."""
        # nvidia-smi counts GPUs by their place on the PCI bus, CUDA from the fastest one.
        order = run_env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        variables = {"CUDA_DEVICE_ORDER": order, VISIBLE: ",".join(self.visible)}
        if not self.visible:  # else Accelerate and transformers' Trainer form no group of CPUs
            variables["ACCELERATE_USE_CPU"] = run_env.get("ACCELERATE_USE_CPU", "true")
        return variables


def wants_gpus(host: Host, device: str) -> bool:
    """Return False if the user says that this node computes on its CPU."""
    visible = host.env.get(VISIBLE)
    return device != "cpu" and host.gpus != 0 and (visible is None or bool(_entries(visible)))


def assign(
    hosts: list[Host], facts: Mapping[str, NodeFacts], program: Program
) -> dict[str, NodeDevices]:
    """Return each host's devices. Nodes on one machine share its GPUs; if there are more nodes than
    GPUs, all of them compute on the CPU. Raises Refused."""
    # Several nodes may be one machine, as in the demo.
    machines: dict[tuple[str, ...], list[Host]] = {}
    for host in hosts:
        # Containers on one machine may each have their own GPUs.
        uuids = (gpu.uuid for gpu in facts[host.name].gpus.cards)
        machines.setdefault((facts[host.name].machine, *uuids), []).append(host)
    visible: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for nodes in machines.values():
        wanting = [host for host in nodes if wants_gpus(host, program.device)]
        visible.update({host.name: () for host in nodes})
        try:
            visible.update(_on_one_machine(wanting, facts))
        except Refused as refused:
            problems += refused.reasons
    problems += [
        problem("no-gpu", host, why=_why_cpu(host, facts[host.name]))
        for host in hosts
        if program.device == "cuda" and not problems and not visible[host.name]
    ]
    if problems:
        raise Refused(problems)
    node_devices = {}
    for host in hosts:
        host_facts, entries = facts[host.name], visible[host.name]
        version, cuda = str(host_facts.versions.torch), host_facts.versions.cuda
        if not entries:
            # This process may limit the instructions of all nodes, and run_env those of one.
            limit = {LIMIT: os.environ[LIMIT]} if LIMIT in os.environ else {}
            bf16 = precisions.cpu_has_bf16(host_facts.cpu_flags, {**limit, **host.env})
            cpu = Device(host.name, "cpu", name="", bf16=bf16, torch=version, cuda=cuda)
            node_devices[host.name] = NodeDevices((), (cpu,), 1)
            continue
        gpus = []
        for entry in entries:
            # MIG instances are parts of GPUs that are equal in what counts here.
            gpu = host_facts.gpus.cards[_index(entry, host_facts) or 0]
            name = "".join(filter(str.isprintable, gpu.name))[:60]
            sm = gpu.sm or 0
            # An old driver does not report the compute capability: the PCI device number tells it,
            # unless ansible/stacks.yml does not know the GPU either.
            if not sm and re.fullmatch("[0-9a-f]{4}", gpu.pci or ""):
                number, rows = int(gpu.pci or "", 16), _generations()
                sms = (row["sm"] for row in rows if row["first"] <= number <= row["last"])
                sm = next(sms, 0)
            gpus.append(Device(host.name, "cuda", name, sm, torch=version, cuda=cuda))
        processes = len(gpus) if program.parallel == "ddp" else 1
        node_devices[host.name] = NodeDevices(entries, tuple(gpus), processes)
    return node_devices


def _on_one_machine(
    hosts: list[Host], facts: Mapping[str, NodeFacts]
) -> dict[str, tuple[str, ...]]:
    """Return entries of CUDA_VISIBLE_DEVICES by node. Raises Refused."""
    if not hosts:
        return {}
    machine = facts[hosts[0].name]
    count = len(machine.gpus.cards) if machine.versions.cuda else 0  # that the torch there can use
    # A node whose run_env names GPUs gets those, as many as `gpus` says.
    assigned: dict[str, tuple[str, ...]] = {}
    users: dict[int | str, list[str]] = defaultdict(list)  # of each GPU, or part of one (MIG)
    for host in (host for host in hosts if VISIBLE in host.env):
        visible, host_facts = host.env[VISIBLE], facts[host.name]
        entries = _entries(visible) if host_facts.versions.cuda else ()
        for entry in entries:
            if _index(entry, host_facts) is None and not entry.startswith("MIG-"):
                count = len(host_facts.gpus.cards)
                raise Refused([problem("gpu-unknown", host, visible=visible, count=count)])
        if host.gpus is not None and host.gpus > len(entries):
            raise Refused([problem("gpus-hidden", host, gpus=host.gpus, count=len(entries))])
        assigned[host.name] = entries[: host.gpus]
        for entry in assigned[host.name]:
            number = _index(entry, host_facts)
            users[entry if number is None else number].append(host.name)
    if shared := [name for names in users.values() if len(names) > 1 for name in names]:
        raise Refused([problem("gpu-named-twice", names=", ".join(dict.fromkeys(shared)))])
    # Then come the nodes that name a number of GPUs.
    free = [str(number) for number in range(count) if number not in users]
    for host in hosts:
        if host.gpus is None or host.name in assigned:
            continue
        total = len(facts[host.name].gpus.cards)
        if host.gpus > len(free) and total and not facts[host.name].versions.cuda:
            reason = _why_cpu(host, facts[host.name])
            raise Refused([problem("gpus-unusable", host, gpus=host.gpus, why=reason)])
        if host.gpus > len(free):
            numbers = [f"gpus={node.gpus} for {node.name}" for node in hosts if node.gpus]
            listed = f"{', '.join(numbers)}, all on one machine"
            listed = f"gpus={host.gpus}" if len(numbers) == 1 else listed
            raise Refused([problem("gpus-missing", host, listed=listed, count=total)])
        assigned[host.name], free = tuple(free[: host.gpus]), free[host.gpus :]
    # All other nodes share what is left, or compute on the CPU if not each gets one.
    sharing = [host for host in hosts if host.name not in assigned]
    if len(sharing) > len(free):
        free = []
    share, remainder = divmod(len(free), len(sharing)) if sharing else (0, 0)
    for number, host in enumerate(sharing):
        size = share + (number < remainder)
        assigned[host.name], free = tuple(free[:size]), free[size:]
    return assigned


def _entries(visible: str) -> tuple[str, ...]:
    """Return the entries of CUDA_VISIBLE_DEVICES that count: CUDA hides what follows -1."""
    words = [word.strip() for word in visible.split(",")]
    return tuple(itertools.takewhile(lambda word: word not in ("", "-1"), words))


def _index(entry: str, facts: NodeFacts) -> int | None:
    """Return nvidia-smi's number of a GPU, by its number or the beginning of its UUID; None if
    there is no such GPU."""
    if re.fullmatch("[0-9]{1,4}", entry):
        return int(entry) if int(entry) < len(facts.gpus.cards) else None
    if not entry.startswith("GPU-"):
        return None
    gpus = enumerate(facts.gpus.cards)
    numbers = [number for number, gpu in gpus if gpu.uuid.startswith(entry)]
    return numbers[0] if len(numbers) == 1 else None


def _why_cpu(host: Host, facts: NodeFacts) -> str:
    """Explain why a node computes on its CPU, and what to do about it."""
    if host.gpus == 0:
        return "the inventory sets gpus=0 for it."
    if facts.gpus.cards and not facts.versions.cuda:
        return f"its torch is built without CUDA: {host.engine.repair_hint}."
    if facts.gpus.cards:
        return "other nodes of the same machine use its GPUs: list at most one node for each GPU."
    if facts.gpus.on_bus:
        return "it has an NVIDIA card, but no driver with nvidia-smi: run `make provision`."
    return "it has no GPU."


@cache
def _generations() -> list[dict[str, int]]:
    import yaml  # only for old drivers

    table = yaml.safe_load((CHECKOUT / "ansible" / "stacks.yml").read_text(encoding="utf-8"))
    rows: list[dict[str, int]] = table["stacks"]["gpus"]["generations"]
    return rows


def precision(program: Program, machines: OpenMachines, decided: str | None) -> Level | None:
    """Return the precision that the ranks will decide, None for a program whose ranks decide
    nothing. `decided`: what an earlier attempt decided, which every machine must have. Raises
    UserError."""
    if program.request is None:
        return None
    hosts, request = machines.hosts, program.request
    node_devices = assign(hosts, machines.facts, program)
    devices = [device for host_devices in node_devices.values() for device in host_devices.devices]
    try:
        level = decided or request.precision
        return precisions.resolve(level, devices, request.emulate, bool(decided))
    except UserError as error:
        # If only some nodes compute on their CPUs, that is the likely cause.
        on_cpu = [host for host in hosts if node_devices[host.name].kind == "cpu"]
        reasons = [
            f"{host.label()} computes on its CPU: {_why_cpu(host, machines.facts[host.name])}"
            for host in (on_cpu if len(on_cpu) < len(hosts) else [])
        ]
        raise UserError(str(error), *reasons) from None
