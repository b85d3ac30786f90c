"""The routes that DHCP gave a card besides the default one, which a static address takes over."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from . import PlanError
from .network_dns import lease_options
from .network_facts import routes


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
