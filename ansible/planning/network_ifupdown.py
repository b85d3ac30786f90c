"""Plan a static address by ifupdown."""

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
    if facts["card"]["ports"]:  # ifdown would take a bridge apart, under its virtual machines
        raise PlanError(
            f"{facts['host']}: {interface} consists of {', '.join(facts['card']['ports'])}, "
            f"and ifupdown would take it apart. Write its address into {INTERFACES} on that "
            "machine and omit `address`, or set network_mode=add."
        )
    stanza += [f"    gateway {want['gateway']}"] if want["gateway"] else []
    has_dns = bool(want["dns"])
    stanza += [f"    dns-nameservers {' '.join(want['dns'])}"] if has_dns else []
    stanza += [f"    dns-search {' '.join(want['search'])}"] if has_dns and want["search"] else []
    for path, text in sorted(facts["files"].items()):
        if path.startswith(INTERFACES):
            stanza += preserved.stanza_options(text, interface, has_dns)
    for row in want["routes"]:
        way = f"via {row['gateway']} " if row["gateway"] else ""
        stanza.append(f"    up ip route replace {row['to']} {way}dev {interface}")
    files = {}
    for path, text in facts["files"].items():
        if path.startswith(INTERFACES) and has_stanza(text, interface):
            files[path] = _without_stanzas(text, interface) + "".join(f"{s}\n" for s in stanza)
            stanza = []  # only the first of the files gets it
    # ifdown reads the new file, so the old address may stay without the flush.
    restart_lines = [
        f"ifdown --force {interface}",
        f"ip address flush dev {interface}",
        f"ifup {interface}",
    ]
    return {"files": files, "apply": restart_lines, "back": restart_lines}


def _add(facts: dict[str, Any], want: dict[str, Any], stanza: list[str]) -> dict[str, Any]:
    interface = facts["interface"]
    main = facts["files"].get(INTERFACES, "")
    if not re.search(
        r"^\s*source(-directory)?\s+(/etc/network/)?interfaces\.d", main, re.MULTILINE
    ):
        raise PlanError(
            f"{facts['host']}: {INTERFACES} does not read {INTERFACES}.d. "
            f"Add the line `source {INTERFACES}.d/*` to it."
        )
    # ifup of a card that is up does nothing, so the running card gets its address directly.
    address = f"{want['address']} dev {interface}"
    return {
        "files": {f"{INTERFACES}.d/tandem-{interface}": "\n".join([*stanza, ""])},
        "apply": [f"ip address add {want['address']} broadcast + dev {interface}"],
        "back": [f"ip address delete {address}"],
    }


def _without_stanzas(text: str, interface: str) -> str:
    # A stanza ends where the next one begins: ifupdown ignores blank lines and indents.
    outside, inside = [], False
    for line in text.splitlines():
        if re.match(r"\s*(iface|auto|allow-\S+|mapping|source\S*|no-auto-down|no-scripts)\s", line):
            inside = bool(re.match(rf"\s*iface\s+{re.escape(interface)}\s+inet\s", line))
        if not inside:
            outside.append(line)
    return "\n".join([*outside, ""])


def has_stanza(text: str, interface: str) -> bool:
    return bool(re.search(rf"^\s*iface\s+{re.escape(interface)}\s+inet\s", text, re.MULTILINE))
