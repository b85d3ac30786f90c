"""The lab's private network: one switch, a cable to each machine, and no way out."""

import contextlib
import ctypes
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

from lab.plan import CONTROL_ADDRESS, STRANGER_ADDRESS, Lab, Node, burst_bytes
from lab.shell import run

NAMESPACES = Path("/run/netns")
BRIDGE = "br0"
STRANGER_PORT = "ps"


def plan(lab: Lab) -> list[str]:
    """The commands that build the network, in order; none changes the host's own namespace."""
    control, stranger = lab.netns("control"), lab.netns("stranger")
    commands = [
        f"ip netns add {control}",
        f"ip -n {control} link set lo up",
        f"ip -n {control} link add {BRIDGE} type bridge",
        f"ip -n {control} address add {CONTROL_ADDRESS}/24 brd + dev {BRIDGE}",
        f"ip -n {control} link set {BRIDGE} up",
        *_cable(control, STRANGER_PORT, stranger),
        f"ip -n {stranger} address add {STRANGER_ADDRESS}/24 brd + dev eth0",
        f"ip -n {stranger} link set eth0 up",
    ]
    for node in lab.nodes:
        if lab.vm:
            commands += _tap(control, node.port)
        else:
            commands += _cable(control, node.port, node.netns)
            commands += shaping(lab, node, lab.rate)
    return commands


def _cable(control: str, port: str, netns: str) -> list[str]:
    return [
        f"ip netns add {netns}",
        f"ip -n {netns} link set lo up",
        f"ip link add {port} netns {control} type veth peer name eth0 netns {netns}",
        f"ip -n {control} link set {port} master {BRIDGE} up",
    ]


def _tap(control: str, port: str) -> list[str]:
    return [
        f"ip -n {control} tuntap add dev {port} mode tap",
        f"ip -n {control} link set {port} master {BRIDGE} up",
    ]


def shaping(lab: Lab, node: Node, rate: Optional[str]) -> list[str]:
    """The commands that give both directions of `node`'s cable this rate; None means no limit."""
    queue = "noqueue"  # a veth's default
    if rate is not None:
        queue = f"tbf rate {rate} burst {burst_bytes(rate)} latency 50ms"
    ends = ((lab.netns("control"), node.port), (node.netns, "eth0"))
    return [f"tc -n {netns} qdisc replace dev {dev} root {queue}" for netns, dev in ends]


def carry_out(commands: Sequence[str]) -> None:
    """Runs commands, whose words contain no spaces: names and rates were checked for that."""
    for command in commands:
        run(command.split())


def plug(lab: Lab, node: Node, *, on: bool) -> None:
    carry_out([f"ip -n {lab.netns('control')} link set {node.port} {'up' if on else 'down'}"])


def ports(lab: Lab) -> dict[str, tuple[bool, Optional[str]]]:
    """{port: (plugged in, rate)}, read from the kernel."""
    links = json.loads(run(["ip", "-json", "-n", lab.netns("control"), "link", "show"]))
    queues = json.loads(run(["tc", "-json", "-n", lab.netns("control"), "qdisc", "show"]))
    rates = {q["dev"]: q["options"]["rate"] * 8 for q in queues if q["kind"] == "tbf"}
    return {
        link["ifname"]: ("UP" in link["flags"], rate_text(rates.get(link["ifname"])))
        for link in links
    }


def rate_text(bits: Optional[int]) -> Optional[str]:
    if bits is None:
        return None
    size, unit = next(
        (s, u) for s, u in ((1e9, "g"), (1e6, "m"), (1e3, "k")) if bits >= s or u == "k"
    )
    return f"{bits / size:g}{unit}bit"


@contextlib.contextmanager
def inside(netns: str) -> Iterator[None]:
    """Moves this thread into `netns` for a while; sockets that it makes there stay there."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newnet = 0x40000000
    with Path("/proc/thread-self/ns/net").open() as before, (NAMESPACES / netns).open() as after:

        def enter(fd: int) -> None:
            if libc.setns(fd, clone_newnet):
                raise OSError(ctypes.get_errno(), f"setns {netns}")

        enter(after.fileno())
        try:
            yield
        finally:
            enter(before.fileno())


def answers_ssh(lab: Lab, node: Node, connect: float, greet: float) -> bool:
    """Whether an ssh server accepts and then greets the control machine, each within seconds."""
    with inside(lab.netns("control")):
        connection = socket.socket()
    with connection:
        connection.settimeout(connect)
        try:
            connection.connect((node.address, 22))
            connection.settimeout(greet)
            return connection.recv(4) == b"SSH-"
        except OSError:
            return False


def namespaces_of(lab: str) -> list[str]:
    """The namespaces of a lab, including those of one that is half made."""
    with contextlib.suppress(FileNotFoundError):
        ours = re.compile(rf"{re.escape(lab)}-(control|stranger|node\d+)")
        return sorted(path.name for path in NAMESPACES.iterdir() if ours.fullmatch(path.name))
    return []


def remove(netns: str) -> None:
    """Kills what still runs in `netns`, then removes it with its interfaces."""
    listed = subprocess.run(["ip", "netns", "pids", netns], capture_output=True, text=True).stdout
    for pid in map(int, listed.split()):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    run(["ip", "netns", "delete", netns])
