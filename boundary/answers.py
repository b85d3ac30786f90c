"""The answers of the programs of launcher/node/ before a run."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from boundary.schema import Count, Integer, Number, Port, Sha256, Text, matching
from contract import layout

# Far beyond any machine; a hostile answer must not fill the memory.
MOST_PACKAGES, MOST_GPUS = 5000, 64  # of a machine
Version = Annotated[str, matching(r"[A-Za-z0-9.+!_-]{1,100}")]
# The name of any file, in ASCII (urllib.parse.quote).
QuotedName = Annotated[str, Meta(pattern=r"^[\w.~/%-]+\Z", max_length=3 * 4096)]
Interface = Annotated[str, matching(r"[^\s/]{1,15}")]


class Versions(Struct, frozen=True):
    python: Version | None
    torch: Version | None
    torchvision: Version | None
    nccl: Version | None
    # The version that torch was built for, not the one of the driver.
    cuda: Version | None


class Gpu(Struct, frozen=True):
    name: Text
    uuid: Text
    pci: Text | None  # the number of its PCI device
    # 10 x major + minor of its compute capability; old drivers do not report it.
    sm: Annotated[int, Meta(ge=10, lt=1000)] | None


class GpuProcess(Struct, frozen=True):
    pid: Count
    user: Text
    command: Text


class Gpus(Struct, frozen=True):
    """The GPUs in the order of nvidia-smi."""

    cards: Annotated[list[Gpu], Meta(max_length=MOST_GPUS)]
    driver: Text | None
    processes: list[GpuProcess]
    error: Text | None
    # NVIDIA's devices on the PCI bus, with a driver or without.
    on_bus: Count


class Claim(Struct, frozen=True):
    """A run that uses the machine, for `seconds` so far."""

    pid: Count
    run: Text
    holder: Text
    seconds: Count


class Listing(Struct, frozen=True):
    """One split of a data set, or all files of a folder, whose number is `images`."""

    classes: Count
    images: Count
    sha256: Sha256  # of the names and sizes of its files
    # A clause on files that are not read.
    note: Annotated[str, matching(rf"[^\x00-\x1f]{{0,{layout.NOTE}}}")]
    bytes: Count = 0  # of all files; 0 if they are images


class DataSet(Struct, frozen=True):
    exists: bool
    problem: Text | None
    splits: dict[Text, Listing]
    # The names of other data sets, if this one is missing.
    others: list[Text]
    changed: int = 0  # when the folder itself was changed, in microseconds


class NodeFacts(Struct, frozen=True):
    """The answer of launcher/node/probe.py on one machine, about the packages, ports and paths of
    the question."""

    unix: Number
    home: Annotated[str, matching(r"/[^\x00-\x1f]*")]
    cores: Annotated[int, Meta(ge=1, lt=1 << 20)]
    cpu_flags: list[Literal["avx512_bf16", "amx_bf16"]]  # precisions.BF16_FLAGS
    machine: Text
    versions: Versions
    missing: list[Text]  # packages
    distributions: Annotated[
        dict[Text, Annotated[str, matching(r"[\w.+!-]{1,100}")]], Meta(max_length=MOST_PACKAGES)
    ]
    glibc: Annotated[int, Meta(ge=0, lt=1000)]
    architecture: Annotated[str, matching(r"[a-z0-9_]{1,20}")]
    gpus: Gpus
    runs: list[Claim]
    toolkit: bool  # cuda_home is a CUDA toolkit
    interfaces: dict[Text, Interface | None]  # by peer
    free_ports: list[Port]
    data: DataSet
    disk_free: Count
    writable: bool
    guard_python: bool
    # Added by the control node: the name, and the least seconds by which the machine's clock is
    # ahead of ours. The true skew also contains the time of the answer's way.
    host: str = ""
    skew: float = 0.0

    def absolute(self, folder: str) -> str:
        """Return an absolute path on this machine; relative ones begin at the run user's home."""
        return folder if folder.startswith("/") else f"{self.home}/{folder}"

    @property
    def python(self) -> str:
        """The version that packages are built for, such as 3.11."""
        return ".".join(str(self.versions.python).split(".")[:2])


class Unreached(Struct, frozen=True):
    """A machine that another one cannot reach by TCP."""

    address: Text
    port: Port
    why: Text


class OwnerAnswer(Struct, frozen=True):
    # The first sign of the requested ones that the owner is at the machine; "" for none.
    sign: Literal["", "asked", "seat", "processors", "card"]


class FileNames(Struct, frozen=True):
    """The number of some files, and the first of their names."""

    count: Count
    first: Annotated[list[QuotedName], Meta(max_length=5)]


class LaidOut(Struct, frozen=True):
    """The answer of launcher/node/work.py to sent files."""

    kept: FileNames  # files of which the run already has another version, which it keeps
    problem: Text | None


class WorkFiles(Struct, frozen=True):
    """The answer of launcher/node/work.py to a question about written files."""

    # Name, size and time in nanoseconds; only the newest ones if `count` is larger.
    files: list[tuple[QuotedName, Count, Integer]]
    count: Count
    others: dict[Literal["sent", "links", "not regular files", "unreadable there"], FileNames]
    # The targets of links.
    links: Annotated[dict[QuotedName, QuotedName], Meta(max_length=100)] = {}
