"""Read a machine's network interfaces, and the addresses that the inventory gives them."""

from __future__ import annotations

import ipaddress
from typing import Any

from boundary.facts import IpLink, LinkAddress

from . import PlanError, reading

ROUTE_KINDS = ("unicast", "local", "broadcast", "multicast", "throw", "unreachable", "prohibit",
               "blackhole", "nat", "anycast")  # fmt: skip


def parse_files(printed: str) -> dict[str, str]:
    """Turn `grep --recursive --with-filename '' ...` (lines of "path:line") into {path: text}."""
    files: dict[str, str] = {}
    for line in printed.splitlines():
        path, colon, text = line.partition(":")
        if not colon:
            continue
        files[path] = files.get(path, "") + text + "\n"
    return files


def routes(printed: str) -> list[dict[str, Any]]:
    """List [{"to": "default" or a network, "gateway", "card", "proto"}] of `ip -4 route`.

    gateway and proto are "" if the route has none. A route over several routers (lines that begin
    with nexthop) is several rows.
    """
    # Text is read, since iproute2 4.15 of Ubuntu 18.04 has no JSON of routes.
    rows, to = [], ""
    for line in printed.splitlines():
        words = line.split()
        if not words:
            continue
        if not line[0].isspace():
            # Some begin with their kind: `blackhole 10.0.0.0/8`.
            to = words[1] if words[0] in ROUTE_KINDS and len(words) > 1 else words[0]
        pairs = dict(zip(words, words[1:]))
        gateway = pairs.get("via", "")
        try:
            if to != "default":
                ipaddress.IPv4Network(to, strict=False)
            if gateway:
                ipaddress.IPv4Address(gateway)
        except ValueError:  # no route of IPv4, or a line that is none
            continue
        if "dev" in pairs:
            rows.append({"to": to, "gateway": gateway, "card": pairs["dev"],
                         "proto": pairs.get("proto", "")})  # fmt: skip
    return rows


def links(ip_json: str) -> list[IpLink]:
    """Read the interfaces of `ip -json address`."""
    rows: list[IpLink] = reading.parsed(ip_json or "[]", list[IpLink], "ip -json address")
    return [link for link in rows if link.ifname]


def interface_of(ip_json: str, address: str, host: str) -> str:
    """Name the interface that holds an address, from `ip -json address`."""
    for link in links(ip_json):
        if any(entry.local == address for entry in link.addr_info):
            return link.ifname
    raise PlanError(
        f"{host}: none of its network cards has {address}, the address that reaches it (is a "
        "router in between?). Write interface=... with the network card into its line in "
        "inventory.ini."
    )


def interface_facts(ip_json: str, interface: str, host: str) -> dict[str, Any]:
    """Give {"mac", "master", "ports", "parent", "mtu", "addresses": ["192.168.56.111/24", ...],
    "dynamic"} of an interface. Addresses are of IPv4 only.

    master: the bridge or bond that it is a port of, or "". ports: those of a bridge or bond;
    parent: the interface below a VLAN, or ""; both may have this interface's hardware address.
    dynamic: true if DHCP lent an address for a time. Raises PlanError if there is none of the name.
    """
    every_link = links(ip_json)
    for link in every_link:
        if link.ifname == interface:
            return {
                "mac": link.address,
                "master": link.master,
                "ports": [port.ifname for port in every_link if port.master == interface],
                "parent": link.link,
                "mtu": link.mtu,
                "addresses": [_with_prefix(address, host) for address in link.ipv4],
                "dynamic": any(address.dynamic for address in link.ipv4),
            }
    cards = ", ".join(sorted(link.ifname for link in every_link))
    raise PlanError(
        f"{host}: there is no network card {interface}. It has: {cards}. Correct interface=..."
    )


def _with_prefix(entry: LinkAddress, host: str) -> str:
    try:
        return ipaddress.IPv4Interface((entry.local, entry.prefixlen)).with_prefixlen
    except ValueError as error:
        raise PlanError(f"{host}: `ip -json address` printed an invalid address: {error}") from None


def full_address(address: str, addresses: list[str], host: str) -> str:
    """Complete an address without a prefix length by the interface's network that contains it."""
    try:
        static = ipaddress.IPv4Interface(address)
    except ValueError:
        raise PlanError(
            f"{host}: address={address} is not an IPv4 address. Write it as 192.168.56.111/24."
        ) from None
    if "/" in address:
        return static.with_prefixlen
    for present in map(ipaddress.IPv4Interface, addresses):
        # A /32 is one address, so it says nothing about the size of a network.
        if static.ip in present.network and present.network.prefixlen < 32:
            return f"{static.ip}/{present.network.prefixlen}"
    raise PlanError(
        f"{host}: the card has no address in the network of {address}, so its size is unknown. "
        f"Write the prefix length too: address={address}/24."
    )


def address_conflicts(hosts: list[str], hostvars: dict[str, Any]) -> list[str]:
    """Tell in sentences which two machines would have the same address."""
    owners: dict[str, str] = {}
    conflicts = []
    for host in hosts:
        variables = hostvars[host]
        static = reading.setting(variables, "address", host).split("/")[0]
        claimed = {reading.setting(variables, "ansible_host", host, host), static}
        for address in sorted(claimed - {""}):
            owner = owners.setdefault(address, host)
            if owner != host:
                conflicts.append(f"{owner} and {host} would both have {address}.")
    return conflicts
