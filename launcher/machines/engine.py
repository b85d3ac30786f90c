"""Defines Host, a machine of a run, and the interface to machines: Engine, Node and Process.

local.py, ssh.py and slurm.py each define an `ENGINE`, which reaches the machines with this
ansible_connection. A Node starts a command on its machine, and a Process streams the command's
output. The other functions here work with any engine. Read Process, Node and Engine first.
"""

from __future__ import annotations

import importlib
import resource
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Protocol, TypeVar

from contract.errors import UserError
from launcher.machines.owned import Owner
from launcher.machines.route import Route

STATUS_SECONDS = 5.0  # that Process.wait waits for an exit status
Thing = TypeVar("Thing")
Answer = TypeVar("Answer")


class MachineError(UserError):
    """Says what is wrong with machines of the run; `hosts` are their names in the inventory."""

    def __init__(self, hosts: list[str], *problems: str):
        super().__init__(*problems)
        self.hosts = hosts


class Busy(UserError):
    """Says that another run took a machine first, so that waiting helps."""


class Process(Protocol):
    """Controls one command on a machine. No method except `wait` blocks."""

    def fileno(self) -> int:
        """Return the descriptor for select(): it is readable if `read` has output or the end."""

    def read(self) -> bytes | None:
        """Return new output of stdout; b"" at the end; None if there is nothing yet."""

    def write(self, data: bytes | memoryview) -> int:
        """Return how many bytes the pipe accepted, perhaps 0. Raises OSError if it is closed."""

    def close_stdin(self) -> None: ...

    def wait(self, seconds: float = STATUS_SECONDS) -> int:
        """Return the exit status; -1 if the connection broke or no status came in time. Call it
        after read() has returned b""."""

    def stderr(self) -> str:
        """Return the end of the command's stderr, after the command has ended."""

    @property
    def broken(self) -> bool:
        """Return whether the connection was lost before the command ended."""

    def close(self) -> None:
        """Close the command's pipes. A guard ends all its processes, and itself, when its stdin is
        closed."""


class Node(Protocol):
    """Holds the connection to one machine."""

    @property
    def host(self) -> Host: ...

    def open(self) -> None:
        """Connect. Raises MachineError."""

    def start(self, argv: list[str]) -> Process:
        """Run a command. Raises MachineError if the connection to the machine broke."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Engine:
    """Describes a way to reach machines."""

    node: Callable[[Host], Node]  # makes a Node, which `open` connects
    is_local: bool  # files are on this machine, and relative paths begin at the checkout
    guard_python: str  # runs the guard
    repair_hint: str  # ends a sentence about an environment that lacks something
    data_hint: str  # ends a sentence about example images that are missing
    # Returns the machines of the job in which this process runs, if a system such as Slurm assigns
    # them. That system also ends all processes of the job, and ranks get the job's environment.
    machines: Callable[[], list[Host]] | None = None

    @property
    def in_job(self) -> bool:
        """Return whether the run is a job of a queue such as Slurm's."""
        return self.machines is not None


ENGINE_NAMES = ("local", "ssh")  # that an inventory may name; slurm has no inventory


def find_engine(name: str) -> Engine:
    """Return the engine of an ansible_connection: one of ENGINE_NAMES, or slurm."""
    # Imported late, because Fabric and paramiko would delay the start of local runs.
    engine: Engine = importlib.import_module(f"launcher.machines.{name}").ENGINE
    return engine


@dataclass(frozen=True)
class Host:
    """Describes one machine of group `cluster`, by its variables in the inventory. Its index in the
    list of hosts is its node rank. Paths on this machine are absolute. On other machines node_dir
    may be relative to the home of the run user."""

    name: str
    connection: str
    address: str
    port: int
    # The run user: train_user, or else ansible_user, as for run_user in group_vars/all.yml. None
    # means the user who starts the run.
    user: str | None
    env_python: str
    node_dir: str
    data_root: str
    gpus: int | None = None
    interface: str | None = None
    cuda_home: str | None = None
    env: dict[str, str] = field(default_factory=dict)  # run_env
    owner: Owner = field(default_factory=Owner)
    route: Route = field(default_factory=Route)
    copied: dict[str, str] = field(default_factory=dict)  # {data set: its control node's folder}
    data_server: str = ""  # the machine that shares data_root

    @property
    def engine(self) -> Engine:
        return find_engine(self.connection)

    def label(self) -> str:
        """Return the name and address of the machine, for people."""
        # All local nodes have the same address, so it is left out.
        return self.name if self.engine.is_local else f"{self.name} ({self.address})"

    def data_path(self, data: str) -> str:
        """Return the folder of the data on this machine. A name means a folder below data_root, and
        "" stays "". Raises UserError."""
        if not data:
            return ""
        if "/" not in data:
            return f"{self.data_root}/{data}"
        if Path(data).is_absolute():
            return data
        if self.engine.is_local:
            return str(Path(data).absolute())
        raise UserError(
            f"DATA={data}: {self.name} has no current folder for this relative path: type a "
            f"name in {self.data_root} or an absolute path."
        )


