"""Define the types of the answers that launcher/node/'s programs print before a run: probe.py
(NodeFacts), reach.py, owner.py and work.py. The launcher decodes the answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from boundary.schema import Count, Integer, Number, Port, Sha256, Text, matching
from contract import layout

# Limits far beyond those of any machine: a false answer must not fill the memory.
MOST_PACKAGES, MOST_GPUS = 5000, 64
Version = Annotated[str, matching(r"[A-Za-z0-9.+!_-]{1,100}")]
# The name of a file, with escapes for characters that are not ASCII (urllib.parse.quote).
QuotedName = Annotated[str, Meta(pattern=r"^[\w.~/%-]+\Z", max_length=3 * 4096)]
Interface = Annotated[str, matching(r"[^\s/]{1,15}")]


class Versions(Struct, frozen=True):
    """The versions of the environment's Python and of its packages; None if missing."""

    python: Version | None
    torch: Version | None
    torchvision: Version | None
    nccl: Version | None
    # The CUDA version that torch was built for. The driver may have another version.
    cuda: Version | None


class Gpu(Struct, frozen=True):
    name: Text
    uuid: Text
    pci: Text | None  # the number of the PCI device, such as 1e07
    # 10 x major + minor of the compute capability. Old drivers do not report it.
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
    # The number of NVIDIA's devices on the PCI bus, also without a driver.
    on_bus: Count


class Claim(Struct, frozen=True):
    """A run that has used the machine for `seconds`. `holder`: the person who started the run."""

    pid: Count
    run: Text
    holder: Text
    seconds: Count


class Listing(Struct, frozen=True):
    """The listing of a split, or of a data set of the kind `files`, whose files count as
    `images`."""

    classes: Count
    images: Count
    sha256: Sha256  # of the names and sizes of its files
    # A clause on files that are not read.
    note: Annotated[str, matching(rf"[^\x00-\x1f]{{0,{layout.NOTE_CHARACTERS}}}")]
    bytes: Count = 0  # of all files; 0 if they are images


class DataSet(Struct, frozen=True):
    """The data of a run on a machine. `problem`: why the folder is not a data set."""

    exists: bool
    problem: Text | None
    splits: dict[Text, Listing]
    # The names of data sets in the same folder, if this data set is missing.
    others: list[Text]
    changed: int = 0  # when the folder itself was changed, in microseconds


class NodeFacts(Struct, frozen=True):
    """The answer of launcher/node/probe.py, about the packages, ports and paths in question."""

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
    # Added by the control node: the name, and the seconds by which the machine's clock certainly is
    # ahead of the control node's. The true skew is larger by up to the time that the answer took.
    host: str = ""
    skew: float = 0.0

    def absolute(self, folder: str) -> str:
        """Return the absolute path of a folder; a relative one is in the run user's home."""
        return folder if folder.startswith("/") else f"{self.home}/{folder}"

    @property
    def python(self) -> str:
        """Return the version of Python that packages are built for, such as 3.11."""
        return ".".join(str(self.versions.python).split(".")[:2])


class Unreached(Struct, frozen=True):
    """A peer that a machine cannot reach by TCP."""

    address: Text
    port: Port
    why: Text


class OwnerAnswer(Struct, frozen=True):
    # The first of the requested signs that the owner uses the machine; "" for none.
    sign: Literal["", "asked", "seat", "processors", "card"]


class FileNames(Struct, frozen=True):
    """The number of some files, and the names of the first few."""

    count: Count
    first: Annotated[list[QuotedName], Meta(max_length=5)]


class LaidOut(Struct, frozen=True):
    """The answer of launcher/node/work.py to sent files."""

    kept: FileNames  # sent files that were not written, because the run has changed its copies
    problem: Text | None


class WorkFiles(Struct, frozen=True):
    """The answer of launcher/node/work.py to a question about written files."""

    # (name, bytes, time in nanoseconds) of the newest files. `count` is the number of all.
    files: list[tuple[QuotedName, Count, Integer]]
    count: Count
    others: dict[Literal["sent", "links", "not regular files", "unreadable there"], FileNames]
    # {link: its target}
    links: Annotated[dict[QuotedName, QuotedName], Meta(max_length=100)] = {}
