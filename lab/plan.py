"""Compute the names and addresses of a lab, and check its options, without touching the host.

All other modules of this package take their names, addresses and folders from a Lab and its Nodes.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

STATE = Path("/run/tandem-lab")
DISKS = Path("/var/lib/tandem-lab")
CACHE = Path("/var/cache/tandem-lab")
NETWORK = "192.168.56"
CONTROL_ADDRESS = f"{NETWORK}.1"
STRANGER_ADDRESS = f"{NETWORK}.200"
MAX_NODES = 64  # node 64 is .174; the stranger's and the broadcast address are higher
# Debian's releases in ansible/releases.yml, in lines like `  bookworm: {distribution: debian, ...`.
# A pattern reads the lines, because the lab has no PyYAML. The first release is the default.
RELEASE_NAMES = re.findall(
    r"^  (\w+): \{distribution: debian,",
    (Path(__file__).resolve().parents[1] / "ansible/releases.yml").read_text(),
    re.MULTILINE,
)
RELEASES = tuple(sorted(RELEASE_NAMES, key=lambda name: name != "bookworm"))
MACHINE_MEGABYTES = 384  # with less memory a virtual machine does not boot


class LabError(Exception):
    """An error that the user can repair: its sentence has the thing, the cause and the remedy."""


@dataclass(frozen=True)
class System:
    """Describe a fresh machine. Nodes with equal systems share a base (base.py)."""

    release: str = "bookworm"
    vm: bool = False
    packages: tuple[str, ...] = ()  # Debian packages besides those of every machine


@dataclass(frozen=True)
class Node:
    """Describe a machine of a lab; `index` counts from 1."""

    lab: str
    index: int
    system: System = System()  # System is immutable, so an instance may be a default

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def machine(self) -> str:
        """Return the machine's name for systemd-nspawn. Unlike `name`, it is unique in all labs."""
        return f"{self.lab}-{self.name}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{110 + self.index}"

    @property
    def netns(self) -> str:
        return self.machine

    @property
    def port(self) -> str:
        """Return the switch's end of the node's cable, an interface of the control node."""
        return f"p{self.index}"

    @property
    def disk(self) -> Path:
        return DISKS / self.lab / self.name

    @property
    def console(self) -> Path:
        return STATE / self.lab / f"{self.name}.console"

    @property
    def envs(self) -> Path:
        """Return the host's folder that is mounted as /opt/tandem/envs."""
        return CACHE / "envs" / self.system.release


@dataclass(frozen=True)
class Lab:
    """Describe a lab, with the options of `up`."""

    name: str
    checkout: Path
    count: int = 4
    rate: Optional[str] = None  # of each cable, like 1gbit; None: not limited
    releases: tuple[str, ...] = ("bookworm",)  # Debian's: one for all nodes, or one per node
    bare: bool = False  # as installed: password logins, and no key
    vm: bool = False  # virtual machines, not containers
    packages: tuple[str, ...] = ()
    cpus: int = 1  # for each virtual machine, like megabytes
    megabytes: int = MACHINE_MEGABYTES

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.node(index) for index in range(1, self.count + 1))

    def node(self, index: int) -> Node:
        if not 1 <= index <= self.count:
            raise LabError(f"lab {self.name} has the nodes 1 to {self.count}, but no node {index}")
        release = self.releases[(index - 1) % len(self.releases)]
        return Node(self.name, index, System(release, self.vm, self.packages))

    @property
    def state(self) -> Path:
        return STATE / self.name

    @property
    def user(self) -> str:
        """Return the user that logs in: a desktop's user on bare machines, else the cluster's."""
        return self.users[0]

    @property
    def users(self) -> tuple[str, ...]:
        """Return the users of each machine: the installer's on bare machines, else those that `make
        bootstrap` makes."""
        # In a lab `tandem` may use sudo, unlike after `make bootstrap`: tests change machines.
        return ("student",) if self.bare else ("tandem", "tandem-admin")

    def netns(self, place: str) -> str:
        """Return the namespace of `control` or `stranger`."""
        return f"{self.name}-{place}"


def choose_name(name: Optional[str], checkout: Path) -> str:
    """Return the name if commands and namespaces can contain it. Without a name, make one from the
    path of the checkout, so that no other checkout has it. Raises LabError."""
    if not name:
        return "tandem-" + hashlib.sha256(str(checkout.resolve()).encode()).hexdigest()[:8]
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise LabError(
            f"lab name {name!r}: use up to 32 lower-case letters, digits and dashes, a letter first"
        )
    return name


def check_releases(text: str, count: int) -> tuple[str, ...]:
    """Return the releases in a text like `bookworm`, or `bookworm,bullseye` for two nodes. Raises
    LabError."""
    names = tuple(text.split(","))
    for name in names:
        if name not in RELEASES:
            raise LabError(f"release {name!r}: a lab has one of {', '.join(RELEASES)}")
    if len(names) not in (1, count):
        raise LabError(
            f"{len(names)} releases for {count} nodes: name one for all, or one for each node"
        )
    return names


def check_packages(text: str) -> tuple[str, ...]:
    """Return the names of Debian packages in a comma-separated list, sorted and without duplicates.
    Raises LabError."""
    names = sorted({name for name in text.split(",") if name})
    for name in names:
        if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name):
            raise LabError(f"--with {name!r}: this is not the name of a Debian package")
    return tuple(names)


def check_hardware(vm: bool, cpus: Optional[int], megabytes: Optional[int]) -> tuple[int, int]:
    """Return (processors, MB of memory) of each virtual machine; None stands for the default.
    Raises LabError."""
    if not vm and (cpus or megabytes):
        raise LabError("--cpus and --memory are for virtual machines: other nodes use the host's")
    cpus = 1 if cpus is None else cpus
    megabytes = MACHINE_MEGABYTES if megabytes is None else megabytes
    if cpus < 1:
        raise LabError(f"a machine has at least 1 processor, not {cpus}")
    if megabytes < MACHINE_MEGABYTES:
        raise LabError(
            f"a machine needs at least {MACHINE_MEGABYTES} MB of memory, not {megabytes}"
        )
    return cpus, megabytes


def check_rate(rate: str) -> Optional[str]:
    """Return a rate like `1gbit`, `100mbit` or `2.5gbit`; None for `unshaped`. Raises LabError."""
    if rate == "unshaped":
        return None
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate) or not bits_per_second(rate):
        raise LabError(f"rate {rate!r}: write it as 1gbit, 100mbit, 512kbit or unshaped")
    return rate


def bits_per_second(rate: str) -> float:
    """Return the value of a rate like `2.5gbit`, which is a number, a letter and `bit`."""
    number, letter = rate[: -len("gbit")], rate[-len("gbit")]
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[letter]


def burst_bytes(rate: str) -> int:
    """Return the bytes that a token bucket may send at once: 2 ms at this rate."""
    # TCP hands over up to 64 KiB at once, plus headers, which the kernel should not have to split.
    return max(72 * 1024, round(bits_per_second(rate) / 8 * 0.002))
