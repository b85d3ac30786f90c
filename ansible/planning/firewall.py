"""Who may reach a machine, and whether its firewall is ours to set: decided from facts alone."""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter

from .errors import PlanError

DOCKER_BRIDGE = re.compile(r"^(docker0|br-[0-9a-f]{12})$")


def other_firewall(services: dict, ufw_conf: str, chains: str) -> str | None:
    """Name the firewall that already rules this machine's incoming packets, or None.

    services: `ansible_facts.services`; ufw_conf: text of /etc/ufw/ufw.conf ("" when absent);
    chains: output of `nft --json list chains` ("" when nft is not there). A packet has to pass
    every base chain of the hook: a second one that drops by default keeps peers out whatever we do.
    """
    manager = firewall_manager(
        ufw_conf, services.get("firewalld.service", {}).get("state") == "running"
    )
    if manager:
        return manager
    for chain in _input_chains(chains):
        if chain.get("table") != "tandem" and chain.get("policy") == "drop":
            return f"nftables table {chain['family']} {chain['table']}, chain {chain['name']}"
    return None


def firewall_manager(ufw_conf: str, firewalld: bool) -> str | None:
    """Name the program that manages a firewall and is switched on; None where none is.

    ufw_conf: as in other_firewall, a shell fragment, so quotes and blanks are allowed in it.
    """
    if re.search(r"^\s*ENABLED\s*=\s*[\"']?yes", ufw_conf, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    return "firewalld" if firewalld else None


def _input_chains(chains: str) -> list[dict]:
    entries = json.loads(chains)["nftables"] if chains.strip() else []
    found = [entry["chain"] for entry in entries if "chain" in entry]
    return [chain for chain in found if chain.get("hook") == "input"]


def container_bridges(interfaces: list[str]) -> list[str]:
    """Docker's own bridges among a machine's interfaces: its containers may talk to their host."""
    return sorted(name for name in interfaces if DOCKER_BRIDGE.match(name))


def connection_end(ssh_connection: str) -> dict[str, str]:
    """Read $SSH_CONNECTION's text: the control machine's address as seen here, and sshd's port.

    Without an ssh connection (ansible_connection=local) there is nothing to keep open: address "".
    """
    fields = ssh_connection.split()
    if len(fields) != 4:
        return {"address": "", "ssh_port": "22"}
    return {"address": fields[0].split("%")[0], "ssh_port": fields[3]}


def by_family(addresses: list[str]) -> dict[str, list[str]]:
    """Sort addresses and networks into {"ipv4": [...], "ipv6": [...]}, merged, for nft sets."""
    networks: dict[int, list] = {4: [], 6: []}
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


def member_addresses(hosts: list[str], hostvars: dict, control: dict) -> list[str]:
    """List the addresses by which members' packets come, for files that root reads.

    `ansible_host`, the static `address`, and of what else a machine says that it has only what can
    be its own: where an address was added, Linux sends from the older one of the same network. What
    a machine says is not trusted: see _credible. Addresses that several machines have are those of
    bridges for containers, and no member's own.
    control: {"networks": ["192.168.56.1/24", ...], "gateways": [...]} of the control machine.
    """
    listed = {host: _listed(host, hostvars[host]) for host in hosts}
    networks = _networks(listed, [hostvars[host] for host in hosts], control)
    own: dict[str, set[str]] = {}
    for host in hosts:
        others = set().union(*(listed[other] for other in hosts if other != host))
        others |= set(control["gateways"]) | _control_addresses(control, listed[host])
        told = _credible(hostvars[host], networks) - others
        own[host] = listed[host] | told
    seen = Counter(address for each in own.values() for address in each)
    return sorted(address for address, count in seen.items() if count == 1)


def _listed(host: str, variables: dict) -> set[str]:
    """The inventory's own addresses of a machine, which the user vouches for."""
    static = variables.get("address", "").split("/")[0]
    return {variables.get("ansible_host", host), static} - {""}


def _networks(listed: dict, variables: list[dict], control: dict) -> list:
    """Networks of the inventory's addresses: as the control machine has them, or as written."""
    networks = [ipaddress.ip_interface(text).network for text in control["networks"]]
    written = [each["address"] for each in variables if "/" in each.get("address", "")]
    known = [address for each in listed.values() for address in map(_address, each) if address]
    networks = [net for net in networks if any(address in net for address in known)]
    return networks + [ipaddress.ip_interface(text).network for text in written]


def _control_addresses(control: dict, listed: set[str]) -> set[str]:
    """The control machine's own addresses, which no other machine may claim."""
    own = {text.split("/")[0] for text in control["networks"]}
    return set() if own & listed else own


def _credible(variables: dict, networks: list) -> set[str]:
    """What a machine says of its addresses, as far as it is one address each in such a network."""
    if variables.get("address") and variables.get("network_mode") == "replace":
        return set()
    found = set()
    for text in variables.get("ansible_facts", {}).get("all_ipv4_addresses", []):
        address = _address(text)
        for network in networks if address else []:
            edges = (network.network_address, network.broadcast_address)
            if address in network and (network.num_addresses <= 2 or address not in edges):
                found.add(str(address))
    return found


def _address(text):
    """The IP address that a text is, and nothing else; None for any other text."""
    try:
        return ipaddress.ip_address(text) if isinstance(text, str) else None
    except ValueError:
        return None
