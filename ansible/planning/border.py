"""What machines say, checked once where it comes in; all of planning/ behind it trusts it.

A value that cannot be, in type, range, size or alphabet, is a PlanError: that machine's failure.
Parts that no shape names are left out. A text is whatever a program printed there; those who read
texts find in them what they look for, or nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from contract.validate import Each, Invalid, Match, One, check, parse

from . import PlanError

TEXT = 1 << 22  # characters of what one program prints
LONE = re.compile("[\ud800-\udfff]")  # halves of surrogates, which no file could hold


VERSION = Match(
    r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}[\w.+~:-]{0,100}", "a version such as 6.1.0-31-amd64"
)
PACKAGED = Match(
    r"([0-9]{1,9}:)?[0-9]{1,9}[\w.+~:-]{0,200}", "a package's version such as 2:535.261.03-1"
)
HEX = Match(r"[0-9a-f]{1,8}", "hexadecimal digits")
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = Match(rf"{_BYTE}(\.{_BYTE}){{3}}")
NETWORK4 = Match(rf"{_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])")

PROCESS = {"pid": int, "command": (str, None)}

# What ansible/library/machine_facts.py returns.
MACHINE = {
    **dict.fromkeys(("distribution", "release", "codename"), (str, None)),
    **dict.fromkeys(("kernel", "glibc", "python"), VERSION),
    **dict.fromkeys(("gcc", "driver", "driver_library"), (VERSION, None)),
    **dict.fromkeys(("kernel_headers", "python_venv", "systemd", "nouveau", "firewalld"), bool),
    **dict.fromkeys(("dpkg_broken", "rsync", "conda", "uv"), bool),
    **dict.fromkeys(("machine_id", "interface", "address_owner", "broken"), (str, None)),
    "reboot_waits": (str, None),
    "xids": [int],
    **{
        name: [str]
        for name in (*("environments", "loopback_names", "missing_libraries", "boot_passphrases"),)
    },
    "arch": str,
    "memory": int,
    "secure_boot": (bool, None),
    "hostname": str,
    "ufw_conf": str,
    "clock": float,
    "held_since": (float, None),
    "toolkits": Each((VERSION, None)),
    "gpus": [{"vendor": HEX, "device": HEX}],
    "passed_through": [HEX],
    "prime": (str, None),
    "disks": Each({"free": float, "free_inodes": (float, None), "read_only": bool, "device": int}),
    "links": [
        {
            "name": str,
            "mac": (str, None),
            "mtu": int,
            "speed": (int, None),
            "duplex": (str, None),
            **dict.fromkeys(("wireless", "tunnel", "physical"), bool),
            "addresses": [IPV4],
            "networks": [NETWORK4],
        }
    ],
    "apt_lock": (PROCESS, None),
    "missing_mounts": [{"path": str, "type": str}],
    "dead_sources": [{"source": str, "file": (str, None)}],
}
# What ansible/library/driver_facts.py returns.
DRIVER = {
    **dict.fromkeys(("packages", "offered"), Each(PACKAGED)),
    **{name: [PROCESS] for name in ("displays", "gpu_processes")},
    **dict.fromkeys(("dkms", "pending", "display_manager_active"), bool),
    **dict.fromkeys(("waiting_kernel", "runfile"), (VERSION, None)),
    **dict.fromkeys(("waiting_module", "module", "signing_key", "display_manager"), (str, None)),
    "kernel_series": (str, None),
    "held": [str],
    "held_by_us": [str],
    "seated": [str],
    "prebuilt": Each([str]),
    **dict.fromkeys(("uninstallable", "transitional", "offered_transitional"), Each(str)),
    "kernel_compiler": (Match("[0-9]{1,4}"), None),
    "free": Each(float),
}
PROOF = {"names": [str], "precisions": [One(("fp32", "fp16", "bf16"))]}  # of proof.py
# What a share's options depend on; the last is what `id` prints.
IDS = Match(r"uid=([0-9]{1,10})\S* gid=([0-9]{1,10}).*")
READER = {"kernel": VERSION, "speed": int, "ids": IDS}


@dataclass(frozen=True)
class Unit:
    """A service in Ansible's own facts."""

    state: str = ""


@dataclass(frozen=True)
class Address:
    """Of a network interface in Ansible's own facts."""

    address: str
    prefix: Annotated[str, Match("[0-9]{1,3}")] | int


