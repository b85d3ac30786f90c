"""What the programs of launcher/node/ answer when they are asked before a run."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from boundary.schema import Count, Integer, Number, Port, Sha256, Text, matching
from contract import layout

MOST_PACKAGES, MOST_GPUS = 5000, 64  # of a machine
Version = Annotated[str, matching(r"[A-Za-z0-9.+!_-]{1,100}")]
# Any file's name, in ASCII (urllib.parse.quote).
QuotedName = Annotated[str, Meta(pattern=r"^[\w.~/%-]+\Z", max_length=3 * 4096)]
Interface = Annotated[str, matching(r"[^\s/]{1,15}")]


class Versions(Struct, frozen=True):
    """`cuda` is the one that torch was built for."""

    python: Version | None
    torch: Version | None
    torchvision: Version | None
    nccl: Version | None
    cuda: Version | None


class Gpu(Struct, frozen=True):
    """`sm` is 10 x major + minor of its compute capability, None where the driver does not say;
    `pci` the number of its PCI device."""

    name: Text
    uuid: Text
    pci: Text | None
    sm: Annotated[int, Meta(ge=10, lt=1000)] | None


class GpuProcess(Struct, frozen=True):
    pid: Count
    user: Text
    command: Text


class Gpus(Struct, frozen=True):
    """In the order of nvidia-smi; `on_bus` counts NVIDIA's, with a driver or without."""

    cards: Annotated[list[Gpu], Meta(max_length=MOST_GPUS)]
    driver: Text | None
    processes: list[GpuProcess]
    error: Text | None
    on_bus: Count


class Claim(Struct, frozen=True):
    """A run that has the machine. `seconds`: for how long."""

    pid: Count
    run: Text
    holder: Text
    seconds: Count


class Listing(Struct, frozen=True):
    """One split of a data set, or all files of a folder, whose number is `images`. `sha256` is of
    its names and sizes, `note` what is not read."""

    classes: Count
    images: Count
    sha256: Sha256
    note: Annotated[str, matching(rf"[^\x00-\x1f]{{0,{layout.NOTE}}}")]
    bytes: Count = 0  # of all files; 0 if they are images


class DataSet(Struct, frozen=True):
    """`others`: the names of those beside one that is missing."""

    exists: bool
    problem: Text | None
    splits: dict[Text, Listing]
    others: list[Text]


class NodeFacts(Struct, frozen=True):
    """What launcher/node/probe.py answers on one machine, of what it was asked. `missing` of the
    packages, `free_ports` of the ports; `interfaces` by peer; `toolkit`: cuda_home is one, where
    there is any."""

    unix: Number
    home: Annotated[str, matching(r"/[^\x00-\x1f]*")]
    cores: Annotated[int, Meta(ge=1, lt=1 << 20)]
    cpu_flags: list[Literal["avx512_bf16", "amx_bf16"]]  # precisions.BF16_FLAGS
    machine: Text
    versions: Versions
    missing: list[Text]
    distributions: Annotated[
        dict[Text, Annotated[str, matching(r"[\w.+!-]{1,100}")]], Meta(max_length=MOST_PACKAGES)
    ]
    glibc: Annotated[int, Meta(ge=0, lt=1000)]
    architecture: Annotated[str, matching(r"[a-z0-9_]{1,20}")]
    gpus: Gpus
    runs: list[Claim]
    toolkit: bool
    interfaces: dict[Text, Interface | None]
    free_ports: list[Port]
    data: DataSet
    disk_free: Count
    writable: bool
    guard_python: bool
    # By this machine: its name, and by how many seconds its clock is ahead of ours, at least.
    host: str = ""
    skew: float = 0.0

    def absolute(self, folder: str) -> str:
        """An absolute path on this machine; relative ones begin at the run user's home."""
        return folder if folder.startswith("/") else f"{self.home}/{folder}"

    @property
    def python(self) -> str:
        """3.11, for which packages are made."""
        return ".".join(str(self.versions.python).split(".")[:2])


class Unreached(Struct, frozen=True):
    """A machine that another does not reach by TCP."""

    address: Text
    port: Port
    why: Text


class OwnerAnswer(Struct, frozen=True):
    """`sign`: one of those that were looked for, "" for none."""

    sign: Literal["", "asked", "seat", "processors", "card"]


class FileNames(Struct, frozen=True):
    """Files that are counted, and the first of their names."""

    count: Count
    first: Annotated[list[QuotedName], Meta(max_length=5)]


class LaidOut(Struct, frozen=True):
    """launcher/node/work.py: the sent files instead of which the run keeps its own versions."""

    kept: FileNames
    problem: Text | None


class WorkFiles(Struct, frozen=True):
    """launcher/node/work.py: name, size and time in nanoseconds of `count` files or the newest, and
    the targets of links."""

    files: list[tuple[QuotedName, Count, Integer]]
    count: Count
    others: dict[Literal["sent", "links", "not regular files", "unreadable there"], FileNames]
    links: Annotated[dict[QuotedName, QuotedName], Meta(max_length=100)] = {}
