"""Decide who may reach a machine, and find a firewall that is not ours. Pure functions of facts.

Role firewall calls these functions as filters, and writes the rules (its nftables.conf). The rules
let in members, admin_cidrs and the control node, and drop other incoming packets.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from boundary.facts import Interface, Services, Setup

from . import PlanError, reading

# The names of the bridges of Docker, libvirt, LXD, Incus, LXC, Podman and CNI. Their guests are
# containers and virtual machines.
GUEST_BRIDGE = re.compile(
    r"(docker0|br-[0-9a-f]{12}|(virbr|lxdbr|incusbr|lxcbr|podman|cni-podman|cni)\d+)$"
)
# Ports that the rules always open: for DHCP's answers (68, 546) and mDNS (5353).
OPEN_PORTS = {("udp", "68"), ("udp", "546"), ("udp", "5353")}


def other_firewall(services: dict[str, Any], ufw_conf: str, chains: str) -> str | None:
    """Name a firewall that already filters this machine's incoming packets; None if there is none.

    services: `ansible_facts.services`; ufw_conf: text of /etc/ufw/ufw.conf, "" if there is none;
    chains: output of `nft list chains`, "" without nft, as text: nft 0.8.2 of Ubuntu 18.04 has no
    JSON.
    """
    units = reading.read(services, Services, "its services")
    manager = firewall_manager(ufw_conf, units.firewalld.state == "running")
    if manager:
        return manager
    # A packet has to pass every base chain, so each other chain that drops by default keeps peers
    # out. Our own table, named tandem, is the exception. nft prints:
    # table inet filter {
    #     chain input {
    #         type filter hook input priority 0; policy drop;
    family = table = chain = ""
    for line in chains.splitlines():
        table_start = re.match(r"table (\S+) (\S+) \{", line)
        if table_start:
            family, table = table_start.groups()
        chain_start = re.match(r"\s+chain (\S+) \{", line)
        if chain_start:
            chain = chain_start[1]
        if re.search(r"\bhook input\b.*\bpolicy drop\b", line) and table != "tandem":
            return f"nftables table {family} {table}, chain {chain}"
    return None


def firewall_manager(ufw_conf: str, firewalld: bool) -> str | None:
    """Name the firewall manager that is switched on, "ufw" or "firewalld"; None if none is.

    ufw_conf: text of /etc/ufw/ufw.conf; firewalld: true if its service runs.
    """
    # The file is a shell fragment, so quotes and blanks are allowed: ENABLED="yes".
    if re.search(r"^\s*ENABLED\s*=\s*[\"']?yes", ufw_conf, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    return "firewalld" if firewalld else None


def container_bridges(facts: dict[str, Any]) -> list[str]:
    """List the bridges of containers and virtual machines, which may talk to their host.

    facts: `ansible_facts`.
    """
    # A bridge with a port on the PCI bus leads to the LAN, where other machines are, not guests.
    return sorted(
        name
        for name in _interface_names(facts)
        if GUEST_BRIDGE.match(name)
        and not any(_link(facts, port).pciid for port in _link(facts, name).interfaces)
    )


def _interface_names(facts: dict[str, Any]) -> list[str]:
    setup = {"interfaces": facts.get("interfaces")}
    return list(reading.read(setup, Setup, "its network interfaces").interfaces)


def _link(facts: dict[str, Any], name: str) -> Interface:
    """Read Ansible's facts about a network interface; an unlisted one has no addresses."""
    # Ansible's keys have _ for each - : and . of a name: "br_1f2e" for br-1f2e.
    interface_facts = facts.get(re.sub(r"[-:.]", "_", name)) or {}
    return reading.read(interface_facts, Interface, f"its network interface {name}")


def interface_networks(facts: dict[str, Any], server_address: str) -> list[str]:
    """List the networks of the interface that has `server_address`; [] if no interface has it.

    facts: `ansible_facts` of the machine, used only for its own rules, which let everybody in these
    networks connect to ssh.
    """
    for name in _interface_names(facts):
        link = _link(facts, name)
        if any(address.address == server_address for address in link.addresses):
            return [str(network) for network in _networks_of_link(link)]
    return []


