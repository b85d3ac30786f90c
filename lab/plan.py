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
MAX_NODES = 64  # node 64 is .174; the stranger and the broadcast address come later
RELEASES = ("bookworm", "bullseye")


class LabError(Exception):
    """A sentence for the user: what is wrong, why, and what to do."""


@dataclass(frozen=True)
class Node:
    """One machine of a lab; `index` counts from 1."""

    lab: str
    index: int

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def machine(self) -> str:
        """The name by which systemd-nspawn knows it: unlike `name`, unique among labs."""
        return f"{self.lab}-{self.name}"

    @property
    def address(self) -> str:
        return f"{NETWORK}.{110 + self.index}"

    @property
    def netns(self) -> str:
        return self.machine

    @property
    def port(self) -> str:
        """The end of its cable at the switch, an interface of the control machine's namespace."""
        return f"p{self.index}"

    @property
    def disk(self) -> Path:
        return DISKS / self.lab / self.name

    @property
    def console(self) -> Path:
        return STATE / self.lab / f"{self.name}.console"


@dataclass(frozen=True)
class Lab:
    """One lab, as asked for by `up`."""

    name: str
    checkout: Path
    count: int = 4
    rate: Optional[str] = None
    release: str = "bookworm"
    bare: bool = False
    vm: bool = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(self.name, index) for index in range(1, self.count + 1))

    def node(self, index: int) -> Node:
        if not 1 <= index <= self.count:
            raise LabError(f"lab {self.name} has the nodes 1 to {self.count}, but no node {index}")
        return Node(self.name, index)

    @property
    def state(self) -> Path:
        return STATE / self.name

    @property
    def user(self) -> str:
        """Who logs in: a desktop's user where nothing was prepared, else the cluster's."""
        return "student" if self.bare else "tandem"

    def netns(self, place: str) -> str:
        """Namespace of `control` or `stranger`."""
        return f"{self.name}-{place}"

    @property
    def envs(self) -> Path:
        return CACHE / "envs" / self.release


def default_name(checkout: Path) -> str:
    """Two checkouts have two labs, wherever they lie."""
    return "tandem-" + hashlib.sha256(str(checkout.resolve()).encode()).hexdigest()[:8]


def check_name(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise LabError(
            f"lab name {name!r}: use up to 32 lower-case letters, digits, dashes, a letter first"
        )
    return name


def check_count(count: int) -> int:
    if not 1 <= count <= MAX_NODES:
        raise LabError(f"a lab has 1 to {MAX_NODES} nodes, not {count}")
    return count


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
    """What a token bucket may send at once: 2 ms of the rate, at least one segment of 64 KiB."""
    return max(65536, round(bits_per_second(rate) / 8 * 0.002))
