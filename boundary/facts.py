"""The facts that Ansible's modules, and programs that roles call, report about a machine.

The output of programs is only bounded here; its readers search it.
"""

from __future__ import annotations

import typing
from typing import Annotated, Literal

from msgspec import Meta, Struct, defstruct, field

from boundary.schema import Integer, Number, Text, matching

PRINTED = 1 << 22  # characters of what one program prints
Printed = Annotated[str, Meta(max_length=PRINTED)]
# Such as 6.1.0-31-amd64; the version of a package may look like 2:535.261.03-1.
_VERSION = r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}[\w.+~:-]{0,100}"
Version = Annotated[str, matching(_VERSION)]
PackageVersion = Annotated[str, matching(r"([0-9]{1,9}:)?[0-9]{1,9}[\w.+~:-]{0,200}")]
Hex = Annotated[str, matching(r"[0-9a-f]{1,8}")]
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
Ipv4 = Annotated[str, matching(rf"{_BYTE}(\.{_BYTE}){{3}}")]
Network4 = Annotated[str, matching(rf"{_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])")]
IDS = r"uid=([0-9]{1,10})\S* gid=([0-9]{1,10}).*"  # what `id` prints


class Process(Struct, frozen=True):
    pid: Integer
    command: Text | None


class Pci(Struct, frozen=True):
    """A display controller."""

    vendor: Hex
    device: Hex


class Disk(Struct, frozen=True):
    """The disk of a folder; `device`: the number of its file system."""

    free: Number
    free_inodes: Number | None
    read_only: bool
    device: Integer


class Link(Struct, frozen=True):
    """A network interface; `speed` in Mbit/s, `networks` with the lengths of prefixes."""

    name: Text
    mac: Text | None
    mtu: Integer
    speed: Integer | None
    duplex: Text | None
    wireless: bool
    tunnel: bool
    physical: bool
    addresses: list[Ipv4]
    networks: list[Network4]


class Mount(Struct, frozen=True):
    path: Text
    type: Text


class AptSource(Struct, frozen=True):
    """A source of packages, and the file that lists it."""

    source: Text
    file: Text | None
    # It answers, but apt knows no valid signature of it.
    unsigned: bool = False


class ShellFacts(Struct, frozen=True, kw_only=True):
    """The answers of a machine's shell before any module can run there (planning/looks.py)."""

    host: Text = ""
    distribution: Text | None
    release: Text | None
    kernel: Text
    arch: Text
    python: Text
    like: Text = ""
    container: Text = ""
    # Added by the control node: driver_policy is keep on this machine.
    driver_kept: bool = False


class PlanFacts(ShellFacts, frozen=True, kw_only=True):
    """The facts from which stack, driver and toolkit are planned: of machine_facts.py, and, on a
    machine with a GPU, of driver_facts.py."""

    kernel: Version
    python: Version
    glibc: Version
    gcc: Version | None
    driver: Version | None
    driver_library: Version | None
    kernel_headers: bool
    nouveau: bool
    broken: Text | None
    secure_boot: bool | None
    boot_passphrases: list[Text]
    toolkits: dict[Text, Version | None]
    gpus: list[Pci]
    passed_through: list[Hex] = field(default_factory=list)
    prime: Text | None = None
    # Added by the control node: the number of GPUs that runs use (None: all).
    gpus_counted: int | None = None
    # From driver_facts.py; empty if it did not run.
    packages: dict[Text, PackageVersion] = field(default_factory=dict)
    offered: dict[Text, PackageVersion] = field(default_factory=dict)
    displays: list[Process] = field(default_factory=list)
    gpu_processes: list[Process] = field(default_factory=list)
    dkms: bool = False
    pending: bool = False
    display_manager_active: bool = False
    waiting_kernel: Version | None = None
    runfile: Version | None = None
    waiting_module: Text | None = None
    module: Text | None = None
    signing_key: Text | None = None
    display_manager: Text | None = None
    kernel_series: Text | None = None
    held: list[Text] = field(default_factory=list)
    held_by_us: list[Text] = field(default_factory=list)
    seated: list[Text] = field(default_factory=list)
    prebuilt: dict[Text, list[Text]] = field(default_factory=dict)
    uninstallable: dict[Text, Text] = field(default_factory=dict)
    transitional: dict[Text, Text] = field(default_factory=dict)
    offered_transitional: dict[Text, Text] = field(default_factory=dict)
    kernel_compiler: Annotated[str, matching("[0-9]{1,4}")] | None = None
    free: dict[Text, Number] = field(default_factory=dict)


