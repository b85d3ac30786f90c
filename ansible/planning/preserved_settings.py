"""What a machine's card has besides its IPv4 address, so that a new address takes none of it away.

Name servers, search domain, router, wake-on-LAN, routes, IPv6. Texts in, texts and values out.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from . import PlanError
from .network_facts import routes
from .network_lease import dhcp_routes, ipv4, name_servers, refuse_lost

# Of a keyfile's [ipv4], what says which address: replaced; all else stays.
KEYFILE_ADDRESS = re.compile(r"(method|address\d*|addresses\d*|gateway|dns)=")
KEYFILE_DHCP = re.compile(r"(dhcp-|ignore-auto)")
# Of an ifupdown stanza: what says which address, and what DHCP alone reads.
STANZA_ADDRESS = re.compile(
    r"\s*(address|netmask|network|broadcast|gateway|pointopoint|hostname|leasehours|leasetime"
    r"|vendor|client)\s"
)
STANZA_DNS = re.compile(r"\s*dns-(nameservers?|search|domain)\s")


def present_way(facts: dict[str, Any]) -> dict[str, Any]:
    """{"dns", "search": lists, "gateway": "" for none}: how the machine finds others today.

    facts: what network_lease.name_servers reads, and route (`ip -4 route show`).
    """
    ways = [way for way in routes(facts["route"]) if way["card"] == facts["interface"]]
    own = [way["gateway"] for way in ways if way["to"] == "default" and ipv4(way["gateway"])]
    return {**name_servers(facts), "gateway": own[0] if own else ""}


def complete(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """`want` with what it leaves open taken from today; adds "search", and "routes" that DHCP gave.
    Raises where today's router would be lost (it is not in the network of the new address), or the
    name servers, or such a route.
    """
    present = present_way(facts)
    gateway = {"none": "", "": present["gateway"]}.get(want["gateway"], want["gateway"])
    network = ipaddress.ip_interface(want["address"]).network
    if gateway and not want["gateway"] and ipaddress.ip_address(gateway) not in network:
        raise PlanError(
            f"{facts['host']}: its way to the internet is {gateway}, which is not in the network "
            f"of {want['address']}. Write gateway=... (or gateway=none, for none) into its line of "
            "inventory.ini."
        )
    dns = want["dns"] or present["dns"]
    refuse_lost(facts, dns)
    more = {"search": present["search"],
            "routes": dhcp_routes(facts, present["gateway"], want["address"])}  # fmt: skip
    return {**want, "gateway": gateway, "dns": dns, **more}


def sections(text: str) -> list[tuple[str, list[str]]]:
    """[(name, lines)] of a file in the manner of .ini, without comments and empty lines.

    A name may come several times, as [Route] does.
    """
    result: list[tuple[str, list[str]]] = []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            result.append((line[1:-1], []))
        elif line and line[0] not in "#;" and result:
            result[-1][1].append(line)
    return result


def keyfile_of(facts: dict[str, Any], uuid: str, own: str) -> list[tuple[str, list[str]]]:
    """The sections of the connection that the card has now; [] where NetworkManager made it up."""
    if own in facts["files"] and f"tandem-{facts['interface']}" in facts["nmcli"].splitlines():
        return sections(facts["files"][own])
    for path, text in facts["files"].items():
        if "/NetworkManager/" in path and uuid and f"uuid={uuid}" in text.splitlines():
            return sections(text)
    return []


def keyfile_options(base: list[tuple[str, list[str]]], replaced: bool) -> dict[str, list[str]]:
    """{section: lines} that our connection takes over from the one that it replaces."""
    names = {"802-3-ethernet": "ethernet"}  # as NetworkManager before 1.0 called it
    preserved: dict[str, list[str]] = {"ethernet": [], "ipv4": []}
    for name, lines in base:
        if name != "connection":
            preserved.setdefault(names.get(name, name), []).extend(lines)
    preserved["ipv4"] = [line for line in preserved["ipv4"] if not KEYFILE_ADDRESS.match(line)]
    if replaced:
        preserved["ipv4"] = [line for line in preserved["ipv4"] if not KEYFILE_DHCP.match(line)]
    return preserved


def networkd_options(text: str) -> list[tuple[str, list[str]]]:
    """The sections of a .network file without [Match] and without what gives IPv4 addresses."""
    preserved = []
    for name, lines in sections(text):
        if name in ("Match", "DHCP", "DHCPv4", "DHCPServer"):
            continue
        if name == "Address" and any(_value_is_ipv4(line, "Address") for line in lines):
            continue
        if name == "Route" and _is_default(lines):
            continue
        if name == "Network":
            lines = [kept_line for line in lines for kept_line in _network_line(line)]
        preserved.append((name, lines))
    return preserved


def _network_line(line: str) -> list[str]:
    key, _, value = (part.strip() for part in line.partition("="))
    if key in ("Address", "Gateway", "DNS") and _value_is_ipv4(line, key):
        return []
    if key == "DHCP":
        return ["DHCP=ipv6"] if value.lower() in ("yes", "true", "on", "1", "both", "ipv6") else []
    return [line]


def _value_is_ipv4(line: str, key: str) -> bool:
    match = re.match(rf"{key}\s*=\s*([\d.]+)(/\d+)?$", line)
    return match is not None and ipv4(match.group(1))


def _is_default(lines: list[str]) -> bool:
    """Whether a [Route] is the way to everywhere, by IPv4."""
    values = dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines if "=" in line)
    to = values.get("Destination", "0.0.0.0/0" if ipv4(values.get("Gateway", "")) else "")
    return to == "0.0.0.0/0"


def netplan_card(card: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """netplan's own description of a card with our address instead of its IPv4 ones."""
    dropped = ("dhcp4", "dhcp4-overrides", "gateway4", "addresses", "routes", "nameservers")
    new = {key: value for key, value in card.items() if key not in dropped}
    # An address is a text, or a map of one key that holds its options.
    six = [item for item in card.get("addresses") or []
           if ":" in (item if isinstance(item, str) else next(iter(item), ""))]  # fmt: skip
    routes = [row for row in card.get("routes") or []
              if row.get("to") not in ("default", "0.0.0.0/0")
              or ":" in str(row.get("via", ""))]  # fmt: skip
    if want["gateway"]:
        routes = [{"to": "0.0.0.0/0", "via": want["gateway"]}, *routes]
    for row in want["routes"]:
        way = {"via": row["gateway"]} if row["gateway"] else {"scope": "link"}
        routes.append({"to": row["to"], **way})
    names = dict(card.get("nameservers") or {})
    names |= {"addresses": want["dns"]} if want["dns"] else {}
    if want["search"] and "search" not in names:
        names["search"] = want["search"]
    new |= {"dhcp4": False, "addresses": [want["address"], *six]}
    new |= {"routes": routes} if routes else {}
    return new | ({"nameservers": names} if names else {})


def stanza_options(text: str, interface: str, has_dns: bool) -> list[str]:
    """The lines of a card's IPv4 stanzas that say something else than its address."""
    preserved, inside = [], False
    for line in text.splitlines():
        if re.match(r"\s*(iface|auto|allow-\S+|mapping|source\S*|no-auto-down|no-scripts)\s", line):
            inside = bool(re.match(rf"\s*iface\s+{re.escape(interface)}\s+inet\s", line))
        elif inside and line.strip() and not line.lstrip().startswith("#"):
            dropped = STANZA_ADDRESS.match(line) or (has_dns and STANZA_DNS.match(line))
            preserved += [] if dropped else [line]
    return preserved
