"""A machine of the inventory, what is asked of the way to it, and what is done by every such way:
machines are opened and closed all at once, and commands there are talked with.

Each way is one module of `launcher/machines/`, found by the name that the inventory has as
ansible_connection, and defines `ENGINE`. All carry out one plan, whose dry run is plan.render: a
node starts a command, a process streams what it prints, and closing it stops it.
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
        """For select(): readable when `read` has something, the end included."""

    def read(self) -> bytes | None:
        """What has arrived on stdout; b"" at the end; None when there is nothing yet."""

    def write(self, data: bytes | memoryview) -> int:
        """Bytes taken, perhaps 0. Raises OSError when the other side is gone."""

    def close_stdin(self) -> None: ...

    def wait(self, seconds: float | None = None) -> int:
        """The exit status, -1 when the connection broke, or none came in time; call it after
        read() returned b""."""

    def stderr(self) -> str:
        """The end of its stderr, once it has ended."""

    @property
    def broken(self) -> bool:
        """Whether the connection to the machine was lost, rather than the command's end reached."""

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
    """What all machines that are reached in the same way have in common.

    `is_local`: their files are this machine's, and relative paths begin at the checkout. `machines`
    gives those of the job that this process is in, where another system hands machines out: it also
    ends what is left there, and the job's environment counts. `guard_python` runs the guard;
    `repair_hint` and `data_hint` end the sentences about an environment that lacks something, and
    about example images that are missing.
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


def of(name: str) -> Engine:
    """The engine of an ansible_connection, one of NAMES, or slurm's."""
    found = importlib.import_module(f"launcher.machines.{name}").ENGINE
    assert isinstance(found, Engine)
    return found


@dataclass(frozen=True)
class Host:
    """One machine of group `cluster`; its index in the list is its node rank.

    Paths of a host that is this machine are absolute; elsewhere node_dir may be relative to the
    home folder of the run user. `user` is the run user: train_user, or ansible_user where that is
    not set (group_vars/all.yml has the same rule, run_user). On this machine it is whoever starts
    the run. `route` is how ssh gets there. `copied`: of each data set that provision copies there,
    the folder of the control machine; `data_server`: the machine that shares data_root with it.
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
        return of(self.connection)

    def label(self) -> str:
        return self.name if self.engine.is_local else f"{self.name} ({self.address})"

    def data_path(self, data: str) -> str:
        """Where this machine has the images: a name is looked up below its data_root; "" stays
        "". Raises UserError."""
        if not data:
            return ""
        if "/" not in data:
            return f"{self.data_root}/{data}"
        if Path(data).is_absolute():
            return data
        if self.engine.is_local:
            return str(Path(data).absolute())
        raise UserError(
            f"DATA={data}: on {self.name} this path would begin nowhere: give a name below "
            f"{self.data_root} or a path from /."
        )


# Open files: for each host (its socket, and the pipes of paramiko's channels), and for all else.
PER_HOST, BESIDE = 8, 128
LARGEST = 4 << 20  # bytes of an answer: a .bashrc that runs `yes` must not fill our memory


def make_room(hosts: int) -> None:
    """Allow this process the open files that so many hosts need: the usual 1024 suffice for some
    200.

    Raises UserError where the system allows fewer.
    """
    needed = BESIDE + PER_HOST * hosts
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= needed:
        return
    if most != resource.RLIM_INFINITY and most < needed:
        raise UserError(
            f"{hosts} machines need about {needed} open files, and this machine allows {most} "
            "(`ulimit -Hn`): raise nofile in /etc/security/limits.conf, or give fewer NODES."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def open_all(hosts: list[Host]) -> tuple[dict[str, Node], dict[str, str]]:
    """Connect to all at once. Returns the nodes by name, and for the unreachable ones what ssh
    said. Raises UserError when this machine allows too few open files."""
    make_room(len(hosts))
    nodes = {host.name: host.engine.node(host) for host in hosts}
    failures: dict[str, str] = {}

    def attempt(node: Node) -> None:
        try:
            node.open()
        except MachineError as error:
            failures[node.host.name] = str(error)

    of_each(attempt, nodes.values())
    return {name: nodes[name] for name in nodes if name not in failures}, failures


def close_all(nodes: dict[str, Node]) -> None:
    of_each(lambda node: node.close(), nodes.values())


def of_each(ask: Callable[[Thing], Answer], things: Collection[Thing]) -> list[Answer]:
    """What becomes of each, in their order; all are asked at once, up to 64."""
    with ThreadPoolExecutor(max_workers=min(64, len(things) or 1)) as pool:
        return list(pool.map(ask, things))


def error_location(error: Exception) -> str:
    """An error of Tandem's own in a line: what a machine sent may be part of its text."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{what} ({Path(last.filename).name}:{last.lineno})"


class TimedOut(Exception):
    """A command sent nothing, or less than it had to, in the time that it was given."""


def stream_output(
    process: Process, seconds: float, data: bytes | memoryview = b"", renewed: int = 0
) -> Iterator[bytes]:
    """What a command prints, until its end, while it is given its whole input.

    Raises TimedOut after so many seconds. They begin anew each time that `renewed` bytes have
    arrived, so n bytes arrive within (1 + n / renewed) * seconds. (If every byte renewed the
    deadline, a machine that sends one now and then would never reach it.)
    """
    deadline, missing = time.monotonic() + seconds, renewed
    rest = memoryview(data)
    with DefaultSelector() as selector:
        selector.register(process.fileno(), EVENT_READ)
        while time.monotonic() < deadline:
            rest = _give(process, rest)
            if not selector.select(0.02 if rest else 0.5):
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


def _give(process: Process, data: memoryview) -> memoryview:
    """What is left of the input after the command has taken as much as it can now."""
    try:
        while data:
            taken = process.write(data)
            data = data[taken:]
            if not data:
                process.close_stdin()
            if not taken:
                break
    except BrokenPipeError:  # it ended before it read all: its output says why
        return memoryview(b"")
    return data


def talk(
    process: Process, data: bytes | memoryview, seconds: float, renewed: int = 0
) -> tuple[bytes, str, int | None]:
    """Give a command its whole input; return its output, its stderr and its exit status. `seconds`,
    `renewed`: as for stream_output.

    The status is None when it did not end in time. Raises UserError when it prints too much.
    """
    output = bytearray()
    try:
        for piece in stream_output(process, seconds, data, renewed):
            output += piece
            if len(output) > LARGEST:
                raise UserError(
                    f"its answer is longer than {LARGEST >> 20} MiB: does a .bashrc print there?"
                )
        status = process.wait()
        return bytes(output), " ".join(process.stderr().split())[-300:], status
    except TimedOut:
        return bytes(output), "", None
    finally:
        process.close()