class MachineFacts(PlanFacts, frozen=True, kw_only=True):
    """All facts that machine_facts.py and driver_facts.py return."""

    codename: Text | None
    python_venv: bool
    systemd: bool
    firewalld: bool
    dpkg_broken: bool
    rsync: bool
    conda: Version | None  # its Python
    uv: bool
    machine_id: Text | None
    interface: Text | None
    address_owner: Text | None
    reboot_waits: Text | None
    xids: list[Integer]
    environments: list[Text]
    loopback_names: list[Text]
    missing_libraries: list[Text]
    memory: Integer
    hostname: Text
    ufw_conf: Text
    clock: Number
    held_since: Number | None
    disks: dict[Text, Disk]
    links: list[Link]
    apt_lock: Process | None
    missing_mounts: list[Mount]
    dead_sources: list[AptSource]
    sudo: bool = False  # added by the control node: sudo works on this machine


_NAMES = PlanFacts.__struct_fields__
DRIVER = _NAMES[_NAMES.index("packages") : _NAMES.index("free") + 1]
_HINTS = typing.get_type_hints(PlanFacts, include_extras=True)
# The fields that driver_facts.py returns, as a struct of their own, in which none may lack.
DriverFacts = defstruct("DriverFacts", [(name, _HINTS[name]) for name in DRIVER])


class Proof(Struct, frozen=True):
    """The output of proof.py about a machine's GPUs."""

    names: list[Text]
    precisions: list[Literal["fp32", "fp16", "bf16"]]


class Reader(Struct, frozen=True):
    """The facts on which a share's options depend; `ids` is the output of `id`."""

    kernel: Version
    speed: Integer
    ids: Annotated[str, matching(IDS)]


class Smi(Struct, frozen=True):
    """The exit code and output of nvidia-smi."""

    rc: Integer
    text: Printed


class Unit(Struct, frozen=True):
    """A service in Ansible's facts."""

    state: Text = ""


class Services(Struct, frozen=True, rename={"firewalld": "firewalld.service"}):
    firewalld: Unit = Unit()


class Setup(Struct, frozen=True):
    """The names of network interfaces in Ansible's facts."""

    interfaces: list[Text]


class Address(Struct, frozen=True):
    """An address of a network interface in Ansible's facts."""

    address: Text
    prefix: Annotated[str, matching("[0-9]{1,3}")] | Integer


class Interface(Struct, frozen=True):
    """A network interface in Ansible's facts, which may lack any field."""

    ipv4: Address | None = None
    ipv4_secondaries: list[Address] = field(default_factory=list)
    ipv6: list[Address] = field(default_factory=list)
    interfaces: list[Text] = field(default_factory=list)
    pciid: Text | None = None

    @property
    def addresses(self) -> list[Address]:
        return [*([self.ipv4] if self.ipv4 else []), *self.ipv4_secondaries, *self.ipv6]


class LinkAddress(Struct, frozen=True):
    """An address in `ip -json address`; iproute2 4.15 prints {} for one that it filtered out."""

    family: Text | None = None
    local: Text | None = None
    prefixlen: Integer | None = None
    dynamic: bool = False


class IpLink(Struct, frozen=True):
    """An interface in `ip -json address`. `master`: the bridge or bond of a port; `link`: the
    interface below a VLAN."""

    ifname: Text = ""
    master: Text = ""
    link: Text = ""
    address: Text = ""
    mtu: Integer = 1500
    addr_info: list[LinkAddress] = field(default_factory=list)

    @property
    def ipv4(self) -> list[LinkAddress]:
        return [
            address
            for address in self.addr_info
            if address.local and address.prefixlen is not None and address.family == "inet"
        ]


class FileSystem(Struct, frozen=True):
    """A mount in the output of findmnt."""

    source: Text
    fstype: Text
    options: Text


class FileSystems(Struct, frozen=True):
    filesystems: list[FileSystem]


class BlockDevice(Struct, frozen=True):
    """A device in the output of lsblk, with the devices inside it."""

    name: Text = ""
    fstype: Text | None = None
    label: Text | None = None
    uuid: Text | None = None
    size: Text | None = None
    mountpoint: Text | None = None
    children: list[BlockDevice] = field(default_factory=list)


class BlockDevices(Struct, frozen=True):
    blockdevices: list[BlockDevice]
