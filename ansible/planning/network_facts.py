"""Read a machine's network interfaces, and the addresses that the inventory gives them.

Role network calls most of these functions as filters, before network.py plans a static address.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from boundary.facts import IpLink

from . import PlanError, reading

# The kinds of routes with which a line of `ip route` may begin. source: ip-route(8).
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

    "gateway" and "proto" are "" if the route has none. A route over several routers gives a row for
    each of its lines with nexthop.
    """
    # iproute2 4.15 of Ubuntu 18.04 prints no JSON of routes, so the lines are read:
    # default via 192.168.56.1 dev enp3s0 proto dhcp metric 100
    # 10.20.0.0/16
    #         nexthop via 192.168.56.2 dev enp3s0 weight 1
    rows, to = [], ""
    for line in printed.splitlines():
        words = line.split()
        if not words:
            continue
        if not line[0].isspace():
            # Some lines begin with the kind of the route: `blackhole 10.0.0.0/8`.
            to = words[1] if words[0] in ROUTE_KINDS and len(words) > 1 else words[0]
        pairs = dict(zip(words, words[1:]))
        gateway = pairs.get("via", "")
        try:
            if to != "default":
                ipaddress.IPv4Network(to, strict=False)
            if gateway:
                ipaddress.IPv4Address(gateway)
        except ValueError:  # a route of IPv6, or a line that is not a route
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
    """Name the interface that has an address. ip_json: the output of `ip -json address`."""
    for link in links(ip_json):
        if any(entry.local == address for entry in link.addr_info):
            return link.ifname
    raise PlanError(
        f"{host}: none of its network cards has {address}, the address that reaches it (is a "
        "router in between?). Write interface=... with the network card into its line in "
        "inventory.ini."
    )


def interface_facts(ip_json: str, interface: str, host: str) -> dict[str, Any]:
    """Return {"mac", "master", "ports", "parent", "mtu", "addresses", "dynamic"} of an interface.

    "master": the bridge or bond that has the interface as a port, or ""; "ports": the ports of a
    bridge or bond; "parent": the interface below a VLAN, or ""; "addresses": of IPv4, such as
    "192.168.56.111/24"; "dynamic": true if DHCP lent an address for a time. ip_json: the output of
    `ip -json address`. Raises PlanError if no interface has the name.
    """
    every_link = links(ip_json)
    link = next((link for link in every_link if link.ifname == interface), None)
    if link is None:
        cards = ", ".join(sorted(link.ifname for link in every_link))
        raise PlanError(
            f"{host}: there is no network card {interface}. It has: {cards}. Correct interface=..."
        )
    try:
        pairs = [(address.local, address.prefixlen) for address in link.ipv4]
        addresses = [ipaddress.IPv4Interface(pair).with_prefixlen for pair in pairs]
    except ValueError as error:
        raise PlanError(f"{host}: `ip -json address` printed an invalid address: {error}") from None
    return {
        "mac": link.address,
        "master": link.master,
        "ports": [port.ifname for port in every_link if port.master == interface],
        "parent": link.link,
        "mtu": link.mtu,
        "addresses": addresses,
        "dynamic": any(address.dynamic for address in link.ipv4),
    }


def full_address(address: str, addresses: list[str], host: str) -> str:
    """Complete an address with the prefix length of the interface's network that contains it."""
    try:
        static = ipaddress.IPv4Interface(address)
    except ValueError:
        raise PlanError(
            f"{host}: address={address} is not an IPv4 address. Write an address like "
            "192.168.56.111/24."
        ) from None
    if "/" in address:
        return static.with_prefixlen
    for present in map(ipaddress.IPv4Interface, addresses):
        # A /32 is one address, so it says nothing about the size of a network.
        if static.ip in present.network and present.network.prefixlen < 32:
            return f"{static.ip}/{present.network.prefixlen}"
    raise PlanError(
        f"{host}: its network card has no address in the network of {address}, so the size of "
        f"that network is unknown. Add the prefix length, for example address={address}/24."
    )


def address_conflicts(hosts: list[str], hostvars: dict[str, Any]) -> list[str]:
    """List sentences about pairs of machines that would have the same address."""
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
