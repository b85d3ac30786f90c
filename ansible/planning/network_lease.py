"""What DHCP gave a card, which a static address takes over: name servers and search domain, from
whichever program knows them, and the routes besides the default one.

Where /etc/resolv.conf names a server of the machine itself (dnsmasq, unbound), that one asks name
servers that DHCP gave it, and stands without any once the address is static. So others are asked.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from . import PlanError
from .network_facts import routes

RESOLVED = ("127.0.0.53", "127.0.0.54")  # systemd-resolved's own, of which resolvectl speaks


def name_servers(facts: dict[str, Any]) -> dict[str, list[str]]:
    """{"dns", "search"}: IPv4 addresses that are not the machine's own, and domains.

    facts: card_dns and card_search (`resolvectl dns` and `domain` of the card, "" without
    systemd-resolved), resolv (text of resolv.conf), card_ip4 (`nmcli --terse --fields IP4 device
    show CARD`), networkctl (`networkctl status CARD`), leases (text of dhclient's leases).
    """
    servers = _resolved(facts) if facts["card_dns"] else _resolv_conf(facts["resolv"])
    if not servers["dns"] and _local(facts):
        ways = (
            _networkmanager(facts["card_ip4"]),
            _networkd(facts["networkctl"]),
            _dhclient(facts),
        )
        more = next((way for way in ways if way["dns"]), servers)
        servers = {"dns": more["dns"], "search": servers["search"] or more["search"]}
    return servers


def refuse_lost(facts: dict[str, Any], dns: list[str]) -> None:
    """Raise where DHCP feeds a name server of the machine itself, and nobody says from whom."""
    local = _local(facts)
    if dns or not local or not facts["card"]["dynamic"]:
        return
    raise PlanError(
        f"{facts['host']}: its only name server, {local[0]}, is a program on the machine; without "
        "DHCP this program no longer learns which servers to ask. Write dns=... (your network's "
        f"name servers, or dns={local[0]} if the program needs none) into its line of "
        "inventory.ini."
    )


def _local(facts: dict[str, Any]) -> list[str]:
    """The machine's own name servers, where it has no others and nobody spoke for them."""
    servers = [words[1] for words in map(str.split, facts["resolv"].splitlines())
               if words[:1] == ["nameserver"] and len(words) > 1]  # fmt: skip
    if not all(_loopback(server) for server in servers):
        return []
    return [s for s in servers if not (facts["card_dns"] and s in RESOLVED)]


def _loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:  # nothing that could be asked
        return False


def _resolved(facts: dict[str, Any]) -> dict[str, list[str]]:
    """systemd-resolved knows each card's own, which may be none."""
    return _way(facts["card_dns"].partition("):")[2].split(),
                facts["card_search"].partition("):")[2].split())  # fmt: skip


def _resolv_conf(text: str) -> dict[str, list[str]]:
    lines = [line.split() for line in text.splitlines()]
    search = [word for words in lines if words[:1] in (["search"], ["domain"])
              for word in words[1:]]  # fmt: skip
    return _way([words[1] for words in lines if words[:1] == ["nameserver"] and words[1:]], search)


def _networkmanager(text: str) -> dict[str, list[str]]:
    """From lines such as IP4.DNS[1]:192.168.56.1."""
    rows = re.findall(r"^IP4\.(DNS|DOMAIN|SEARCHES)\[\d+\]:\s*(\S+)\s*$", text, re.MULTILINE)
    return _way([value for key, value in rows if key == "DNS"],
                [value for key, value in rows if key != "DNS"])  # fmt: skip


def _networkd(text: str) -> dict[str, list[str]]:
    """From `  DNS: 192.168.56.1`, further ones in lines of their own without a name."""
    values: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        named = re.match(r"\s*([A-Z][\w ]*): (.*)$", line)
        name = named.group(1) if named else name
        values.setdefault(name, []).extend((named.group(2) if named else line).split())
    return _way(values.get("DNS", []), values.get("Search Domains", []))


def _dhclient(facts: dict[str, Any]) -> dict[str, list[str]]:
    options = lease_options(facts)
    search = options.get("domain-search") or options.get("domain-name", [])
    return _way(options.get("domain-name-servers", []), search)


def lease_options(facts: dict[str, Any]) -> dict[str, list[str]]:
    """{option: values} of dhclient's last lease of an address that the card has."""
    own = [address.partition("/")[0] for address in facts["card"]["addresses"]]
    options: dict[str, list[str]] = {}
    for lease in re.findall(r"^lease \{\n(.*?)^\}", facts["leases"], re.MULTILINE | re.DOTALL):
        address = re.search(r"^\s*fixed-address (\S+);", lease, re.MULTILINE)
        if address and address.group(1) in own:
            rows = re.findall(r"^\s*option (\S+) (.*);", lease, re.MULTILINE)
            options = {key: re.split(r'[\s,"]+', value.strip('"')) for key, value in rows}
    return options


def _way(dns: list[str], search: list[str]) -> dict[str, list[str]]:
    return {
        "dns": [text for text in dict.fromkeys(dns) if ipv4(text) and text[:4] != "127."],
        "search": [word for word in dict.fromkeys(search) if word != "~."],
    }


def ipv4(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 4
    except ValueError:
        return False


def dhcp_routes(facts: dict[str, Any], router: str, address: str) -> list[dict[str, Any]]:
    """[{"to": network with prefix length, "gateway": "" for a network on the card's own cable}].

    facts: route (`ip -4 route show`), and leases, since dhclient does not mark its routes. router:
    today's. address: the new one. Raises where a route could not go on from there.
    """
    leased = _leased(facts) if facts["card"]["dynamic"] else []
    own = [ipaddress.IPv4Interface(each).network for each in (*facts["card"]["addresses"], address)]
    result = []
    for row in routes(facts["route"]):
        if row["card"] != facts["interface"] or row["to"] == "default":
            continue
        to, gateway = ipaddress.IPv4Network(row["to"], strict=False), row["gateway"]
        if row["proto"] != "dhcp" and (str(to), gateway) not in leased:
            continue
        # systemd-networkd adds some of its own: to the router, and by it to each name server.
        by_itself = to.prefixlen == 32 and router in (gateway, str(to.network_address))
        if by_itself or (not gateway and any(to.subnet_of(each) for each in own)):
            continue
        if gateway and ipaddress.ip_address(gateway) not in own[-1]:
            raise PlanError(
                f"{facts['host']}: DHCP gave it a route to {to} by {gateway}, which is not in the "
                f"network of {address}. Choose an address in that network, or network_mode=add."
            )
        result.append({"to": str(to), "gateway": gateway})
    return result


def _leased(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """(network, gateway) of option 121: prefix length, as many bytes as it needs, and gateway."""
    numbers = lease_options(facts).get("rfc3442-classless-static-routes", [])
    rest, leased = [number for number in numbers if re.fullmatch("[0-9]{1,3}", number)], []
    while rest:
        size = (int(rest[0]) + 7) // 8
        to = ".".join((rest[1 : size + 1] + ["0"] * 4)[:4])
        gateway = ".".join(rest[size + 1 : size + 5])
        leased.append((f"{to}/{rest[0]}", gateway if gateway.strip("0.") else ""))
        rest = rest[size + 5 :]
    return leased
