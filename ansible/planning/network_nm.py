"""A static address by NetworkManager."""

from __future__ import annotations

import re
from typing import Any

from . import preserved_settings as preserved

KEYFILE = "/etc/NetworkManager/system-connections/tandem-{}.nmconnection"


def plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """A connection of our own with a higher priority; the one that was there stays untouched.

    Ours takes its place, so it says all that the other one says but for the address.
    """
    interface, uuid = facts["interface"], nmcli(facts)[2]
    name, path = f"tandem-{interface}", KEYFILE.format(interface)
    base = preserved.keyfile_of(facts, uuid, path)
    rest = preserved.keyfile_options(base, want["mode"] == "replace")
    lines = ["[connection]", f"id={name}", "type=ethernet", f"interface-name={interface}",
             "autoconnect-priority=100", "", "[ethernet]"]  # fmt: skip
    mtu = facts["card"]["mtu"]
    already = any(line.startswith("mtu=") for line in rest["ethernet"])
    lines += [f"mtu={mtu}"] if mtu != 1500 and not already else []
    lines += [*rest.pop("ethernet"), "", "[ipv4]", *_keyfile_ipv4(facts, want)]
    lines += _with_routes(_with_search(rest.pop("ipv4"), want), want)
    for section, own in {"ipv6": ["method=auto"], **rest}.items():
        lines += ["", f"[{section}]", *own]
    return {
        "files": {path: "\n".join([*lines, ""])},
        "mode": "0600",  # NetworkManager ignores a keyfile that others may read
        "apply": ["nmcli connection reload", f"nmcli connection up id {name}"],
        # A connection that NetworkManager made up (Ubuntu's "Wired connection 1") is in no file,
        # and gone once a card has another: `device connect` makes a new one (nmcli(1)).
        "back": [
            "nmcli connection reload",
            f"nmcli connection up uuid {uuid} || nmcli device connect {interface}",
        ],
    }


def _with_search(lines: list[str], want: dict[str, Any]) -> list[str]:
    """The lines of [ipv4], with the search domain that DHCP gave so far."""
    already = any(line.startswith("dns-search=") for line in lines)
    if already or not want.get("search"):
        return lines
    return [*lines, f"dns-search={';'.join(want['search'])};"]


def _with_routes(lines: list[str], want: dict[str, Any]) -> list[str]:
    """The lines of [ipv4], with the routes that DHCP gave so far, numbered after those there."""
    numbers = [
        int(match.group(1))
        for match in (re.match(r"routes?([0-9]{1,9})=", x) for x in lines)
        if match
    ]
    rows = enumerate(want.get("routes", []), max(numbers, default=0) + 1)
    way = [f"route{n}={row['to']}" + f",{row['gateway']}" * bool(row["gateway"]) for n, row in rows]
    return lines + way


def _keyfile_ipv4(facts: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Method, addresses, router and name servers. To add, today's too."""
    method, addresses, gateway, dns = [*facts["connection"].splitlines(), "", "", "", ""][:4]
    if want["mode"] == "replace":
        method, addresses, gateway, dns = "manual", "", want["gateway"], ",".join(want["dns"])
    ours = facts["files"].get(KEYFILE.format(facts["interface"]), "")
    added = [*re.findall(r"^address\d+=(\S+)$", ours, re.MULTILINE)[-1:], want["address"]]
    today = [text.strip() for text in addresses.split(",")]
    several = [text for text in today if text and text not in added] + [want["address"]]
    lines = [f"method={method or 'auto'}"]
    lines += [f"address{number}={text}" for number, text in enumerate(several, 1)]
    lines += [f"gateway={gateway}"] if gateway else []
    return lines + ([f"dns={dns.replace(' ', '').replace(',', ';')};"] if dns else [])


def nmcli(facts: dict[str, Any]) -> list[str]:
    return [*facts["nmcli"].splitlines(), "", "", "", ""][:4]
