"""Decides on which devices each node's processes compute, from inventory and facts.

plan.py takes the devices from here, checks.py and judge.py the precision. The rule for the
precision is in contract/precisions.py.
"""

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
CPU_LIMIT = "ONEDNN_MAX_CPU_ISA"  # limits the CPU instructions that oneDNN uses


@dataclass(frozen=True)
class NodeDevices:
    """Describes one node's devices."""

    visible: tuple[str, ...]  # GPUs as in CUDA_VISIBLE_DEVICES; empty if it computes on its CPU
    devices: tuple[Device, ...]
    processes: int  # one per device, or one for all devices with --parallel dp

    @property
    def kind(self) -> str:
        """The kind of its devices, as torch names it."""
        return "cuda" if self.visible else "cpu"

    def environment(self, run_env: dict[str, str]) -> dict[str, str]:
        """Return the variables that name the devices for CUDA and Accelerate."""
        # Without this variable CUDA numbers GPUs from the fastest, nvidia-smi by their PCI slots.
        order = run_env.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        variables = {"CUDA_DEVICE_ORDER": order, VISIBLE: ",".join(self.visible)}
        # Without this variable Accelerate and transformers' Trainer form no process group of CPUs.
        if not self.visible:
            variables["ACCELERATE_USE_CPU"] = run_env.get("ACCELERATE_USE_CPU", "true")
        return variables


def wants_gpus(host: Host, device: str) -> bool:
    """Return False if the user's settings say that this node computes on its CPU."""
    visible = host.env.get(VISIBLE)
    return device != "cpu" and host.gpus != 0 and (visible is None or bool(_split_entries(visible)))


def assign(
    hosts: list[Host], facts: Mapping[str, NodeFacts], program: Program
) -> dict[str, NodeDevices]:
    """Return each host's devices. Nodes on one machine share its GPUs; if it has more nodes than
    GPUs, all of these nodes compute on the CPU. Raises Refused."""
    # Group nodes that share GPUs. Nodes may be containers on one machine, with or without GPUs of
    # their own, so a group has the same machine and the same GPUs.
    groups: dict[tuple[str, ...], list[Host]] = {}
    for host in hosts:
        uuids = (gpu.uuid for gpu in facts[host.name].gpus.cards)
        groups.setdefault((facts[host.name].machine, *uuids), []).append(host)
    visible: dict[str, tuple[str, ...]] = {}  # entries of CUDA_VISIBLE_DEVICES, by node
    problems: list[Problem] = []
    for nodes in groups.values():
        gpu_hosts = [host for host in nodes if wants_gpus(host, program.device)]
        visible.update({host.name: () for host in nodes})
        try:
            visible.update(_divide_gpus(gpu_hosts, facts))
        except Refused as refused:
            problems += refused.reasons
    if program.device == "cuda" and not problems:
        problems += [
            problem("no-gpu", host, why=_explain_cpu(host, facts[host.name]))
            for host in hosts
            if not visible[host.name]
        ]
    if problems:
        raise Refused(problems)
    node_devices = {}
    for host in hosts:
        host_facts, entries = facts[host.name], visible[host.name]
        version, cuda = str(host_facts.versions.torch), host_facts.versions.cuda
        if not entries:
            # The launcher's environment limits the instructions on all nodes, run_env on one node.
            limit = {CPU_LIMIT: os.environ[CPU_LIMIT]} if CPU_LIMIT in os.environ else {}
            bf16 = precisions.cpu_has_bf16(host_facts.cpu_flags, {**limit, **host.env})
            cpu = Device(host.name, "cpu", name="", bf16=bf16, torch=version, cuda=cuda)
            node_devices[host.name] = NodeDevices((), (cpu,), 1)
            continue
        gpus = []
        for entry in entries:
            # _find_number returns None for a MIG instance, a part of a GPU. Then the first GPU
            # counts: a machine's GPUs with MIG are equal in name and compute capability.
            gpu = host_facts.gpus.cards[_find_number(entry, host_facts) or 0]
            name = "".join(filter(str.isprintable, gpu.name))[:60]
            sm = gpu.sm or 0
            # An old driver does not report the compute capability. Then ansible/stacks.yml may have
            # it, by ranges of PCI device numbers such as `1e07`.
            if not sm and re.fullmatch("[0-9a-f]{4}", gpu.pci or ""):
                number, rows = int(gpu.pci or "", 16), _load_generations()
                sms = (row["sm"] for row in rows if row["first"] <= number <= row["last"])
                sm = next(sms, 0)
            gpus.append(Device(host.name, "cuda", name, sm, torch=version, cuda=cuda))
        processes = len(gpus) if program.parallel == "ddp" else 1
        node_devices[host.name] = NodeDevices(entries, tuple(gpus), processes)
    return node_devices


