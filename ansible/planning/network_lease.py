"""Read what DHCP gave an interface: name servers, search domains, and further routes.

preserved_settings.py writes them into the plan of a static address, which gets nothing from DHCP.
If /etc/resolv.conf names a server on the machine itself (dnsmasq, unbound), that server asks name
servers of DHCP, and would lose them. So this file also reads the outputs of NetworkManager,
networkd and dhclient.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from . import PlanError
from .network_facts import routes

# systemd-resolved's addresses; resolvectl reports the servers behind them.
RESOLVED = ("127.0.0.53", "127.0.0.54")


def name_servers(facts: dict[str, Any]) -> dict[str, list[str]]:
    """Read {"dns": IPv4 addresses of other machines, "search": domains} of an interface.

    facts: card_dns and card_search (`resolvectl dns` and `domain` of the card, "" without
    systemd-resolved), resolv (text of resolv.conf), card_ip4 (`nmcli --terse --fields IP4 device
    show CARD`), networkctl (`networkctl status CARD`), leases (text of dhclient's leases).
    """
    if facts["card_dns"]:
        # "Link 2 (enp3s0): 192.168.56.1 192.168.56.2"; an interface may have no servers.
        dns, search = (facts[key].partition("):")[2].split() for key in ("card_dns", "card_search"))
    else:
        lines = [line.split() for line in facts["resolv"].splitlines()]
        dns = [words[1] for words in lines if words[:1] == ["nameserver"] and words[1:]]
        search = [word for words in lines if words[:1] in (["search"], ["domain"])
                  for word in words[1:]]  # fmt: skip
    servers = _clean_servers(dns, search)
    if servers["dns"] or not _local_servers(facts):
        return servers
    # The machine's own server forwards to servers of DHCP. The first program that lists such
    # servers counts: NetworkManager ("IP4.DNS[1]:192.168.56.1"), networkd or dhclient.
    options = lease_options(facts)
    rows = re.findall(
        r"^IP4\.(DNS|DOMAIN|SEARCHES)\[\d+\]:\s*(\S+)\s*$", facts["card_ip4"], re.MULTILINE
    )
    sources = (
        _clean_servers([value for key, value in rows if key == "DNS"],
                       [value for key, value in rows if key != "DNS"]),
        _read_networkctl(facts["networkctl"]),
        _clean_servers(options.get("domain-name-servers", []),
                       options.get("domain-search") or options.get("domain-name", [])),
    )  # fmt: skip
    source = next((source for source in sources if source["dns"]), servers)
    return {"dns": source["dns"], "search": servers["search"] or source["search"]}


def refuse_lost_dns(facts: dict[str, Any], dns: list[str]) -> None:
    """Raise PlanError if the machine's own name server has its upstream servers only from DHCP."""
    local = _local_servers(facts)
    if dns or not local or not facts["card"]["dynamic"]:
        return
    raise PlanError(
        f"{facts['host']}: its only name server, {local[0]}, is a program on the machine, and "
        "this program learns from DHCP which servers to ask. A static address ends DHCP. Write "
        "dns=<your network's name servers> into the machine's line of inventory.ini, or "
        f"dns={local[0]} if the program does not need DHCP."
    )


def _local_servers(facts: dict[str, Any]) -> list[str]:
    """List the name servers on the machine itself; [] if resolv.conf also lists another machine."""
    servers = [words[1] for words in map(str.split, facts["resolv"].splitlines())
               if words[:1] == ["nameserver"] and len(words) > 1]  # fmt: skip
    try:
        if not all(ipaddress.ip_address(server).is_loopback for server in servers):
            return []
    except ValueError:  # resolv.conf has a name, which no resolver could ask
        return []
    # resolvectl has reported the servers behind systemd-resolved.
    return [server for server in servers if not (facts["card_dns"] and server in RESOLVED)]


def _read_networkctl(text: str) -> dict[str, list[str]]:
    """Read {"dns", "search"} from `networkctl status`."""
    values: dict[str, list[str]] = {}
    name = ""
    #            DNS: 192.168.56.1
    #                 192.168.56.2
    # Search Domains: lab.example
    for line in text.splitlines():
        match = re.match(r"\s*([A-Z][\w ]*): (.*)$", line)
        name = match.group(1) if match else name
        values.setdefault(name, []).extend((match.group(2) if match else line).split())
    return _clean_servers(values.get("DNS", []), values.get("Search Domains", []))


def lease_options(facts: dict[str, Any]) -> dict[str, list[str]]:
    """Read {option: values} of dhclient's last lease of an address that the interface has."""
    addresses = [address.partition("/")[0] for address in facts["card"]["addresses"]]
    options: dict[str, list[str]] = {}
    # lease { fixed-address 192.168.56.111; option domain-name-servers 192.168.56.1,10.0.0.1; }, in
    # several lines. The last lease of an address counts.
    for lease in re.findall(r"^lease \{\n(.*?)^\}", facts["leases"], re.MULTILINE | re.DOTALL):
        address = re.search(r"^\s*fixed-address (\S+);", lease, re.MULTILINE)
        if address and address.group(1) in addresses:
            rows = re.findall(r"^\s*option (\S+) (.*);", lease, re.MULTILINE)
            options = {key: re.split(r'[\s,"]+', value.strip('"')) for key, value in rows}
    return options


def _clean_servers(dns: list[str], search: list[str]) -> dict[str, list[str]]:
    """Keep IPv4 servers on other machines and real domains, each once."""
    # "~." is not a domain, but systemd-resolved's mark of an interface for all names.
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
    """List the routes that DHCP gave: [{"to": network with prefix length, "gateway"}].

    "gateway" is "" for a network on the same cable. facts: route (`ip -4 route show`) and leases;
    router: the present router; address: the new address with its prefix length. Raises PlanError
    for a route whose gateway is not in the network of `address`.
    """
    # dhclient does not mark its routes with "proto dhcp", so they are looked up in its leases.
    leased = _leased_routes(facts) if facts["card"]["dynamic"] else []
    new_network = ipaddress.IPv4Interface(address).network
    present_networks = [
        ipaddress.IPv4Interface(text).network for text in facts["card"]["addresses"]
    ]
    networks = [*present_networks, new_network]
    result = []
    for row in routes(facts["route"]):
        if row["card"] != facts["interface"] or row["to"] == "default":
            continue
        to, gateway = ipaddress.IPv4Network(row["to"], strict=False), row["gateway"]
        if row["proto"] != "dhcp" and (str(to), gateway) not in leased:
            continue
        # systemd-networkd itself adds routes to the router, and by it to each name server.
        is_automatic = to.prefixlen == 32 and router in (gateway, str(to.network_address))
        if is_automatic or (not gateway and any(to.subnet_of(net) for net in networks)):
            continue
        if gateway and ipaddress.ip_address(gateway) not in new_network:
            raise PlanError(
                f"{facts['host']}: DHCP gave it a route to {to} through {gateway}, which is "
                f"not in the network of {address}. Choose an address in the network of "
                f"{gateway}, or network_mode=add."
            )
        result.append({"to": str(to), "gateway": gateway})
    return result


def _leased_routes(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """List (network, gateway) of DHCP's option 121; the gateway is "" for 0.0.0.0."""
    words = lease_options(facts).get("rfc3442-classless-static-routes", [])
    numbers = [word for word in words if re.fullmatch("[0-9]{1,3}", word)]
    leased = []
    # Each route has its prefix length, the bytes of the network that this length covers, and the
    # four bytes of the gateway: "24,10,20,30,192,168,56,1" is 10.20.30.0/24 by 192.168.56.1.
    while numbers:
        prefix, *numbers = numbers
        count = (int(prefix) + 7) // 8
        network = ".".join((numbers[:count] + ["0"] * 4)[:4])
        gateway = ".".join(numbers[count : count + 4])
        leased.append((f"{network}/{prefix}", gateway if gateway.strip("0.") else ""))
        numbers = numbers[count + 4 :]
    return leased