def _networks_of_link(link: Interface) -> list[Any]:
    """List the networks of an interface that have addresses for other machines.

    Raises PlanError for an impossible address.
    """
    texts = [f"{address.address}/{address.prefix}" for address in link.addresses]
    try:
        networks = [ipaddress.ip_interface(text).network for text in texts]
    except ValueError as error:
        raise PlanError(f"an address of its network interfaces: {error}") from None
    # A /31 or /32 is the address of a VPN or of this machine only.
    return [network for network in networks if network.num_addresses > 2]


def find_cut_off_listeners(sockets: str, ssh_port: str, opened: list[dict[str, Any]]) -> list[str]:
    """List the listeners that only members will be able to reach: ["smbd (tcp 445)", ...].

    sockets: `ss --no-header --listening --numeric --processes --tcp --udp`; opened: the setting
    firewall_open, [{"port", "protocol"}].
    """
    open_ports = OPEN_PORTS | {("tcp", ssh_port)}
    open_ports |= {(entry.get("protocol", "tcp"), str(entry["port"])) for entry in opened}
    listeners = set()
    for line in sockets.splitlines():
        # tcp LISTEN 0 50 0.0.0.0:445 0.0.0.0:* users:(("smbd",pid=812,fd=30))
        fields = line.split()
        if len(fields) < 5:
            continue
        protocol, (address, _, port) = fields[0], fields[4].rpartition(":")
        if not re.fullmatch("[0-9]{1,5}", port):
            continue
        # ss writes 127.0.0.1, [::1], [::ffff:127.0.0.1] or, bound to the interface, *%lo.
        loopback = re.match(r"\[?(127\.|::1\]?$|::ffff:127\.)", address) or "%lo" in address
        if not loopback and (protocol, port) not in open_ports:
            # The kernel's own listeners, such as NFS, have no process.
            program = re.search(r'"([^"]+)"', line)
            listeners.add((program.group(1) if program else "the kernel", protocol, int(port)))
    return [f"{program} ({protocol} {port})" for program, protocol, port in sorted(listeners)]


# Finds (day, user, address) in a line that journalctl --output=short-iso prints:
# "2026-11-20T09:12:31+0100 pc1 sshd[812]: Accepted publickey for anna from 10.20.0.8 port 50022".
LOGIN = re.compile(
    r"(\d{4}-\d{2}-\d{2})T\S+ .*?: "
    r"Accepted \S+ for ([\w.@\\$+-]{1,64}) from ([0-9a-fA-F:.]{2,45})[ %]"
)
MAX_LISTED_PEERS = 8  # so that the warning stays a sentence; more peers are only counted


def find_cut_off_peers(
    sockets: str, journal: str, admitted: list[str], facts: dict[str, Any]
) -> dict[str, Any]:
    """Find the computers that came by ssh and that the rules will keep out.

    Returns {"peers": ["10.20.0.8 (anna, 2026-11-20)"], "admin_cidrs": ["10.20.0.0/16"]};
    "admin_cidrs" are the networks that would let the peers in.

    sockets: the established connections to ssh's port, as `ss --no-header --numeric` prints them;
    journal: sshd's messages of the last weeks; admitted: addresses and networks that the rules
    let in ("" is ignored); facts: `ansible_facts`, for the networks of the machine's interfaces.
    """
    admitted_networks = [ipaddress.ip_network(text, strict=False) for text in admitted if text]
    logins: dict[Any, str] = {}  # {address, or None for an unreadable one: "user, day"}
    # The journal has the oldest login first, so the last login of a peer stays.
    for day, user, text in LOGIN.findall(journal):
        logins[_read_peer(text)] = f"{user}, {day}"
    for line in sockets.splitlines():
        # tcp ESTAB 0 36 10.20.0.5:22 10.20.0.7:51234: the second address is the peer's.
        addresses = re.findall(r"(\S+):\d+(?=\s|$)", line)
        if len(addresses) >= 2:
            logins[_read_peer(addresses[1])] = "connected now"
    peers = {
        peer: login
        for peer, login in logins.items()
        if peer
        and not peer.is_loopback
        and not any(peer in network for network in admitted_networks)
    }
    if not peers:
        return {"peers": [], "admin_cidrs": []}
    clauses = [f"{peer} ({login})" for peer, login in peers.items()]
    if len(clauses) > MAX_LISTED_PEERS:
        clauses[MAX_LISTED_PEERS:] = [f"{len(clauses) - MAX_LISTED_PEERS} more"]
    # A peer's address in a private network changes, so its whole network is proposed. A public
    # network could be the whole internet, so it is never proposed.
    private_networks = [
        network
        for name in _interface_names(facts)
        for network in _networks_of_link(_link(facts, name))
        if network.is_private
    ]
    cidrs = {str(next((net for net in private_networks if peer in net), peer)) for peer in peers}
    return {"peers": clauses, "admin_cidrs": sorted(cidrs)}