def _divide_gpus(hosts: list[Host], facts: Mapping[str, NodeFacts]) -> dict[str, tuple[str, ...]]:
    """Divide the GPUs of one machine among its nodes. Return entries of CUDA_VISIBLE_DEVICES by
    node. Raises Refused."""
    if not hosts:
        return {}
    machine = facts[hosts[0].name]
    # A torch that is built without CUDA can use no GPU.
    usable_count = len(machine.gpus.cards) if machine.versions.cuda else 0
    # First come nodes whose run_env names GPUs: such a node gets the first `gpus` of these.
    assigned: dict[str, tuple[str, ...]] = {}
    users: dict[int | str, list[str]] = defaultdict(list)  # nodes by GPU number or MIG instance
    for host in (host for host in hosts if VISIBLE in host.env):
        visible, host_facts = host.env[VISIBLE], facts[host.name]
        entries = _split_entries(visible) if host_facts.versions.cuda else ()
        for entry in entries:
            if _find_number(entry, host_facts) is None and not entry.startswith("MIG-"):
                count = len(host_facts.gpus.cards)
                raise Refused([problem("gpu-unknown", host, visible=visible, count=count)])
        if host.gpus is not None and host.gpus > len(entries):
            raise Refused([problem("gpus-hidden", host, gpus=host.gpus, count=len(entries))])
        assigned[host.name] = entries[: host.gpus]
        for entry in assigned[host.name]:
            number = _find_number(entry, host_facts)
            users[entry if number is None else number].append(host.name)
    if shared := [name for names in users.values() if len(names) > 1 for name in names]:
        raise Refused([problem("gpu-named-twice", names=", ".join(dict.fromkeys(shared)))])
    # Then come nodes for which the inventory sets the number of GPUs.
    free = [str(number) for number in range(usable_count) if number not in users]
    for host in hosts:
        if host.gpus is None or host.name in assigned:
            continue
        total = len(facts[host.name].gpus.cards)
        if host.gpus > len(free) and total and not facts[host.name].versions.cuda:
            reason = _explain_cpu(host, facts[host.name])
            raise Refused([problem("gpus-unusable", host, gpus=host.gpus, why=reason)])
        if host.gpus > len(free):
            numbers = [f"gpus={node.gpus} for {node.name}" for node in hosts if node.gpus]
            listed = f"{', '.join(numbers)}, all on one machine"
            listed = f"gpus={host.gpus}" if len(numbers) == 1 else listed
            raise Refused([problem("gpus-missing", host, listed=listed, count=total)])
        assigned[host.name], free = tuple(free[: host.gpus]), free[host.gpus :]
    # All other nodes share the remaining GPUs. If there are fewer GPUs than nodes, these nodes
    # compute on the CPU. If the division leaves a remainder, the first nodes get one GPU more.
    sharing = [host for host in hosts if host.name not in assigned]
    if len(sharing) > len(free):
        free = []
    share, remainder = divmod(len(free), len(sharing)) if sharing else (0, 0)
    for number, host in enumerate(sharing):
        size = share + (number < remainder)
        assigned[host.name], free = tuple(free[:size]), free[size:]
    return assigned


def _split_entries(visible: str) -> tuple[str, ...]:
    """Return the valid entries of CUDA_VISIBLE_DEVICES, such as `0,1` or `GPU-8f6e`. CUDA ignores
    -1 and all entries after -1."""
    words = [word.strip() for word in visible.split(",")]
    return tuple(itertools.takewhile(lambda word: word not in ("", "-1"), words))


def _find_number(entry: str, facts: NodeFacts) -> int | None:
    """Return the number by which nvidia-smi knows a GPU; None if there is no such GPU. `entry` is a
    number, or the beginning of a UUID."""
    if re.fullmatch("[0-9]{1,4}", entry):
        return int(entry) if int(entry) < len(facts.gpus.cards) else None
    if not entry.startswith("GPU-"):
        return None
    gpus = enumerate(facts.gpus.cards)
    numbers = [number for number, gpu in gpus if gpu.uuid.startswith(entry)]
    return numbers[0] if len(numbers) == 1 else None


def _explain_cpu(host: Host, facts: NodeFacts) -> str:
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
def _load_generations() -> list[dict[str, int]]:
    """Load the table of GPU generations: rows with `first` and `last` PCI number, and `sm`."""
    import yaml  # imported late: only old drivers need the table

    table = yaml.safe_load((CHECKOUT / "ansible" / "stacks.yml").read_text(encoding="utf-8"))
    rows: list[dict[str, int]] = table["stacks"]["gpus"]["generations"]
    return rows


def choose_precision(program: Program, machines: OpenMachines, decided: str | None) -> Level | None:
    """Return the precision that the ranks will choose; None for a program whose ranks choose none.
    `decided`: the precision of an earlier attempt, which every machine must support. Raises
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
        # A node that computes on its CPU, while others have GPUs, probably limits the precision.
        on_cpu = [host for host in hosts if node_devices[host.name].kind == "cpu"]
        reasons = [
            f"{host.label()} computes on its CPU: {_explain_cpu(host, machines.facts[host.name])}"
            for host in (on_cpu if len(on_cpu) < len(hosts) else [])
        ]
        raise UserError(str(error), *reasons) from None
