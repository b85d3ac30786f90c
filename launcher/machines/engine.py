"""The machines of the inventory, and the interface to them: Engine, Node and Process.

Each module of `launcher/machines/` that defines `ENGINE` is a way to reach machines, for hosts with
its name as ansible_connection. All carry out one plan, whose dry run is plan.render: a node starts
a command, a process streams its output, and closing the process stops it.
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

Thing = TypeVar("Thing")
Answer = TypeVar("Answer")


class MachineError(UserError):
    """A UserError about machines of the run; `hosts` are their names in the inventory."""

    def __init__(self, hosts: list[str], *problems: str):
        super().__init__(*problems)
        self.hosts = hosts


class Busy(UserError):
    """Another run took a machine first: waiting helps."""


class Process(Protocol):
    """One command on a machine. No method but `wait` blocks."""

    def fileno(self) -> int:
        """Return the descriptor for select(): readable if `read` has output, or the end."""

    def read(self) -> bytes | None:
        """Return new output of stdout; b"" at the end; None if there is nothing yet."""

    def write(self, data: bytes | memoryview) -> int:
        """Return how many bytes were taken, perhaps 0. Raises OSError if the other side is gone."""

    def close_stdin(self) -> None: ...

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit status, -1 if the connection broke, or none came in time. Call it after
        read() returned b""."""

    def stderr(self) -> str:
        """Return the end of its stderr, once it has ended."""

    @property
    def broken(self) -> bool:
        """Return whether the connection was lost before the command ended."""

    def close(self) -> None:
        """Close its pipes. A guard whose stdin ends kills what it started, then itself."""


class Node(Protocol):
    """The connection to one machine."""

    @property
    def host(self) -> Host: ...

    def open(self) -> None:
        """Connect. Raises MachineError."""

    def start(self, argv: list[str]) -> Process:
        """Run a command. Raises MachineError when the connection to the machine broke."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Engine:
    """A way to reach machines.

    `is_local`: their files are this machine's, and relative paths begin at the checkout. `machines`
    returns the machines of the job in which this process runs, if another system assigns machines.
    That system also ends all processes of the job, and the job's environment counts.
    `guard_python` runs the guard; `repair_hint` and `data_hint` end the sentences about an
    environment that lacks something, and about example images that are missing.
    """

    node: Callable[[Host], Node]
    is_local: bool
    guard_python: str
    repair_hint: str
    data_hint: str
    machines: Callable[[], list[Host]] | None = None

    @property
    def in_job(self) -> bool:
        return self.machines is not None


NAMES = ("local", "ssh")  # those that an inventory may name; the machines of a job are in none


def find_engine(name: str) -> Engine:
    """Return the engine of an ansible_connection, one of NAMES, or slurm's."""
    # Imported only now: local runs need not wait for Fabric and paramiko.
    engine: Engine = importlib.import_module(f"launcher.machines.{name}").ENGINE
    return engine


@dataclass(frozen=True)
class Host:
    """One machine of group `cluster`; its index in the list is its node rank.

    Paths of a host that is this machine are absolute; elsewhere node_dir may be relative to the
    home folder of the run user. `user` is the run user: train_user, or if that is not set
    ansible_user (run_user in group_vars/all.yml has the same rule). On this machine it is the user
    who starts the run. `route` is how ssh gets there. `copied`: the folders of the control node
    that provision copies there, by data set; `data_server`: the machine that shares data_root.
    """

    name: str
    connection: str
    address: str
    port: int
    user: str | None
    env_python: str
    node_dir: str
    data_root: str
    gpus: int | None = None
    interface: str | None = None
    cuda_home: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    owner: Owner = field(default_factory=Owner)
    route: Route = field(default_factory=Route)
    copied: dict[str, str] = field(default_factory=dict)
    data_server: str = ""

    @property
    def engine(self) -> Engine:
        return find_engine(self.connection)

    def label(self) -> str:
        # All local nodes have the same address, which would tell nothing.
        return self.name if self.engine.is_local else f"{self.name} ({self.address})"

    def data_path(self, data: str) -> str:
        """Return this machine's folder of the data: a name is looked up below its data_root; ""
        stays "". Raises UserError."""
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


# Open files: for each host (its socket, and the pipes of paramiko's channels), and for all else.
PER_HOST, BESIDE = 8, 128
LARGEST = 4 << 20  # bytes of an answer: a .bashrc that runs `yes` must not fill our memory


def make_room(hosts: int) -> None:
    """Allow this process the open files that so many hosts need. Raises UserError if the system
    allows fewer."""
    # By this rule the usual limit of 1024 allows 112 hosts.
    count = BESIDE + PER_HOST * hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise UserError(
            f"{hosts} machines need about {count} open files, but the control node allows "
            f"{hard} (`ulimit -Hn`): raise nofile in /etc/security/limits.conf, or type a "
            "smaller NODES."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def open_all(hosts: list[Host]) -> tuple[dict[str, Node], dict[str, str]]:
    """Connect to all at once. Returns the nodes by name, and the errors of unreachable ones by
    name. Raises UserError if this machine allows too few open files."""
    make_room(len(hosts))
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
    """Return `ask` of each thing, in their order, from up to 64 threads."""
    # A machine that is off takes seconds to fail: one after the other would add them up.
    with ThreadPoolExecutor(max_workers=min(64, len(things) or 1)) as pool:
        return list(pool.map(ask, things))


def error_location(error: Exception) -> str:
    """Return an error in Tandem's code as one line, with its place in the source."""
    # Its text may contain output of a machine, so it is cut.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


class TimedOut(Exception):
    """A command sent nothing, or less than it had to, in the time that it was given."""


def stream_output(
    process: Process, seconds: float, data: bytes | memoryview = b"", renewed: int = 0
) -> Iterator[bytes]:
    """Yield the output of a command until its end, and give it its whole input meanwhile.

    Raises TimedOut after so many seconds. They begin again each time that `renewed` bytes have
    arrived, so n bytes arrive within (1 + n / renewed) * seconds. (If every byte renewed the
    deadline, a machine that sends a byte now and then would never reach it.)
    """
    deadline, missing = time.monotonic() + seconds, renewed
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
            except BrokenPipeError:  # it ended before it read all: its output says why
                unsent = memoryview(b"")
            # The selector only shows what can be read, so input that the pipe did not take is
            # offered again soon.
            if not selector.select(0.02 if unsent else 0.5):
                continue
            piece = process.read()
            if piece == b"":
                return
            if piece:
                missing -= len(piece)
                if renewed and missing <= 0:
                    deadline, missing = time.monotonic() + seconds, renewed
                yield piece
    raise TimedOut


def talk(
    process: Process, data: bytes | memoryview, seconds: float, renewed: int = 0
) -> tuple[bytes, str, int | None]:
    """Give a command its whole input; return its output, its stderr and its exit status, None if it
    did not end in time. `seconds`, `renewed`: as for stream_output. Raises UserError if it prints
    too much."""
    output = bytearray()
    try:
        for piece in stream_output(process, seconds, data, renewed):
            output += piece
            if len(output) > LARGEST:
                raise UserError(
                    f"its answer is longer than {LARGEST >> 20} MiB: does its .bashrc print text?"
                )
        status = process.wait()
        return bytes(output), " ".join(process.stderr().split())[-300:], status
    except TimedOut:
        return bytes(output), "", None
    finally:
        process.close()