@dataclass(frozen=True)
class Interface:
    """A network interface in Ansible's own facts, each part of which may lack."""

    ipv4: Address | None = None
    ipv4_secondaries: list[Address] = field(default_factory=list)
    ipv6: list[Address] = field(default_factory=list)
    interfaces: list[str] = field(default_factory=list)
    pciid: str | None = None

    @property
    def addresses(self) -> list[Address]:
        return [*([self.ipv4] if self.ipv4 else []), *self.ipv4_secondaries, *self.ipv6]


@dataclass(frozen=True)
class LinkAddress:
    """Of `ip -json address`; iproute2 4.15 prints {} for what it leaves out."""

    family: str | None = None
    local: str | None = None
    prefixlen: int | None = None
    dynamic: bool = False


@dataclass(frozen=True)
class Link:
    ifname: str = ""
    address: str = ""
    mtu: int = 1500
    addr_info: list[LinkAddress] = field(default_factory=list)

    @property
    def ipv4(self) -> list[LinkAddress]:
        whole = (one for one in self.addr_info if one.local and one.prefixlen is not None)
        return [one for one in whole if one.family == "inet"]


@dataclass(frozen=True)
class FileSystem:
    """Of findmnt."""

    source: str
    fstype: str
    options: str


@dataclass(frozen=True)
class Disk:
    """Of lsblk."""

    name: str = ""
    fstype: str | None = None
    label: str | None = None
    uuid: str | None = None
    size: str | None = None
    mountpoint: str | None = None


def machine(facts, host, address="", folders=(), gpus=None):
    """What machine_facts returned, asked by this address and about these folders; gpus: what the
    inventory says of its cards."""
    found = read(facts, MACHINE, host)
    lacking = [folder for folder in folders if folder not in found["disks"]]
    if lacking:
        raise _impossible(host, f"it says nothing of the disk of {lacking[0]}")
    cards = (link["name"] for link in found["links"] if address in link["addresses"])
    interface = next(cards, None)
    return {**found, "interface": interface, "host": host, "gpus_counted": counted(gpus, host)}


def counted(gpus, host):
    """How many of a machine's cards take part by the inventory's `gpus`; None: all."""
    if gpus in (None, ""):
        return None
    if not re.fullmatch("[0-9]{1,4}", str(gpus)):
        raise PlanError(f"{host}: gpus is {gpus!r} in the inventory: write a number, 0 for none")
    return int(gpus)


def driver(facts, host):
    """What driver_facts returned."""
    return read(facts, DRIVER, host)


def setting(variables, name, host, default=""):
    """A text that the inventory says of a machine."""
    value = variables.get(name, default)
    if not isinstance(value, str):
        raise PlanError(f"{host}: {name} in the inventory is {str(value)[:40]!r}, which is no text")
    return value


def recorded(facts):
    """The facts of one machine in a file of facts, which may lack some; of one that role reach set
    aside only what its shell said."""
    of_shell = {"like": str, "container": str, "python": (VERSION, One(("",)))}
    return some(facts, {**MACHINE, **DRIVER, **of_shell, "host": str}, "a machine")


def proven(machines):
    """[{"host", "names", "precisions"}] of those whose products were right, by role prove's command
    in their variables."""
    proofs = []
    for machine in machines:
        host, done = machine["inventory_hostname"], machine.get("prove_cards", {})
        if done.get("rc") == 0 and isinstance(done.get("stdout"), str):
            try:
                proofs.append({"host": host, **read(parsed(done.get("stdout"), host), PROOF, host)})
            except PlanError:
                continue  # what it printed is no proof
    return proofs


def read(value, shape, what):
    """What the shape says of the value; PlanError where it says something else. str: of any size
    that a program may print."""
    if shape is str:
        if not isinstance(value, str) or len(value) > TEXT:
            raise _impossible(what, "it is no text, or too long")
        return LONE.sub("\ufffd", value)
    try:
        return check(value, shape, what)
    except Invalid as error:
        raise _impossible(what, error) from None


def some(value, shapes, what):
    """The same of those parts of a mapping that it has."""
    if not isinstance(value, dict):
        raise _impossible(what, "it is no mapping")
    return read(value, {name: shapes[name] for name in shapes if name in value}, what)


def parsed(text, what):
    """What a program printed as JSON."""
    try:
        return parse(read(text, str, what))
    except Invalid:
        raise _impossible(what, "it is no JSON") from None


def _impossible(what, wrong):
    return PlanError(
        f"{what}: {wrong}. The machine reports what cannot be: see what is wrong with it, or take "
        "it out of the inventory"
    )
