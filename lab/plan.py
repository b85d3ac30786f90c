"""What a lab consists of: names and addresses, computed without touching the machine."""

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
# Debian's of ansible/releases.yml, by its text, since the lab has no PyYAML. The first is that of a
# lab for which none was named.
LISTED = re.findall(
    r"^  (\w+): \{distribution: debian,",
    (Path(__file__).resolve().parents[1] / "ansible/releases.yml").read_text(),
    re.MULTILINE,
)
RELEASES = tuple(sorted(LISTED, key=lambda name: name != "bookworm"))
MACHINE_MEGABYTES = 384  # for a virtual machine; with less it does not boot


class LabError(Exception):
    """A sentence for the user: what is wrong, why, and what to do."""


@dataclass(frozen=True)
class System:
    """What a machine is before anybody has set it up."""

    release: str = "bookworm"
    vm: bool = False
    packages: tuple[str, ...] = ()  # beyond those that every machine has


@dataclass(frozen=True)
class Node:
    """One machine of a lab; `index` counts from 1."""

    lab: str
    index: int
    system: System = System()  # immutable, so it may be a default

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def machine(self) -> str:
        """Its name for systemd-nspawn: unlike `name`, unique among all labs."""
        return f"{self.lab}-{self.name}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{110 + self.index}"

    @property
    def netns(self) -> str:
        return self.machine

    @property
    def port(self) -> str:
        """The switch's end of its cable, an interface in the control machine's namespace."""
        return f"p{self.index}"

    @property
    def disk(self) -> Path:
        return DISKS / self.lab / self.name

    @property
    def console(self) -> Path:
        return STATE / self.lab / f"{self.name}.console"

    @property
    def envs(self) -> Path:
        """The host's folder that is mounted as /opt/tandem/envs."""
        return CACHE / "envs" / self.system.release


@dataclass(frozen=True)
class Lab:
    """One lab, as asked for by `up`."""

    name: str
    checkout: Path
    count: int = 4
    rate: Optional[str] = None
    releases: tuple[str, ...] = ("bookworm",)  # one for all, or one per node
    bare: bool = False
    vm: bool = False
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

    def is_first_of_its_system(self, node: Node) -> bool:
        return next(each for each in self.nodes if each.system == node.system) == node

    @property
    def state(self) -> Path:
        return STATE / self.name

    @property
    def user(self) -> str:
        """The user that logs in: a desktop's user on bare machines, else the cluster's."""
        return self.users[0]

    @property
    def users(self) -> tuple[str, ...]:
        """On bare machines the installer's user; else the users that train and provision, as `make
        bootstrap` makes them, except that `tandem` may use sudo, for tests that change things."""
        return ("student",) if self.bare else ("tandem", "tandem-admin")

    def netns(self, place: str) -> str:
        """The namespace of `control` or `stranger`."""
        return f"{self.name}-{place}"


def default_name(checkout: Path) -> str:
    """A name of its own for each checkout, made from its path."""
    return "tandem-" + hashlib.sha256(str(checkout.resolve()).encode()).hexdigest()[:8]


def check_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise LabError(
            f"lab name {name!r}: use up to 32 lower-case letters, digits and dashes, a letter first"
        )
    return name


def check_count(count: int) -> int:
    if not 1 <= count <= MAX_NODES:
        raise LabError(f"a lab has 1 to {MAX_NODES} nodes, not {count}")
    return count


def check_releases(text: str, count: int) -> tuple[str, ...]:
    """`bookworm`, or one for each of `count` nodes: `bookworm,bullseye`."""
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
    """The names of Debian packages in a comma-separated list, sorted and without duplicates."""
    names = sorted({name for name in text.split(",") if name})
    for name in names:
        if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name):
            raise LabError(f"--with {name!r}: this is not the name of a Debian package")
    return tuple(names)


def check_hardware(vm: bool, cpus: Optional[int], megabytes: Optional[int]) -> tuple[int, int]:
    """(processors, MB of memory) of each virtual machine."""
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
    """`1gbit`, `100mbit`, `2.5gbit`; None for `unshaped`."""
    if rate == "unshaped":
        return None
    if not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", rate) or not bits_per_second(rate):
        raise LabError(f"rate {rate!r}: write it as 1gbit, 100mbit, 512kbit or unshaped")
    return rate


def bits_per_second(rate: str) -> float:
    return float(rate[:-4]) * {"k": 1e3, "m": 1e6, "g": 1e9}[rate[-4]]


def burst_bytes(rate: str) -> int:
    """Bytes that a token bucket may send at once: 2 ms at this rate, but no less than TCP hands
    over at once, 64 KiB and its packets' headers, which the kernel would otherwise split up."""
    return max(72 * 1024, round(bits_per_second(rate) / 8 * 0.002))
