"""Define the types of the facts about a machine: of those that Ansible's modules return, and of the
output of programs that roles call. ansible/planning/reading.py reads facts into these types. Only
the length of a program's output is limited here: the code that searches it checks its content."""

from __future__ import annotations

import typing
from typing import Annotated, Literal

from msgspec import Meta, Struct, defstruct, field

from boundary.schema import Integer, Number, Text, UnixTime, matching

MAX_PRINTED = 1 << 22  # characters of the output of one program
Printed = Annotated[str, Meta(max_length=MAX_PRINTED)]
# A version such as 6.1.0-31-amd64. The version of a package may look like 2:535.261.03-1.
_VERSION = r"[0-9]{1,9}(\.[0-9]{1,9}){0,9}[\w.+~:-]{0,100}"
Version = Annotated[str, matching(_VERSION)]
PackageVersion = Annotated[str, matching(r"([0-9]{1,9}:)?[0-9]{1,9}[\w.+~:-]{0,200}")]
Hex = Annotated[str, matching(r"[0-9a-f]{1,8}")]  # the number of a PCI vendor or device
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
Ipv4 = Annotated[str, matching(rf"{_BYTE}(\.{_BYTE}){{3}}")]
Network4 = Annotated[str, matching(rf"{_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])")]
# The output of `id`: uid=1000(anna) gid=1000(anna) groups=1000(anna),27(sudo).
IDS = r"uid=([0-9]{1,10})\S* gid=([0-9]{1,10}).*"


class Process(Struct, frozen=True):
    """A process; `command` is None if it has ended meanwhile."""

    pid: Integer
    command: Text | None


class Pci(Struct, frozen=True):
    """A graphics card, by its numbers of vendor and device on the PCI bus: 10de and 1e04."""

    vendor: Hex
    device: Hex


class Disk(Struct, frozen=True):
    """The disk of a folder. `free`: bytes. `free_inodes`: None if the file system has no limit.
    `device`: the number of the file system."""

    free: Number
    free_inodes: Number | None
    read_only: bool
    device: Integer


class Link(Struct, frozen=True):
    """A network interface. `speed`: Mbit/s. `physical`: it has hardware. `tunnel`: it belongs to a
    VPN. `networks`: the addresses with the lengths of their prefixes."""

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
    """A mount of /etc/fstab, which is not mounted. `type`: its file system, such as nfs4."""

    path: Text
    type: Text


class AptSource(Struct, frozen=True):
    """A source of packages that apt cannot use, and the file that lists the source."""

    source: Text
    file: Text | None
    unsigned: bool = False  # the source answers, but its signature is not valid


class ShellFacts(Struct, frozen=True, kw_only=True):
    """The answers of a machine's shell before any module can run there (planning/looks.py)."""

    host: Text = ""  # the machine's name in the inventory
    distribution: Text | None  # ID of /etc/os-release, such as ubuntu
    release: Text | None  # VERSION_ID of /etc/os-release
    kernel: Text
    arch: Text
    python: Text
    like: Text = ""  # ID_LIKE of /etc/os-release: the distributions that this one resembles
    container: Text = ""  # its kind; "" or none outside a container
    # Added by the control node: driver_policy is keep on this machine.
    driver_kept: bool = False


class PlanFacts(ShellFacts, frozen=True, kw_only=True):
    """The facts from which Tandem plans the stack, the driver and the toolkit. machine_facts.py
    returns them, and on a machine with a GPU driver_facts.py returns the second half: DRIVER_FIELDS
    depends on the order of the fields."""

    kernel: Version
    python: Version
    glibc: Version
    gcc: Version | None
    driver: Version | None  # of the loaded module
    # The version of the library that programs load. An upgrade changes it before the next boot.
    driver_library: Version | None
    kernel_headers: bool  # of the running kernel, with which DKMS compiles a module
    nouveau: bool  # the kernel has loaded this driver instead of NVIDIA's
    broken: Text | None  # why apt refuses to install anything
    secure_boot: bool | None
    boot_passphrases: list[Text]  # encrypted disks, for which a person types at each boot
    toolkits: dict[Text, Version | None]  # {folder: version} of CUDA toolkits that others installed
    gpus: list[Pci]
    # NVIDIA's devices that are reserved for virtual machines.
    passed_through: list[Hex] = field(default_factory=list)
    prime: Text | None = None  # a laptop's choice of a GPU, by prime-select: on, on-demand or off
    # Added by the control node: the number of GPUs that runs use (None: all).
    gpus_counted: int | None = None
    # From here to `free`: facts of driver_facts.py; the default if the module did not run.
    packages: dict[Text, PackageVersion] = field(default_factory=dict)  # installed
    offered: dict[Text, PackageVersion] = field(default_factory=dict)  # by apt
    displays: list[Process] = field(default_factory=list)  # they draw on a screen
    gpu_processes: list[Process] = field(default_factory=list)  # they compute on a GPU
    dkms: bool = False  # DKMS can build a driver for another kernel
    pending: bool = False  # an earlier change of the driver was interrupted
    display_manager_active: bool = False
    waiting_kernel: Version | None = None  # the kernel of the next boot, if it is another one
    # The driver that NVIDIA's own installer installed, "0" if its version is unknown.
    runfile: Version | None = None
    # The versions of NVIDIA's modules that are installed for the waiting and the running kernel.
    waiting_module: Text | None = None
    module: Text | None = None
    signing_key: Text | None = None  # the file of the key by which DKMS signs modules
    display_manager: Text | None = None  # the unit of the login screen
    # The series of the metapackage that brings the kernel, such as generic-hwe-24.04.
    kernel_series: Text | None = None
    held: list[Text] = field(default_factory=list)  # packages with apt-mark hold
    held_by_us: list[Text] = field(default_factory=list)  # by role driver
    seated: list[Text] = field(default_factory=list)  # users at the machine's screen
    # {names of packages, joined by blanks: modules and kernels that apt would also install}.
    prebuilt: dict[Text, list[Text]] = field(default_factory=dict)
    # {names of packages, joined by blanks: why apt cannot install them}.
    uninstallable: dict[Text, Text] = field(default_factory=dict)
    # {package: the package of another branch to which it leads}, of installed and of offered ones.
    transitional: dict[Text, Text] = field(default_factory=dict)
    offered_transitional: dict[Text, Text] = field(default_factory=dict)
    # The major version of the gcc that built the running kernel.
    kernel_compiler: Annotated[str, matching("[0-9]{1,4}")] | None = None
    free: dict[Text, Number] = field(default_factory=dict)  # bytes, by folder


