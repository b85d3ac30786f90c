"""What each node's processes compute on, from inventory and facts alone, and the precision that
follows: the rule itself is contract/precisions.py.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from boundary.answers import Gpu, NodeFacts
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
    """One node's GPUs, as CUDA_VISIBLE_DEVICES names them (none: it computes on its CPU); what
    these devices are; and its processes: one per device, or one for all with --parallel dp."""

    visible: tuple[str, ...]
    devices: tuple[Device, ...]
    processes: int

    @property
    def kind(self) -> str:
        return "cuda" if self.visible else "cpu"

    def environment(self, own: dict[str, str]) -> dict[str, str]:
        """`own`: the node's run_env. nvidia-smi counts GPUs by their place on the PCI bus, CUDA
        from the fastest one unless it is told otherwise."""
        order = own.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        return {"CUDA_DEVICE_ORDER": order, VISIBLE: ",".join(self.visible)}


def wants_gpus(host: Host, device: str) -> bool:
    """False where the user says that this node computes on its CPU."""
    own = host.env.get(VISIBLE)
    return device != "cpu" and host.gpus != 0 and (own is None or bool(_entries(own)))


def assign(
    hosts: list[Host], facts: Mapping[str, NodeFacts], program: Program
) -> dict[str, NodeDevices]:
    """Each host's part. Nodes on one machine share its GPUs; if there are more nodes than
    GPUs, all of them compute on the CPU. Raises Refused."""
    device = program.device
    machines: dict[tuple[str, ...], list[Host]] = {}
    for host in hosts:
        # Containers on one machine may each have their own GPUs.
        cards = (card.uuid for card in facts[host.name].gpus.cards)
        machines.setdefault((facts[host.name].machine, *cards), []).append(host)
    visible: dict[str, tuple[str, ...]] = {}
    problems: list[Problem] = []
    for nodes in machines.values():
        wanting = [host for host in nodes if wants_gpus(host, device)]
        visible.update({host.name: () for host in nodes})
        try:
            visible.update(_on_one_machine(wanting, facts))
        except Refused as refused:
            problems += refused.reasons
    problems += [
        problem("no-gpu", host, why=_why_cpu(host, facts[host.name]))
        for host in hosts
        if device == "cuda" and not problems and not visible[host.name]
    ]
    if problems:
        raise Refused(problems)
    return {
        host.name: _part(host, facts[host.name], visible[host.name], program.parallel)
        for host in hosts
    }


def _on_one_machine(
    hosts: list[Host], facts: Mapping[str, NodeFacts]
) -> dict[str, tuple[str, ...]]:
    """Entries of CUDA_VISIBLE_DEVICES by node. A node that names GPUs gets those; then come the
    nodes that name a number of GPUs; the others share the rest."""
    if not hosts:
        return {}
    first = facts[hosts[0].name]
    count = len(first.gpus.cards) if first.versions.cuda else 0  # that the torch there can use
    found = {host.name: _own(host, facts[host.name]) for host in hosts if VISIBLE in host.env}
    users: dict[int | str, list[str]] = defaultdict(list)  # of each GPU, or part of one (MIG)
    for name, entries in found.items():
        for entry in entries:
            number = _index(entry, facts[name])
            users[entry if number is None else number].append(name)
    if shared := [name for names in users.values() if len(names) > 1 for name in names]:
        raise Refused([problem("gpu-named-twice", names=", ".join(dict.fromkeys(shared)))])
    free = [str(number) for number in range(count) if number not in users]
    for host in hosts:
        if host.gpus is not None and host.name not in found:
            if host.gpus > len(free):
                raise Refused([_too_many(host, hosts, facts[host.name])])
            found[host.name], free = tuple(free[: host.gpus]), free[host.gpus :]
    rest = [host for host in hosts if host.name not in found]
    if len(rest) > len(free):
        free = []
    each, more = divmod(len(free), len(rest)) if rest else (0, 0)
    for number, host in enumerate(rest):
        size = each + (number < more)
        found[host.name], free = tuple(free[:size]), free[size:]
    return found


def _entries(own: str) -> tuple[str, ...]:
    """The visible entries of CUDA_VISIBLE_DEVICES: what comes after -1 is hidden."""
    words = [word.strip() for word in own.split(",")]
    cut = next((place for place, word in enumerate(words) if word in ("", "-1")), len(words))
    return tuple(words[:cut])


def _own(host: Host, facts: NodeFacts) -> tuple[str, ...]:
    """The GPUs that run_env names, limited to as many as `gpus` says. Raises Refused."""
    visible = host.env[VISIBLE]
    entries = _entries(visible) if facts.versions.cuda else ()
    for entry in entries:
        if _index(entry, facts) is None and not entry.startswith("MIG-"):
            count = len(facts.gpus.cards)
            raise Refused([problem("gpu-unknown", host, visible=visible, count=count)])
    if host.gpus is not None and host.gpus > len(entries):
        raise Refused([problem("gpus-hidden", host, gpus=host.gpus, count=len(entries))])
    return entries[: host.gpus]


def _index(entry: str, facts: NodeFacts) -> int | None:
    """The number that nvidia-smi gives a GPU, by its number or the beginning of its UUID."""
    if re.fullmatch("[0-9]{1,4}", entry):
        return int(entry) if int(entry) < len(facts.gpus.cards) else None
    if not entry.startswith("GPU-"):
        return None
    cards = enumerate(facts.gpus.cards)
    known = [number for number, card in cards if card.uuid.startswith(entry)]
    return known[0] if len(known) == 1 else None


def _too_many(host: Host, hosts: list[Host], facts: NodeFacts) -> Problem:
    count = len(facts.gpus.cards)
    if count and not facts.versions.cuda:
        return problem("gpus-unusable", host, gpus=host.gpus, why=_why_cpu(host, facts))
    said = [f"gpus={other.gpus} for {other.name}" for other in hosts if other.gpus]
    listed = f"gpus={host.gpus}" if len(said) == 1 else ", ".join(said) + ", all on one machine"
    return problem("gpus-missing", host, listed=listed, count=count)


def _why_cpu(host: Host, facts: NodeFacts) -> str:
    """Why a node computes on its CPU, and what to do about it."""
    if host.gpus == 0:
        return "the inventory says gpus=0 for it."
    if facts.gpus.cards and not facts.versions.cuda:
        return f"its torch is built without CUDA: {host.engine.repair_hint}."
    if facts.gpus.cards:
        return (
            "its GPUs belong to other nodes, or are fewer than the nodes of its machine: name "
            "fewer nodes."
        )
    if facts.gpus.on_bus:
        return "it has an NVIDIA card, but no driver with nvidia-smi: run `make provision`."
    return "it has no GPU."


def _part(host: Host, facts: NodeFacts, visible: tuple[str, ...], parallel: str) -> NodeDevices:
    version, cuda = str(facts.versions.torch), facts.versions.cuda
    if not visible:
        limit = {LIMIT: os.environ[LIMIT]} if LIMIT in os.environ else {}
        bf16 = precisions.cpu_has_bf16(facts.cpu_flags, {**limit, **host.env})
        return NodeDevices(
            (), (Device(host.name, "cpu", name="", bf16=bf16, torch=version, cuda=cuda),), 1
        )
    devices = []
    for entry in visible:
        number = _index(entry, facts)
        # MIG instances are parts of cards that are equal in what counts here.
        card = facts.gpus.cards[number or 0]
        name = "".join(filter(str.isprintable, card.name))[:60]
        devices.append(Device(host.name, "cuda", name, _sm(card), torch=version, cuda=cuda))
    return NodeDevices(visible, tuple(devices), len(devices) if parallel == "ddp" else 1)


def _sm(card: Gpu) -> int:
    """Compute capability: from the driver or, where that does not say, from the PCI device number;
    0 for a card that ansible/stacks.yml does not know either."""
    if card.sm:
        return card.sm
    known = re.fullmatch("[0-9a-f]{4}", card.pci or "")
    number = int(known.group(), 16) if known else 0
    return next((sm for first, last, sm in _generations() if first <= number <= last), 0)


@cache
def _generations() -> list[tuple[int, int, int]]:
    import yaml  # only for old drivers

    table = yaml.safe_load((CHECKOUT / "ansible" / "stacks.yml").read_text(encoding="utf-8"))
    rows = table["stacks"]["gpus"]["generations"]
    return [(row["first"], row["last"], row["sm"]) for row in rows]


def precision(program: Program, machines: OpenMachines, kept: str | None) -> Level | None:
    """Return the precision that the ranks will decide, None for a program whose ranks decide
    nothing. `kept`: what an earlier attempt decided, which every machine must have. Raises
    UserError."""
    if program.request is None:
        return None
    hosts, request = machines.hosts, program.request
    parts = assign(hosts, machines.facts, program)
    devices = [device for part in parts.values() for device in part.devices]
    try:
        asked = kept or request.precision
        return precisions.resolve(asked, devices, request.emulate, bool(kept))
    except UserError as error:
        on_cpu = [host for host in hosts if parts[host.name].kind == "cpu"]
        mixed = on_cpu if len(on_cpu) < len(hosts) else []
        why = [
            f"{host.label()} computes on its CPU: {_why_cpu(host, machines.facts[host.name])}"
            for host in mixed
        ]
        raise UserError(str(error), *why) from None
