"""Who may reach a machine, and whether its firewall is ours to set. Pure functions of facts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from boundary.facts import Interface, Services, Setup

from . import PlanError, reading

# The bridges of Docker, libvirt, LXD, Incus, LXC, Podman and CNI.
GUESTS_BRIDGE = re.compile(
    r"(docker0|br-[0-9a-f]{12}|(virbr|lxdbr|incusbr|lxcbr|podman|cni-podman|cni)\d+)$"
)
# Ports that the rules themselves open: for DHCP's answers and mDNS.
LET_IN = {("udp", "68"), ("udp", "546"), ("udp", "5353")}


def other_firewall(services: dict[str, Any], ufw_conf: str, chains: str) -> str | None:
    """The name of a firewall that already filters this machine's incoming packets, or None.

    services: `ansible_facts.services`; ufw_conf: text of /etc/ufw/ufw.conf ("" when absent);
    chains: output of `nft list chains` ("" when nft is not there), as text: nft 0.8.2 of Ubuntu
    18.04 has no JSON. A packet has to pass every base chain of the hook: a second one that drops by
    default keeps peers out whatever we do.
    """
    units = reading.read(services, Services, "its services")
    manager = firewall_manager(ufw_conf, units.firewalld.state == "running")
    if manager:
        return manager
    for family, table, chain in _dropping_chains(chains):
        if table != "tandem":
            return f"nftables table {family} {table}, chain {chain}"
    return None


def firewall_manager(ufw_conf: str, firewalld: bool) -> str | None:
    """The name of the firewall manager that is switched on; None if none is.

    ufw_conf: as in other_firewall, a shell fragment, so quotes and blanks are allowed in it.
    """
    if re.search(r"^\s*ENABLED\s*=\s*[\"']?yes", ufw_conf, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    return "firewalld" if firewalld else None


def _dropping_chains(chains: str) -> list[tuple[str, str, str]]:
    """(family, table, name) of the base chains that drop incoming packets by default."""
    dropping, table, name = [], ("", ""), ""
    for line in chains.splitlines():
        opened = re.match(r"table (\S+) (\S+) \{", line)
        table = (opened[1], opened[2]) if opened else table
        match = re.match(r"\s+chain (\S+) \{", line)
        name = match.group(1) if match else name
        if re.search(r"\bhook input\b.*\bpolicy drop\b", line):
            dropping.append((*table, name))
    return dropping


def container_bridges(facts: dict[str, Any]) -> list[str]:
    """The bridges of containers and virtual machines, which may talk to their host.

    facts: `ansible_facts`. A bridge that a card of the machine is part of is a way to the LAN.
    """

    def to_the_lan(name: str) -> bool:
        return any(_link(facts, port).pciid for port in _link(facts, name).interfaces)

    names = [name for name in _interfaces(facts) if GUESTS_BRIDGE.match(name)]
    return sorted(name for name in names if not to_the_lan(name))


def _interfaces(facts: dict[str, Any]) -> list[str]:
    own = {"interfaces": facts.get("interfaces")}
    return list(reading.read(own, Setup, "its network interfaces").interfaces)


def _link(facts: dict[str, Any], name: str) -> Interface:
    """What Ansible knows of a network interface; its keys have _ where a name has - : or ."""
    known = facts.get(re.sub(r"[-:.]", "_", name)) or {}
    return reading.read(known, Interface, f"its network interface {name}")


def interface_networks(facts: dict[str, Any], own: str) -> list[str]:
    """The networks of the card that has an address: whoever is in them may try ssh.

    facts: `ansible_facts` of the machine, used for its own rules alone. [] if no card has it.
    """
    for name in _interfaces(facts):
        link = _link(facts, name)
        if any(address.address == own for address in link.addresses):
            return [str(network) for network in _networks_of_link(link)]
    return []


def _networks_of_link(link: Interface) -> list[Any]:
    """The networks that an interface is in, of which each has room for others."""
    texts = [f"{address.address}/{address.prefix}" for address in link.addresses]
    try:
        networks = [ipaddress.ip_interface(text).network for text in texts]
    except ValueError as error:
        raise PlanError(f"an address of its network interfaces: {error}") from None
    return [network for network in networks if network.num_addresses > 2]


def cut_off(sockets: str, ssh_port: str, opened: list[dict[str, Any]]) -> list[str]:
    """The listeners that only members will be able to reach: ["smbd (tcp 445)", ...].

    sockets: `ss --no-header --listening --numeric --processes --tcp --udp`; opened: firewall_open.
    """
    spared = LET_IN | {("tcp", ssh_port)}
    spared |= {(open.get("protocol", "tcp"), str(open["port"])) for open in opened}
    names = set()
    for line in sockets.splitlines():
        words = line.split()
        address, _, port = "".join(words[4:5]).rpartition(":")
        if not re.fullmatch("[0-9]{1,5}", port):
            continue
        loopback = re.match(r"\[?(127\.|::1\]?$|::ffff:127\.)", address) or "%lo" in address
        if not loopback and (words[0], port) not in spared:
            who = re.search(r'"([^"]+)"', line)
            names.add((who.group(1) if who else "the kernel", words[0], int(port)))
    return [f"{who} ({protocol} {port})" for who, protocol, port in sorted(names)]


# A line of sshd's in the journal, as --output=short-iso prints it: its day, the user, the address.
LOGIN = re.compile(
    r"(\d{4}-\d{2}-\d{2})T\S+ .*?: "
    r"Accepted \S+ for ([\w.@\\$+-]{1,64}) from ([0-9a-fA-F:.]{2,45})[ %]"
)
PEERS_NAMED = 8


def ssh_cut_off(
    sockets: str, journal: str, admitted: list[str], facts: dict[str, Any]
) -> dict[str, Any]:
    """Who came by ssh and will not get in: {"peers": ["10.20.0.7 (connected now)", "10.20.0.8
    (anna, 2026-11-20)"], "admin_cidrs": ["10.20.0.0/16"], which would let them}.

    sockets: the established connections to ssh's port, as `ss --no-header --numeric` prints them;
    journal: what sshd said during the last weeks; admitted: addresses and networks that the rules
    let in ("" counts for nothing); facts: `ansible_facts`, for the networks of the machine's cards.
    """
    rules = [ipaddress.ip_network(text, strict=False) for text in admitted if text]
    logins: dict[Any, str] = {}
    for day, user, text in LOGIN.findall(journal):  # the oldest first, so that the last login stays
        logins[_peer(text)] = f"{user}, {day}"
    for line in sockets.splitlines():
        ends = re.findall(r"(\S+):\d+(?=\s|$)", line)
        if len(ends) >= 2:
            logins[_peer(ends[1])] = "connected now"
    peers = {
        peer: when
        for peer, when in logins.items()
        if peer and not peer.is_loopback and not any(peer in network for network in rules)
    }
    named = [f"{peer} ({when})" for peer, when in peers.items()]
    more = [f"{len(named) - PEERS_NAMED} more"] if len(named) > PEERS_NAMED else []
    return {
        "peers": [*named[:PEERS_NAMED], *more],
        "admin_cidrs": sorted({_network_of(peer, facts) for peer in peers}),
    }


def _peer(text: str) -> Any:
    """The address that a socket or sshd names, without brackets, its card and IPv6's wrapping."""
    address = _address(text.strip("[]").split("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _network_of(peer: Any, facts: dict[str, Any]) -> str:
    """The private network of one of the machine's cards in which a peer is; else its address."""
    for name in _interfaces(facts):
        for network in _networks_of_link(_link(facts, name)):
            if peer in network and network.is_private:
                return str(network)
    return str(peer)


def connection_end(ssh_connection: str) -> dict[str, str]:
    """Read $SSH_CONNECTION's text: the control machine's address as seen here, the machine's own
    address ("own"), and sshd's port.

    Without an ssh connection (ansible_connection=local) there is nothing to keep open: both "".
    """
    fields = ssh_connection.split()
    if len(fields) != 4 or not re.fullmatch("[0-9]{1,5}", fields[3]):
        return {"address": "", "own": "", "ssh_port": "22"}
    there, own = (fields[number].split("%")[0] for number in (0, 2))
    return {"address": there, "own": own, "ssh_port": fields[3]}


def by_family(addresses: list[str]) -> dict[str, list[str]]:
    """Sort addresses and networks into {"ipv4": [...], "ipv6": [...]}, merged, for nft sets."""
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
    """The addresses that members' packets come from, for files that root reads.

    The inventory's alone: `ansible_host`, the static `address`, and `other_addresses`, which name
    those that a machine keeps beside it (where an address was added, Linux sends from the older one
    in the same network). What a machine says of itself lets nobody in: it could say any address of
    the network that is free. Raises PlanError where `other_addresses` has something else.
    """
    addresses = set()
    for host in hosts:
        own = hostvars[host]
        static = reading.setting(own, "address", host).split("/")[0]
        addresses |= {reading.setting(own, "ansible_host", host, host), static, *_others(host, own)}
    return sorted(addresses - {""})


def kept_addresses(variables: dict[str, Any], new: str) -> str:
    """other_addresses of a machine that gets a new address beside the one in the inventory."""
    host = variables["inventory_hostname"]
    addresses = [*_others(host, variables), reading.setting(variables, "ansible_host", host, host)]
    return ",".join(dict.fromkeys(address for address in addresses if address != new))


def _others(host: str, variables: dict[str, Any]) -> Iterator[str]:
    """The addresses in other_addresses, a list or a text with commas."""
    setting = variables.get("other_addresses") or []
    for text in setting if isinstance(setting, list) else str(setting).split(","):
        try:
            yield str(ipaddress.ip_address(str(text).strip()))
        except ValueError:
            raise PlanError(
                f"{host}: other_addresses={setting} is not a list of addresses. Write it as "
                "other_addresses=192.168.56.57,192.168.57.3"
            ) from None


def _address(text):
    """The IP address that a text consists of; None for any other text."""
    try:
        return ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        return None
