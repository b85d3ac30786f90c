"""Read an interface's other settings, to keep them when its IPv4 address changes.

They are name servers, search domain, router, wake-on-LAN, routes and IPv6. network.py calls
`complete`, and the module of each program (network_nm.py, network_netplan.py, ...) calls the
function for its files. All of them only turn texts into texts or values.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from . import PlanError
from .network_facts import routes
from .network_lease import dhcp_routes, ipv4, name_servers, refuse_lost_dns

# Lines of a keyfile's [ipv4] that the plan replaces. All other lines stay.
KEYFILE_ADDRESS = re.compile(r"(method|address\d*|addresses\d*|gateway|dns)=")
KEYFILE_DHCP = re.compile(r"(dhcp-|ignore-auto)")
# Lines of an ifupdown stanza that give an address, or that only DHCP reads.
STANZA_ADDRESS = re.compile(
    r"\s*(address|netmask|network|broadcast|gateway|pointopoint|hostname|leasehours|leasetime"
    r"|vendor|client)\s"
)
# The first line of a stanza ends the stanza before it, not a blank line or an indent.
STANZA_START = re.compile(r"\s*(iface|auto|allow-\S+|mapping|source\S*|no-auto-down|no-scripts)\s")
ADDRESS_KEYS = ("Address", "Gateway", "DNS")  # of networkd's [Network], for both IP versions
# Values of networkd's DHCP= by which it asks for an IPv6 address too.
DHCP_FOR_IPV6 = ("yes", "true", "on", "1", "both", "ipv6")
STANZA_DNS = re.compile(r"\s*dns-(nameservers?|search|domain)\s")


def present_settings(facts: dict[str, Any]) -> dict[str, Any]:
    """Read {"dns", "search": lists, "gateway": "" for none} that the machine has at present.

    facts: what network_lease.name_servers reads, and route (`ip -4 route show`).
    """
    rows = [row for row in routes(facts["route"]) if row["card"] == facts["interface"]]
    gateways = [row["gateway"] for row in rows if row["to"] == "default" and ipv4(row["gateway"])]
    return {**name_servers(facts), "gateway": gateways[0] if gateways else ""}


def complete(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Complete `want` with the present settings; add "search", and "routes" that DHCP gave.

    facts, want: see network.network_plan. Raises PlanError if the present router, name servers or
    routes of DHCP would be lost.
    """
    present = present_settings(facts)
    gateway = {"none": "", "": present["gateway"]}.get(want["gateway"], want["gateway"])
    network = ipaddress.ip_interface(want["address"]).network
    # A router outside the new address's network could not be reached any more.
    if gateway and not want["gateway"] and ipaddress.ip_address(gateway) not in network:
        raise PlanError(
            f"{facts['host']}: its gateway to the internet is {gateway}, which is not in the "
            f"network of {want['address']}. Write gateway=... (or gateway=none) into its line "
            "in inventory.ini."
        )
    dns = want["dns"] or present["dns"]
    refuse_lost_dns(facts, dns)
    dhcp = dhcp_routes(facts, present["gateway"], want["address"])
    return {**want, "gateway": gateway, "dns": dns, "search": present["search"], "routes": dhcp}


def sections(text: str) -> list[tuple[str, list[str]]]:
    """Split a file like .ini into [(name, lines)], without comments and empty lines.

    The list may have a name several times, such as Route.
    """
    result: list[tuple[str, list[str]]] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            result.append((line[1:-1], []))
        elif line and line[0] not in "#;" and result:
            result[-1][1].append(line)
    return result


def keyfile_options(base: list[tuple[str, list[str]]], replaced: bool) -> dict[str, list[str]]:
    """Collect {section: lines} that Tandem's connection copies from the present connection.

    base: the sections of the present connection; replaced: true if its address is replaced.
    """
    names = {"802-3-ethernet": "ethernet"}  # NetworkManager's name for [ethernet] before 1.0
    preserved: dict[str, list[str]] = {"ethernet": [], "ipv4": []}
    for name, lines in base:
        if name != "connection":
            preserved.setdefault(names.get(name, name), []).extend(lines)
    preserved["ipv4"] = [line for line in preserved["ipv4"] if not KEYFILE_ADDRESS.match(line)]
    if replaced:
        preserved["ipv4"] = [line for line in preserved["ipv4"] if not KEYFILE_DHCP.match(line)]
    return preserved


