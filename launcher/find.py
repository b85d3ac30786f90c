"""`make find`: lists the ssh servers of the control node's network, as lines for the inventory.

It asks only port 22 of the addresses in NET=. Names come from known_hosts. It writes only with
WRITE=1, and changes no line that the inventory has.
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
from launcher.machines.ssh import Packets, load_known_hosts
from launcher.terminal import Terminal, waiting

PORT = 22
THREADS = 64  # addresses that are asked at the same time
MIN_PREFIX = 22  # of NET=: a /22 has 1,024 addresses
CONNECT_SECONDS = 2.0  # until an address has answered
KEY_SECONDS = 10.0  # until a server has shown its key, for which it computes
BANNER_BYTES = 255  # by RFC 4253
ADDRESS = r"ansible_host=(\S+)"
NAME = re.compile("[a-z][a-z0-9-]{0,62}")  # of a machine


@dataclass(frozen=True)
class Server:
    """An ssh server. `program`: from its banner, such as OpenSSH_9.6. `key`: the key of its host,
    None if it showed none in time."""

    address: IPv4Address
    program: str
    key: bytes | None


def read_network(text: str | None, interfaces: list[IPv4Interface]) -> IPv4Network:
    """Return the network of NET=. Raises UserError if it is too large, or not this LAN's."""
    local_networks = ", ".join(str(interface.network) for interface in interfaces) or "no network"
    if not text:
        raise UserError(
            "NET is missing: type the network to search, such as NET=192.168.1.0/24 "
            f"(this machine is in {local_networks})."
        )
    try:
        net = IPv4Network(text, strict=False)
    except ValueError:
        raise UserError(f"NET={text}: write it like NET=192.168.1.0/24.") from None
    # A mistyped prefix would ask a whole company's network for ssh, which looks like an attack.
    if net.prefixlen < MIN_PREFIX:
        raise UserError(
            f"NET={text} has {net.num_addresses:,} addresses: type a network of at most "
            f"{1 << (32 - MIN_PREFIX):,} addresses, a /{MIN_PREFIX}."
        )
    if not net.is_private or not any(net.overlaps(interface.network) for interface in interfaces):
        raise UserError(
            f"NET={text}: make find searches only a network of this machine, and this machine "
            f"is in {local_networks}."
        )
    return net


def local_interfaces() -> list[IPv4Interface]:
    """Return the control node's addresses, each with its network."""
    argv = ["ip", "-json", "-4", "address", "show"]
    output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    rows = [row for device in json.loads(output) for row in device.get("addr_info", [])]
    interfaces = [IPv4Interface(f"{row['local']}/{row['prefixlen']}") for row in rows]
    return [interface for interface in interfaces if not interface.is_loopback]


def ask_address(address: IPv4Address) -> Server | None:
    """Return the ssh server at an address; None if no ssh server answers."""
    try:
        connection = socket.create_connection((str(address), PORT), CONNECT_SECONDS)
    except OSError:
        return None
    with connection:
        # Anything may listen at an address: paramiko reads on only after a short and valid banner.
        try:
            banner = connection.recv(BANNER_BYTES, socket.MSG_PEEK)
        except OSError:
            return None
        match = re.match(rb"SSH-[0-9.]+-([^\r\n]*)\r?\n", banner)
        if match is None:
            return None
        # SSH-2.0-OpenSSH_9.6: the program goes to the terminal and into the inventory, so only what
        # prints is kept. A form feed would begin a line there, and so a machine.
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


def propose_line(server: Server, used_names: Collection[str]) -> tuple[str, str]:
    """Return a name for a machine, and its line for the inventory. If known_hosts does not confirm
    the machine's key, the line is a comment: a machine of the inventory gets code and data."""
    known_lines = load_known_hosts(ssh.KNOWN_HOSTS)
    lines = [line for line in known_lines if line.entry.key.asbytes() == server.key]
    is_known = bool(lines) and not any(line.is_revoked for line in lines)
    # known_hosts may have only a hash of the name. A machine without a usable name is called by its
    # address: pc7 for 192.168.1.7.
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


def add_lines(text: str, lines: list[str], path: Path) -> str:
    """Return the inventory with more lines at the end of its group `cluster`. Raises UserError."""
    rows = text.removesuffix("\n").split("\n")
    heads = [index for index, line in enumerate(rows) if line.startswith("[")]  # begin a group
    start = next((index for index in heads if rows[index].strip() == "[cluster]"), None)
    if start is None:
        raise UserError(
            f"{relative(path)} has no line [cluster]: write the lines into the file yourself."
        )
    end = next((index for index in heads if index > start), len(rows))
    # The new lines follow the group's last line, above the blank lines before the next group.
    while not rows[end - 1].strip():
        end -= 1
    return "\n".join([*rows[:end], *lines, *rows[end:], ""])


def find(net: str | None, file: str, write: bool) -> int:
    """Print a line for each machine that the inventory `file` lacks, and add the lines to it if
    `write` is set. Returns the exit code. Raises UserError."""
    interfaces, terminal, path = local_interfaces(), Terminal(), Path(file)
    addresses = [*read_network(net, interfaces).hosts()]
    listed_names: dict[str, str] = {}  # by address
    try:
        listed_names = {host.address: host.name for host in inventory.load(path)}
    except UserError:  # an inventory may have no machine yet
        if not path.is_file():
            raise
    text = f"searching {pluralize(len(addresses), 'address')} for ssh servers"
    with waiting(terminal, text), ThreadPoolExecutor(max_workers=THREADS) as pool:
        servers = [server for server in pool.map(ask_address, addresses) if server]
    # Names in an inventory are unique, so a name that is proposed is used from then on.
    lines, used_names = [], set(listed_names.values())
    for server in servers:
        if listed_name := listed_names.get(str(server.address)):
            terminal.say(f"{listed_name} of {file} answers at {server.address}")
            continue
        name, line = propose_line(server, used_names)
        is_this_machine = any(interface.ip == server.address for interface in interfaces)
        lines.append(f"{line} (this machine)" if is_this_machine else line)
        used_names.add(name)
    terminal.drain()
    for line in lines:
        control.print_clean(line)
    hint = "you may change the names"
    if any(line.startswith("#") for line in lines):
        hint = f"delete the # before each PC that is yours; {hint}"
    if not servers:
        terminal.say(f"no ssh server among {pluralize(len(addresses), 'address')} of {net}")
    elif lines and write:
        text = read_text(path)
        # `pc7 ansible_host=192.168.1.7  # ...`, or a comment for a machine whose key is unknown. An
        # earlier search may have written that comment, which lists no machine.
        present = re.findall(ADDRESS, text)
        new_lines = [line for line in lines if not {*re.findall(ADDRESS, line)} & {*present}]
        text = add_lines(text, new_lines, path)
        write_whole(path.resolve(), text.encode(), stat.S_IMODE(path.stat().st_mode))
        terminal.say(f"{pluralize(len(new_lines), 'line')} added to {file}: {hint}")
    elif lines:
        terminal.say(f"WRITE=1 adds these lines to {file}: then {hint}")
    terminal.drain()
    return 0
