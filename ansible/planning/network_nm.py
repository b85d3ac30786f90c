"""Plan a static address by NetworkManager, as a keyfile in /etc/NetworkManager."""

from __future__ import annotations

import re
from typing import Any

from . import preserved_settings as preserved

KEYFILE = "/etc/NetworkManager/system-connections/tandem-{}.nmconnection"


def plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Plan a connection of our own with a higher priority; the present connection stays as it is.

    Our connection copies all settings of the present one except the address. facts, want and the
    result: see network.network_plan.
    """
    interface = facts["interface"]
    _, _, uuid, _ = nmcli(facts)
    name, path = f"tandem-{interface}", KEYFILE.format(interface)
    # The present connection may be ours, or in no file, if NetworkManager made it up.
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
    # The search domain came from DHCP, which a static address does not use.
    if want.get("search") and not any(line.startswith("dns-search=") for line in ipv4):
        ipv4 = [*ipv4, f"dns-search={';'.join(want['search'])};"]
    # The numbers of DHCP's routes, "route3=10.20.0.0/16,192.168.56.1", follow the present ones.
    matches = (re.match(r"routes?([0-9]{1,9})=", line) for line in ipv4)
    highest = max((int(match.group(1)) for match in matches if match), default=0)
    lines += ipv4
    for number, row in enumerate(want.get("routes", []), highest + 1):
        via_router = f",{row['gateway']}" if row["gateway"] else ""
        lines.append(f"route{number}={row['to']}{via_router}")
    # IPv6 has NetworkManager's default, unless the present connection has a section about it.
    for section, settings in {"ipv6": ["method=auto"], **options}.items():
        lines += ["", f"[{section}]", *settings]
    return {
        "files": {path: "\n".join([*lines, ""])},
        "mode": "0600",  # NetworkManager ignores a keyfile that others may read
        "apply": ["nmcli connection reload", f"nmcli connection up id {name}"],
        # A connection that NetworkManager made up (Ubuntu's "Wired connection 1") disappears when
        # the interface gets another connection. `device connect` makes up a new one (nmcli(1)).
        "back": [
            "nmcli connection reload",
            f"nmcli connection up uuid {uuid} || nmcli device connect {interface}",
        ],
    }


def _keyfile_ipv4(facts: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Write method, addresses, router and name servers of [ipv4]."""
    # To add an address, the present ones are needed too: ipv4.method, .addresses, .gateway, .dns.
    fields = [*facts["connection"].splitlines(), "", "", "", ""]
    method, addresses, gateway, dns = fields[:4]
    if want["mode"] == "replace":
        method, addresses, gateway, dns = "manual", "", want["gateway"], ",".join(want["dns"])
    # In an earlier run our file may have added another address, as the last one. It is dropped.
    our_file = facts["files"].get(KEYFILE.format(facts["interface"]), "")
    our_addresses = re.findall(r"^address\d+=(\S+)$", our_file, re.MULTILINE)
    added = [*our_addresses[-1:], want["address"]]
    present = [text.strip() for text in addresses.split(",")]
    all_addresses = [text for text in present if text and text not in added] + [want["address"]]
    lines = [f"method={method or 'auto'}"]
    lines += [f"address{number}={text}" for number, text in enumerate(all_addresses, 1)]
    lines += [f"gateway={gateway}"] if gateway else []
    return lines + ([f"dns={dns.replace(' ', '').replace(',', ';')};"] if dns else [])


def nmcli(facts: dict[str, Any]) -> list[str]:
    """Return [state, connection, UUID, type] of the interface, "" for missing values."""
    return [*facts["nmcli"].splitlines(), "", "", "", ""][:4]
