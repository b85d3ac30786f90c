"""Plan a static address by NetworkManager."""

from __future__ import annotations

import re
from typing import Any

from . import preserved_settings as preserved

KEYFILE = "/etc/NetworkManager/system-connections/tandem-{}.nmconnection"


def plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Plan a connection of our own with a higher priority; the present one stays untouched.

    Ours takes its place, so it repeats all of its settings but the address.
    """
    interface, uuid = facts["interface"], nmcli(facts)[2]
    name, path = f"tandem-{interface}", KEYFILE.format(interface)
    # The present connection: ours since an earlier run, or that of the UUID. NetworkManager makes
    # up one that is in no file.
    base = ""
    if path in facts["files"] and name in facts["nmcli"].splitlines():
        base = facts["files"][path]
    elif uuid:
        base = next((text for file, text in facts["files"].items() if "/NetworkManager/" in file
                     and f"uuid={uuid}" in text.splitlines()), "")  # fmt: skip
    options = preserved.keyfile_options(preserved.sections(base), want["mode"] == "replace")
    lines = ["[connection]", f"id={name}", "type=ethernet", f"interface-name={interface}",
             "autoconnect-priority=100", "", "[ethernet]"]  # fmt: skip
    mtu = facts["card"]["mtu"]
    has_mtu = any(line.startswith("mtu=") for line in options["ethernet"])
    lines += [f"mtu={mtu}"] if mtu != 1500 and not has_mtu else []
    lines += [*options.pop("ethernet"), "", "[ipv4]", *_keyfile_ipv4(facts, want)]
    ipv4 = options.pop("ipv4")
    # DHCP's search domain would be lost with it.
    if want.get("search") and not any(line.startswith("dns-search=") for line in ipv4):
        ipv4 = [*ipv4, f"dns-search={';'.join(want['search'])};"]
    lines += _with_routes(ipv4, want)
    for section, settings in {"ipv6": ["method=auto"], **options}.items():
        lines += ["", f"[{section}]", *settings]
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


def _with_routes(lines: list[str], want: dict[str, Any]) -> list[str]:
    """Add the routes that DHCP gave to the lines of [ipv4], numbered after those in them."""
    numbers = [
        int(match.group(1))
        for match in (re.match(r"routes?([0-9]{1,9})=", x) for x in lines)
        if match
    ]
    rows = enumerate(want.get("routes", []), max(numbers, default=0) + 1)
    return lines + [
        f"route{n}={row['to']}" + f",{row['gateway']}" * bool(row["gateway"]) for n, row in rows
    ]


def _keyfile_ipv4(facts: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Write method, addresses, router and name servers; to add, the present ones too."""
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