# Open files of this process: for each host a socket and the pipes of paramiko's channels. The usual
# limit of 1024 files suffices for 112 hosts.
FILES_PER_HOST, OTHER_FILES = 8, 128
MAX_ANSWER_BYTES = 4 << 20  # a .bashrc that runs `yes` must not fill the memory here
STDERR_CHARACTERS = 300  # of a command's error that a message quotes


def raise_file_limit(host_count: int) -> None:
    """Raise this process's limit of open files, if that many hosts need it. Raises UserError if the
    system does not allow it."""
    file_count = OTHER_FILES + FILES_PER_HOST * host_count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= file_count:
        return
    if hard != resource.RLIM_INFINITY and hard < file_count:
        raise UserError(
            f"{host_count} machines need about {file_count} open files, but the control node "
            f"allows {hard} (`ulimit -Hn`): raise nofile in /etc/security/limits.conf, or type a "
            "smaller NODES."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_count, hard))


def open_all(hosts: list[Host]) -> tuple[dict[str, Node], dict[str, str]]:
    """Connect to all hosts at the same time. Returns {name: node} of the reachable hosts and
    {name: error} of the other hosts. Raises UserError if this machine allows too few open files."""
    raise_file_limit(len(hosts))
    nodes = {host.name: host.engine.node(host) for host in hosts}
    failures: dict[str, str] = {}

    def attempt(node: Node) -> None:
        try:
            node.open()
        except MachineError as error:
            failures[node.host.name] = str(error)

    map_parallel(attempt, nodes.values())
    return {name: nodes[name] for name in nodes if name not in failures}, failures


def close_all(nodes: dict[str, Node]) -> None:
    map_parallel(lambda node: node.close(), nodes.values())


def map_parallel(ask: Callable[[Thing], Answer], things: Collection[Thing]) -> list[Answer]:
    """Call `ask` for each thing in up to 64 threads, and return the answers in order."""
    # Each machine that is off takes seconds to fail, so the calls do not wait for each other.
    with ThreadPoolExecutor(max_workers=min(64, len(things) or 1)) as pool:
        return list(pool.map(ask, things))


def error_location(error: Exception) -> str:
    """Return one line with an error in Tandem's code and its place in the source."""
    # The error's text may quote output of a machine, which may be long.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


class TimedOut(Exception):
    """Says that a command sent too little output in its time."""


def stream_output(
    process: Process, seconds: float, data: bytes | memoryview = b"", renewal_bytes: int = 0
) -> Iterator[bytes]:
    """Yield the output of a command until its end, and write `data` to its input meanwhile.

    Raises TimedOut after `seconds`. After every `renewal_bytes` of output these seconds begin
    again, so n bytes arrive within (1 + n / renewal_bytes) * seconds. If `renewal_bytes` is 0, they
    never begin again. (If each byte renewed them, a machine that sends single bytes would never
    time out.)
    """
    deadline, missing_bytes = time.monotonic() + seconds, renewal_bytes
    unsent = memoryview(data)
    with DefaultSelector() as selector:
        selector.register(process.fileno(), EVENT_READ)
        while time.monotonic() < deadline:
            try:
                while unsent:
                    size = process.write(unsent)
                    unsent = unsent[size:]
                    if not unsent:
                        process.close_stdin()
                    if not size:
                        break
            except BrokenPipeError:  # the command ended before it read all: its output says why
                unsent = memoryview(b"")
            # The selector waits only for output. If input is unsent, the next try comes soon. Else
            # the loop looks at the deadline twice a second.
            if not selector.select(0.02 if unsent else 0.5):
                continue
            piece = process.read()
            if piece == b"":
                return
            if piece:
                missing_bytes -= len(piece)
                if renewal_bytes and missing_bytes <= 0:
                    deadline, missing_bytes = time.monotonic() + seconds, renewal_bytes
                yield piece
    raise TimedOut


def talk(
    process: Process, data: bytes | memoryview, seconds: float, renewal_bytes: int = 0
) -> tuple[bytes, str, int | None]:
    """Write `data` to a command's input, and return stdout, the end of stderr as one line, and the
    exit status. The status is None if the command did not end in time. `seconds` and
    `renewal_bytes` are those of stream_output. Raises UserError if the command prints too much."""
    output = bytearray()
    try:
        for piece in stream_output(process, seconds, data, renewal_bytes):
            output += piece
            if len(output) > MAX_ANSWER_BYTES:
                raise UserError(
                    f"its answer is longer than {MAX_ANSWER_BYTES >> 20} MiB: "
                    "does its .bashrc print text?"
                )
        status = process.wait()
        return bytes(output), " ".join(process.stderr().split())[-STDERR_CHARACTERS:], status
    except TimedOut:
        return bytes(output), "", None
    finally:
        process.close()
