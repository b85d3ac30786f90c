"""`make find`: the ssh servers of this machine's own network, as lines for the list of machines.

It asks port 22 of the addresses that were named, and nothing else of any machine; names come from
known_hosts. Only with WRITE=1 is anything written, and what
the list has stays. No other verb needs it.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import stat
import subprocess
from collections.abc import Collection, Iterable
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
    """`key`: of its host, None where it showed none in time."""

    address: IPv4Address
    program: str
    key: bytes | None


def network_of(text: str | None, own: list[IPv4Interface]) -> IPv4Network:
    """The addresses that NET names. Raises UserError where they are too many or not this LAN's."""
    mine = ", ".join(str(interface.network) for interface in own) or "no network"
    if not text:
        raise UserError(f"NET is missing: name the addresses to ask (this machine is in {mine}).")
    try:
        net = IPv4Network(text, strict=False)
    except ValueError:
        raise UserError(f"NET={text}: write it like NET=192.168.1.0/24.") from None
    if net.prefixlen < WIDEST:
        raise UserError(
            f"NET={text} has {net.num_addresses:,} addresses: ask {1 << (32 - WIDEST):,} at most, "
            f"a /{WIDEST}."
        )
    if not net.is_private or not any(net.overlaps(one.network) for one in own):
        raise UserError(
            f"NET={text}: only this machine's own network is asked, and it has no address there "
            f"(it is in {mine})."
        )
    return net


def own_interfaces() -> list[IPv4Interface]:
    """This machine's addresses, each with its network."""
    argv = ["ip", "-json", "-4", "address", "show"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    every = [one for card in json.loads(said) for one in card.get("addr_info", [])]
    return [
        IPv4Interface(f"{one['local']}/{one['prefixlen']}")
        for one in every
        if not IPv4Address(one["local"]).is_loopback
    ]


def ask(address: IPv4Address) -> Server | None:
    """What answers there; None where it is no ssh server."""
    try:
        line = socket.create_connection((str(address), PORT), SECONDS)
    except OSError:
        return None
    with line:
        try:
            first = line.recv(BANNER, socket.MSG_PEEK)  # bounded before paramiko reads it
        except OSError:
            return None
        said = re.match(rb"SSH-[0-9.]+-([^\r\n]*)\r?\n", first)
        if said is None:
            return None
        # Only what prints: it goes to the terminal and into the list of machines, where a form feed
        # would begin a line, and so a machine.
        program = "".join(filter(str.isprintable, said[1].decode(errors="replace")))
        return Server(address, program, _key(line))


def _key(line: socket.socket) -> bytes | None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        transport = paramiko.Transport(line, packetizer_class=Packets)
        try:
            transport.start_client(timeout=KEY_SECONDS)
            return bytes(transport.get_remote_server_key().asbytes())
        finally:
            transport.close()
    return None


def names_of(server: Server) -> list[str] | None:
    """The names of the lines in known_hosts that have its key; None for a stranger. A hashed name
    stays unknown."""
    mine = [one for one in known_hosts(ssh.KNOWN_HOSTS) if one.entry.key.asbytes() == server.key]
    if not mine or any(one.revoked for one in mine):
        return None
    return [name for one in mine for name in one.entry.hostnames]


def name_for(names: Iterable[str], address: IPv4Address, taken: Collection[str]) -> str:
    short = (name.removesuffix(".local") for name in names)
    fit = (name for name in short if NAME.fullmatch(name) and name not in taken)
    *_, third, last = str(address).split(".")
    return next(fit, f"pc{last}" if f"pc{last}" not in taken else f"pc{third}-{last}")


def proposal(server: Server, taken: Collection[str]) -> tuple[str, str]:
    """A machine's name, and its line for the list: a stranger's is a comment."""
    known = names_of(server)
    name = name_for(known or [], server.address, taken)
    line = f"{name} ansible_host={server.address}"
    if known is not None:
        return name, f"{line}  # ours, by its host key; {server.program}"
    return name, f"#{line}  # a stranger: is it yours? {server.program}"


def with_lines(text: str, lines: list[str], path: Path) -> str:
    """The list of machines with more lines at the end of its group `cluster`. Raises UserError."""
    every = text.removesuffix("\n").split("\n")
    heads = [index for index, line in enumerate(every) if line.startswith("[")]
    start = next((index for index in heads if every[index].strip() == "[cluster]"), None)
    if start is None:
        raise UserError(f"{relative(path)} has no line [cluster]: put the lines there yourself.")
    end = next((index for index in heads if index > start), len(every))
    while not every[end - 1].strip():
        end -= 1
    return "\n".join([*every[:end], *lines, *every[end:], ""])


def in_list(path: Path) -> dict[str, str]:
    """The names of the machines in the list by address; none where it has none yet."""
    try:
        return {host.address: host.name for host in inventory.load(path)}
    except UserError:
        if not path.is_file():
            raise
        return {}


def find(net: str | None, file: str, write: bool) -> int:
    """Print a line for each machine that the list does not have. Returns the exit code."""
    own, terminal, path = own_interfaces(), Terminal(), Path(file)
    addresses = [*network_of(net, own).hosts()]
    hosts = in_list(path)
    what = f"asking {pluralize(len(addresses), 'address')} for ssh"
    with waiting(terminal, what), ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        servers = [one for one in pool.map(ask, addresses) if one]
    lines, taken = [], set(hosts.values())
    for server in servers:
        if listed := hosts.get(str(server.address)):
            terminal.say(f"{listed} of {file} answers at {server.address}")
            continue
        name, line = proposal(server, taken)
        here = any(one.ip == server.address for one in own)
        lines.append(f"{line} (this machine)" if here else line)
        taken.add(name)
    terminal.drain()
    for line in lines:
        control.say(line)
    if not servers:
        terminal.say(f"no ssh server among {pluralize(len(addresses), 'address')} of {net}")
    elif lines and write:
        text = read_text(path)
        # A stranger that was written before is a comment, which is no machine of the list.
        there = re.findall(r"ansible_host=(\S+)", text)
        fresh = [line for line in lines if line.split()[1].partition("=")[2] not in there]
        text = with_lines(text, fresh, path)
        write_whole(path.resolve(), text.encode(), stat.S_IMODE(path.stat().st_mode))
        terminal.say(f"{pluralize(len(fresh), 'line')} written to {file}, below what was there")
    elif lines:
        terminal.say(f"lines for {file}: WRITE=1 puts them there")
    terminal.drain()
    return 0