def networkd_options(text: str) -> list[tuple[str, list[str]]]:
    """List the sections of a .network file, without [Match] and without IPv4 addresses."""
    preserved = []
    for name, lines in sections(text):
        if name in ("Match", "DHCP", "DHCPv4", "DHCPServer"):
            continue
        if name == "Address" and any(_value_is_ipv4(line, "Address") for line in lines):
            continue
        if name == "Route":
            values = dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines if "=" in line)
            # A route without a destination is the default route of its gateway's IP version.
            to_all = "0.0.0.0/0" if ipv4(values.get("Gateway", "")) else ""
            if values.get("Destination", to_all) == "0.0.0.0/0":
                continue
        if name == "Network":
            settings = []
            for line in lines:
                key, _, value = map(str.strip, line.partition("="))
                # If DHCP served both versions, it continues for IPv6.
                if key == "DHCP" and value.lower() in DHCP_FOR_IPV6:
                    settings.append("DHCP=ipv6")
                elif key != "DHCP" and not (key in ADDRESS_KEYS and _value_is_ipv4(line, key)):
                    settings.append(line)
            lines = settings
        preserved.append((name, lines))
    return preserved


def _value_is_ipv4(line: str, key: str) -> bool:
    """Return true if a line sets `key` to an IPv4 address: "Address=192.168.56.111/24"."""
    match = re.match(rf"{key}\s*=\s*([\d.]+)(/\d+)?$", line)
    return match is not None and ipv4(match.group(1))


def netplan_definition(present: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Replace the IPv4 addresses in netplan's definition of an interface with those of `want`."""
    dropped = ("dhcp4", "dhcp4-overrides", "gateway4", "addresses", "routes", "nameservers")
    definition = {key: value for key, value in present.items() if key not in dropped}
    # An address is a text, or a mapping {address: its options}. IPv6 addresses and routes stay.
    ipv6_addresses = [item for item in present.get("addresses") or []
           if ":" in (item if isinstance(item, str) else next(iter(item), ""))]  # fmt: skip
    routes = [row for row in present.get("routes") or []
              if row.get("to") not in ("default", "0.0.0.0/0")
              or ":" in str(row.get("via", ""))]  # fmt: skip
    if want["gateway"]:
        routes = [{"to": "0.0.0.0/0", "via": want["gateway"]}, *routes]
    for row in want["routes"]:
        hop = {"via": row["gateway"]} if row["gateway"] else {"scope": "link"}
        routes.append({"to": row["to"], **hop})
    resolvers = dict(present.get("nameservers") or {})
    resolvers |= {"addresses": want["dns"]} if want["dns"] else {}
    if want["search"] and "search" not in resolvers:
        resolvers["search"] = want["search"]
    definition |= {"dhcp4": False, "addresses": [want["address"], *ipv6_addresses]}
    definition |= {"routes": routes} if routes else {}
    return definition | ({"nameservers": resolvers} if resolvers else {})


def split_stanzas(text: str, interface: str) -> tuple[list[str], list[str]]:
    """Split a file of ifupdown: the lines of the interface's IPv4 stanzas, and all other lines."""
    inside: list[str] = []
    outside: list[str] = []
    lines = outside
    # iface enp3s0 inet static
    #     address 192.168.56.111/24
    #     post-up ethtool -s enp3s0 wol g
    for line in text.splitlines():
        if STANZA_START.match(line):
            is_ours = re.match(rf"\s*iface\s+{re.escape(interface)}\s+inet\s", line)
            lines = inside if is_ours else outside
        lines.append(line)
    return inside, outside


def stanza_options(text: str, interface: str, has_dns: bool) -> list[str]:
    """List the lines of an interface's IPv4 stanzas that set something other than its address."""
    dropped = [STANZA_START, STANZA_ADDRESS] + [STANZA_DNS] * has_dns
    lines, _ = split_stanzas(text, interface)
    settings = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [line for line in settings if not any(pattern.match(line) for pattern in dropped)]