def _read_peer(text: str) -> Any:
    """Read the address of a socket or of sshd's log; None for any other text."""
    # "[::ffff:10.20.0.7%eth0]" is 10.20.0.7: IPv4 in IPv6, with the name of an interface.
    try:
        address = ipaddress.ip_address(text.strip("[]").split("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def read_ssh_connection(ssh_connection: str) -> dict[str, str]:
    """Read $SSH_CONNECTION of a machine: {"client", "server", "ssh_port"}.

    "client" is the control node's address, as the machine sees it, and "server" the machine's. Both
    are "" without an ssh connection (ansible_connection=local), which the rules need not keep open.
    """
    # "192.168.56.1 50022 192.168.56.111 22"; an IPv6 address may end with %eth0.
    fields = ssh_connection.split()
    if len(fields) != 4 or not re.fullmatch("[0-9]{1,5}", fields[-1]):
        return {"client": "", "server": "", "ssh_port": "22"}
    client, _, server, port = (field.split("%")[0] for field in fields)
    return {"client": client, "server": server, "ssh_port": port}


def split_by_family(addresses: list[str]) -> dict[str, list[str]]:
    """Split addresses and networks into {"ipv4": [...], "ipv6": [...]}, for nft sets.

    Networks that overlap are merged, because nft rejects a set with overlaps. "" is ignored. Raises
    PlanError for a text that is no address.
    """
    networks: dict[int, list[Any]] = {4: [], 6: []}
    for text in addresses:
        if not text:
            continue
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise PlanError(
                f"'{text}' is not an address or network: the firewall needs numbers. Write the "
                "address (192.168.56.111) or network (192.168.56.0/24)."
            ) from None
        networks[network.version].append(network)
    return {
        name: [str(net) for net in ipaddress.collapse_addresses(networks[version])]
        for name, version in (("ipv4", 4), ("ipv6", 6))
    }


def member_addresses(hosts: list[str], hostvars: dict[str, Any]) -> list[str]:
    """List the addresses that members' packets come from, for files that root reads.

    hosts: names in the inventory; hostvars: {host: its variables}. Raises PlanError if
    `other_addresses` is not a list of addresses.
    """
    # Linux may send from the older address of a network, so other_addresses count too. Addresses
    # in a machine's facts do not count: the machine could report any free address, and let it in.
    addresses = set()
    for host in hosts:
        variables = hostvars[host]
        addresses.add(reading.setting(variables, "ansible_host", host, host))
        addresses.add(reading.setting(variables, "address", host).split("/")[0])
        addresses.update(_other_addresses(host, variables))
    return sorted(addresses - {""})


def kept_addresses(variables: dict[str, Any], new_address: str) -> str:
    """Write other_addresses for a machine that gets a new address and keeps its present one."""
    host = variables["inventory_hostname"]
    present = reading.setting(variables, "ansible_host", host, host)
    addresses = dict.fromkeys([*_other_addresses(host, variables), present])
    return ",".join(address for address in addresses if address != new_address)


def _other_addresses(host: str, variables: dict[str, Any]) -> Iterator[str]:
    """Read the addresses in other_addresses, a list or a text with commas."""
    setting = variables.get("other_addresses") or []
    for text in setting if isinstance(setting, list) else str(setting).split(","):
        try:
            yield str(ipaddress.ip_address(str(text).strip()))
        except ValueError:
            raise PlanError(
                f"{host}: other_addresses={setting} is not a list of addresses. Write it as "
                "other_addresses=192.168.56.57,192.168.57.3"
            ) from None
