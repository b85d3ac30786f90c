"""Make the lab's private network: one switch, a cable to each machine, and no way out.

Each machine has a network namespace. The switch is a bridge in the control node's namespace.
"""

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
    """Return the commands that build the network, in order. The host's namespace stays as it is."""
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
        # QEMU runs in the control node's namespace, and its cable has no rate.
        if lab.vm:
            commands += [
                f"ip -n {control} tuntap add dev {node.port} mode tap",
                f"ip -n {control} link set {node.port} master {BRIDGE} up",
            ]
        else:
            commands += _cable(control, node.port, node.netns)
            commands += shaping(lab, node, lab.rate)
    return commands


def _cable(control: str, port: str, netns: str) -> list[str]:
    """Return the commands that make a namespace, and connect its eth0 to the switch."""
    return [
        f"ip netns add {netns}",
        f"ip -n {netns} link set lo up",
        f"ip link add {port} netns {control} type veth peer name eth0 netns {netns}",
        f"ip -n {control} link set {port} master {BRIDGE} up",
    ]


def shaping(lab: Lab, node: Node, rate: Optional[str]) -> list[str]:
    """Return the commands that limit a node's cable in both directions; no `rate` is no limit."""
    # Each end of the cable limits what it sends.
    queue = "noqueue"  # the default of a veth pair
    if rate is not None:
        queue = f"tbf rate {rate} burst {burst_bytes(rate)} latency 50ms"
    ends = ((lab.netns("control"), node.port), (node.netns, "eth0"))
    return [f"tc -n {netns} qdisc replace dev {dev} root {queue}" for netns, dev in ends]


def carry_out(commands: Sequence[str]) -> None:
    """Run commands. Their words contain no spaces: plan.py has checked names and rates."""
    for command in commands:
        run(command.split())


def plug(lab: Lab, node: Node, *, on: bool) -> None:
    """Plug in or unplug a node's cable, at the switch's end."""
    carry_out([f"ip -n {lab.netns('control')} link set {node.port} {'up' if on else 'down'}"])


def read_ports(lab: Lab) -> dict[str, tuple[bool, Optional[str]]]:
    """Return {port: (is plugged in, rate)}, read from the kernel."""
    links = json.loads(run(["ip", "-json", "-n", lab.netns("control"), "link", "show"]))
    queues = json.loads(run(["tc", "-json", "-n", lab.netns("control"), "qdisc", "show"]))
    rates = {}
    # The kernel has bytes per second. A rate is shown as the user types it: 2.5gbit, 512kbit.
    for queue in queues:
        if queue["kind"] == "tbf":
            bits = queue["options"]["rate"] * 8
            units = ((1e9, "g"), (1e6, "m"), (1e3, "k"))
            size, unit = next((s, u) for s, u in units if bits >= s or u == "k")
            rates[queue["dev"]] = f"{bits / size:g}{unit}bit"
    return {link["ifname"]: ("UP" in link["flags"], rates.get(link["ifname"])) for link in links}


@contextlib.contextmanager
def inside(netns: str) -> Iterator[None]:
    """Move this thread into `netns` within a block. Sockets that it makes there stay there."""
    libc = ctypes.CDLL(None, use_errno=True)  # Python has os.setns since 3.12
    clone_newnet = 0x40000000  # CLONE_NEWNET of <sched.h>
    current_path, target_path = Path("/proc/thread-self/ns/net"), NAMESPACES / netns
    with current_path.open() as current, target_path.open() as target:

        def enter(fd: int) -> None:
            if libc.setns(fd, clone_newnet):
                raise OSError(ctypes.get_errno(), f"setns {netns}")

        enter(target.fileno())
        try:
            yield
        finally:
            enter(current.fileno())


def answers_ssh(lab: Lab, node: Node, connect: float, greet: float) -> bool:
    """Return whether an ssh server accepts a connection of the control node within `connect`
    seconds, and then greets it within `greet` seconds."""
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
    """Return the namespaces of a lab, even of an incomplete one."""
    with contextlib.suppress(FileNotFoundError):
        # A pattern like `lab-*` would match other labs, whose names may begin with this name.
        pattern = re.compile(rf"{re.escape(lab)}-(control|stranger|node\d+)")
        return sorted(path.name for path in NAMESPACES.iterdir() if pattern.fullmatch(path.name))
    return []


def remove(netns: str) -> None:
    """Kill the processes in `netns`, then remove it with its interfaces."""
    output = subprocess.run(["ip", "netns", "pids", netns], capture_output=True, text=True).stdout
    for pid in map(int, output.split()):
        if pid != os.getpid():  # `down` may run inside the namespace
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    run(["ip", "netns", "delete", netns])