class MachineFacts(PlanFacts, frozen=True, kw_only=True):
    """All facts that machine_facts.py and driver_facts.py return about a machine."""

    codename: Text | None  # of the distribution's release
    python_venv: bool
    systemd: bool
    firewalld: bool
    dpkg_broken: bool
    rsync: bool
    conda: Version | None  # its Python
    uv: bool
    machine_id: Text | None
    interface: Text | None  # with the machine's address of the inventory
    # The hardware address of another machine that answers to this machine's address.
    address_owner: Text | None
    reboot_waits: Text | None  # the update that waits for a reboot
    xids: list[Integer]  # the numbers of NVIDIA's errors in the kernel's log
    environments: list[Text]  # the names of complete Python environments
    loopback_names: list[Text]  # names with a loopback address in /etc/hosts
    missing_libraries: list[Text]  # folders in LD_LIBRARY_PATH that do not exist
    memory: Integer  # bytes
    hostname: Text
    ufw_conf: Text  # the content of /etc/ufw/ufw.conf
    clock: UnixTime
    # When role driver last changed its holds, in Unix seconds; None if it holds no kernel.
    held_since: Number | None
    disks: dict[Text, Disk]  # by folder
    links: list[Link]
    apt_lock: Process | None
    missing_mounts: list[Mount]
    dead_sources: list[AptSource]
    sudo: bool = False  # added by the control node: sudo works on this machine


# The names of the fields that driver_facts.py returns.
_NAMES = PlanFacts.__struct_fields__
DRIVER_FIELDS = _NAMES[_NAMES.index("packages") : _NAMES.index("free") + 1]
_HINTS = typing.get_type_hints(PlanFacts, include_extras=True)
# A struct of these fields without defaults: driver_facts.py must return all of them.
DriverFacts = defstruct("DriverFacts", [(name, _HINTS[name]) for name in DRIVER_FIELDS])


class Proof(Struct, frozen=True):
    """The output of proof.py about a machine's GPUs: the models' names, and the precisions in which
    all of them have computed."""

    names: list[Text]
    precisions: list[Literal["fp32", "fp16", "bf16"]]


class Reader(Struct, frozen=True):
    """The facts about a client on which a share's options depend. `ids`: the output of `id`."""

    kernel: Version
    speed: Integer  # of the network, in Mbit/s
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
    """Ansible's facts about a machine, reduced to the names of network interfaces."""

    interfaces: list[Text]


class Address(Struct, frozen=True):
    """An address of a network interface in Ansible's facts."""

    address: Text
    prefix: Annotated[str, matching("[0-9]{1,3}")] | Integer


class Interface(Struct, frozen=True):
    """A network interface in Ansible's facts, which may omit any field. `interfaces`: the ports of
    a bridge. `pciid`: its device on a bus; None without hardware."""

    ipv4: Address | None = None
    ipv4_secondaries: list[Address] = field(default_factory=list)
    ipv6: list[Address] = field(default_factory=list)
    interfaces: list[Text] = field(default_factory=list)
    pciid: Text | None = None

    @property
    def addresses(self) -> list[Address]:
        """Return all addresses, IPv4 first."""
        return [*([self.ipv4] if self.ipv4 else []), *self.ipv4_secondaries, *self.ipv6]


class LinkAddress(Struct, frozen=True):
    """An address in `ip -json address`. iproute2 4.15 prints {} for an omitted address."""

    family: Text | None = None
    local: Text | None = None
    prefixlen: Integer | None = None
    dynamic: bool = False


class IpLink(Struct, frozen=True):
    """An interface in `ip -json address`. `master`: the bridge or bond that it belongs to. `link`:
    the interface below, if it is a VLAN. `address`: the hardware address."""

    ifname: Text = ""
    master: Text = ""
    link: Text = ""
    address: Text = ""
    mtu: Integer = 1500
    addr_info: list[LinkAddress] = field(default_factory=list)

    @property
    def ipv4(self) -> list[LinkAddress]:
        """Return the complete IPv4 addresses."""
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
    """The output of `findmnt --json`."""

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
    """The output of `lsblk --json`."""

    blockdevices: list[BlockDevice]
