"""Connections to machines, opened and closed all at once, and talking with a command there."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from selectors import EVENT_READ, DefaultSelector

from contract.errors import UserError
from launcher.machines.engine import Host, MachineError, Node, Process

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

    with ThreadPoolExecutor(max_workers=min(64, len(hosts) or 1)) as pool:
        list(pool.map(attempt, nodes.values()))
    return {name: nodes[name] for name in nodes if name not in failures}, failures


def close_all(nodes: dict[str, Node]) -> None:
    with ThreadPoolExecutor(max_workers=min(64, len(nodes) or 1)) as pool:
        list(pool.map(lambda one: one.close(), nodes.values()))


class Late(Exception):
    """A command sent nothing, or less than it had to, in the time that it was given."""


def pieces(
    process: Process, seconds: float, data: bytes = b"", renewed: int = 0
) -> Iterator[bytes]:
    """What a command prints, until its end, while it is given its whole input.

    Raises Late after so many seconds. They begin anew each time that `renewed` bytes have arrived,
    so n bytes arrive within (1 + n / renewed) * seconds. (If every byte renewed the deadline, a
    machine that sends one now and then would never reach it.)
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
    raise Late


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


def talk(process: Process, data: bytes, seconds: float) -> tuple[bytes, str, int | None]:
    """Give a command its whole input; return its output, its stderr and its exit status.

    The status is None when it did not end in time. Raises UserError when it prints too much.
    """
    output = bytearray()
    try:
        for piece in pieces(process, seconds, data):
            output += piece
            if len(output) > LARGEST:
                raise UserError(
                    f"its answer is longer than {LARGEST >> 20} MiB: does a .bashrc print there?"
                )
        status = process.wait()
        return bytes(output), " ".join(process.stderr().split())[-300:], status
    except Late:
        return bytes(output), "", None
    finally:
        process.close()
