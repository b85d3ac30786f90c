"""`make find`: lists the ssh servers of this machine's own network, as lines for the list of
machines.

It asks port 22 of the addresses that were named, and nothing else of any machine. Names come from
known_hosts. Only with WRITE=1 it writes, and it changes no line that the list has.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import stat
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from pathlib import Path

import paramiko

from contract.errors import UserError
from contract.text import pluralize, read_text, write_whole
from launcher import control
from launcher.folders import relative
from launcher.machines import inventory, ssh
from launcher.machines.ssh import Packets, known_hosts
from launcher.terminal import Terminal, waiting

PORT, AT_ONCE, WIDEST = 22, 64, 22
SECONDS = 2.0  # until an address has answered
KEY_SECONDS = 10.0  # more, for the key of one that has: it computes
BANNER = 255  # bytes, by RFC 4253
NAME = re.compile("[a-z][a-z0-9-]{0,62}")


@dataclass(frozen=True)
class Server:
    """An ssh server. `key`: the key of its host, None if it showed none in time."""

    address: IPv4Address
    program: str
    key: bytes | None


def network_of(text: str | None, interfaces: list[IPv4Interface]) -> IPv4Network:
    """Return the network that NET names. Raises UserError if it is too large or not this LAN's."""
    mine = ", ".join(str(interface.network) for interface in interfaces) or "no network"
    if not text:
        raise UserError(
            "NET is missing: type the network to search, such as NET=192.168.1.0/24 "
            f"(this machine is in {mine})."
        )
    try:
        net = IPv4Network(text, strict=False)
    except ValueError:
        raise UserError(f"NET={text}: write it like NET=192.168.1.0/24.") from None
    # A mistyped prefix would ask a whole company's network for ssh, which looks like an attack.
    if net.prefixlen < WIDEST:
        raise UserError(
            f"NET={text} has {net.num_addresses:,} addresses: type a network of at most "
            f"{1 << (32 - WIDEST):,} addresses, a /{WIDEST}."
        )
    if not net.is_private or not any(net.overlaps(interface.network) for interface in interfaces):
        raise UserError(
            f"NET={text}: make find searches only a network of this machine, and this machine "
            f"is in {mine}."
        )
    return net


def own_interfaces() -> list[IPv4Interface]:
    """Return this machine's addresses, each with its network."""
    argv = ["ip", "-json", "-4", "address", "show"]
    output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    rows = [row for device in json.loads(output) for row in device.get("addr_info", [])]
    interfaces = [IPv4Interface(f"{row['local']}/{row['prefixlen']}") for row in rows]
    return [interface for interface in interfaces if not interface.is_loopback]


def ask(address: IPv4Address) -> Server | None:
    """Return the server that answers there; None if it is no ssh server."""
    try:
        connection = socket.create_connection((str(address), PORT), SECONDS)
    except OSError:
        return None
    with connection:
        try:
            banner = connection.recv(BANNER, socket.MSG_PEEK)  # bounded before paramiko reads it
        except OSError:
            return None
        match = re.match(rb"SSH-[0-9.]+-([^\r\n]*)\r?\n", banner)
        if match is None:
            return None
        # Only what prints: it goes to the terminal and into the list of machines, where a form feed
        # would begin a line, and so a machine.
        program = "".join(filter(str.isprintable, match[1].decode(errors="replace")))
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            transport = paramiko.Transport(connection, packetizer_class=Packets)
            try:
                transport.start_client(timeout=KEY_SECONDS)
                key = bytes(transport.get_remote_server_key().asbytes())
                return Server(address, program, key)
            finally:
                transport.close()
    return Server(address, program, None)


def proposal(server: Server, used_names: Collection[str]) -> tuple[str, str]:
    """Propose a machine's name, and its line for the list. The line is a comment if known_hosts
    does not confirm the machine's key."""
    # A machine of the list gets our code and data, so only one whose key is known becomes one.
    lines = [
        line for line in known_hosts(ssh.KNOWN_HOSTS) if line.entry.key.asbytes() == server.key
    ]
    is_known = bool(lines) and not any(line.revoked for line in lines)
    # A hashed name stays unknown, and a machine without a usable name is called by its address.
    hostnames = [name for line in lines for name in line.entry.hostnames] if is_known else []
    short = (name.removesuffix(".local") for name in hostnames)
    usable = (name for name in short if NAME.fullmatch(name) and name not in used_names)
    *_, third, fourth = str(server.address).split(".")
    fallback = f"pc{fourth}" if f"pc{fourth}" not in used_names else f"pc{third}-{fourth}"
    name = next(usable, fallback)
    line = f"{name} ansible_host={server.address}"
    if is_known:
        return name, f"{line}  # its host key is known; {server.program}"
    return name, f"#{line}  # its host key is unknown: is it yours? {server.program}"


def with_lines(text: str, lines: list[str], path: Path) -> str:
    """Return the list of machines with more lines at the end of its group `cluster`. Raises
    UserError."""
    rows = text.removesuffix("\n").split("\n")
    heads = [index for index, line in enumerate(rows) if line.startswith("[")]
    start = next((index for index in heads if rows[index].strip() == "[cluster]"), None)
    if start is None:
        raise UserError(
            f"{relative(path)} has no line [cluster]: write the lines into the file yourself."
        )
    end = next((index for index in heads if index > start), len(rows))
    # The lines join the group's last one, above blank lines that separate it from the next group.
    while not rows[end - 1].strip():
        end -= 1
    return "\n".join([*rows[:end], *lines, *rows[end:], ""])


def find(net: str | None, file: str, write: bool) -> int:
    """Print a line for each machine that the list does not have. Returns the exit code."""
    interfaces, terminal, path = own_interfaces(), Terminal(), Path(file)
    addresses = [*network_of(net, interfaces).hosts()]
    listed: dict[str, str] = {}  # names by address
    try:
        listed = {host.address: host.name for host in inventory.load(path)}
    except UserError:  # a list may have no machine yet
        if not path.is_file():
            raise
    text = f"searching {pluralize(len(addresses), 'address')} for ssh servers"
    with waiting(terminal, text), ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        servers = [server for server in pool.map(ask, addresses) if server]
    lines, used_names = [], set(listed.values())
    # Names in the list are unique, so each new line excludes its name for the next ones.
    for server in servers:
        if listed_name := listed.get(str(server.address)):
            terminal.say(f"{listed_name} of {file} answers at {server.address}")
            continue
        name, line = proposal(server, used_names)
        is_this = any(interface.ip == server.address for interface in interfaces)
        lines.append(f"{line} (this machine)" if is_this else line)
        used_names.add(name)
    terminal.drain()
    for line in lines:
        control.say(line)
    if not servers:
        terminal.say(f"no ssh server among {pluralize(len(addresses), 'address')} of {net}")
    elif lines and write:
        text = read_text(path)
        # A stranger that was written before is a comment, which is no machine of the list.
        present = re.findall(r"ansible_host=(\S+)", text)
        fresh = [line for line in lines if line.split()[1].partition("=")[2] not in present]
        text = with_lines(text, fresh, path)
        write_whole(path.resolve(), text.encode(), stat.S_IMODE(path.stat().st_mode))
        terminal.say(f"{pluralize(len(fresh), 'line')} added to {file}")
    elif lines:
        terminal.say(f"lines for {file}, which WRITE=1 adds to the file")
    terminal.drain()
    return 0
