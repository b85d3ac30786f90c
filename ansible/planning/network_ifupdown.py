"""Plan a static address by ifupdown, whose files are /etc/network/interfaces and interfaces.d."""

from __future__ import annotations

import re
from typing import Any

from . import PlanError
from . import preserved_settings as preserved

INTERFACES = "/etc/network/interfaces"


def plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Plan a second stanza that adds an address, or replace the interface's stanzas."""
    interface = facts["interface"]
    stanza = [f"iface {interface} inet static", f"    address {want['address']}"]
    if want["mode"] == "add":
        return _add(facts, want, stanza)
    # ifdown would also remove a bridge, while virtual machines use it.
    if facts["card"]["ports"]:
        raise PlanError(
            f"{facts['host']}: {interface} consists of {', '.join(facts['card']['ports'])}, "
            f"and ifupdown would take it apart. Write its address into {INTERFACES} on that "
            "machine and delete `address` in inventory.ini, or set network_mode=add."
        )
    stanza += [f"    gateway {want['gateway']}"] if want["gateway"] else []
    has_dns = bool(want["dns"])
    stanza += [f"    dns-nameservers {' '.join(want['dns'])}"] if has_dns else []
    stanza += [f"    dns-search {' '.join(want['search'])}"] if has_dns and want["search"] else []
    for path, text in sorted(facts["files"].items()):
        if path.startswith(INTERFACES):
            stanza += preserved.stanza_options(text, interface, has_dns)
    for row in want["routes"]:
        via = f"via {row['gateway']} " if row["gateway"] else ""
        stanza.append(f"    up ip route replace {row['to']} {via}dev {interface}")
    # The interface may have stanzas in several files. The first of them gets the new stanza.
    files = {}
    for path, text in facts["files"].items():
        if path.startswith(INTERFACES) and has_stanza(text, interface):
            new_lines = "".join(f"{line}\n" for line in stanza)
            _, other_lines = preserved.split_stanzas(text, interface)
            files[path] = "\n".join([*other_lines, ""]) + new_lines
            stanza = []
    # ifdown reads the new file, which does not have the old address, so `flush` removes that.
    flush = f"ip address flush dev {interface}"
    restart_lines = [f"ifdown --force {interface}", flush, f"ifup {interface}"]
    return {"files": files, "apply": restart_lines, "back": restart_lines}


def _add(facts: dict[str, Any], want: dict[str, Any], stanza: list[str]) -> dict[str, Any]:
    """Plan a file with a second stanza. Raises PlanError if ifupdown would not read the file."""
    interface = facts["interface"]
    main = facts["files"].get(INTERFACES, "")
    if not re.search(
        r"^\s*source(-directory)?\s+(/etc/network/)?interfaces\.d", main, re.MULTILINE
    ):
        raise PlanError(
            f"{facts['host']}: {INTERFACES} does not read {INTERFACES}.d. "
            f"Add the line `source {INTERFACES}.d/*` to it."
        )
    # ifup does nothing for an interface that is up, so `ip` adds the address to it.
    address = f"{want['address']} dev {interface}"
    return {
        "files": {f"{INTERFACES}.d/tandem-{interface}": "\n".join([*stanza, ""])},
        "apply": [f"ip address add {want['address']} broadcast + dev {interface}"],
        "back": [f"ip address delete {address}"],
    }


def has_stanza(text: str, interface: str) -> bool:
    """Return true if a file has an IPv4 stanza of the interface: "iface enp3s0 inet dhcp"."""
    lines, _ = preserved.split_stanzas(text, interface)
    return bool(lines)
