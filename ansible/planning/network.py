"""Plan a static address: find the program that manages the interface, and write its files.

The decisions are made here, from text that the machine printed; roles/network carries them out.
Each program has a module. Its `plan(facts, want)` returns {"files": {path: text}, "apply" and
"back": [shell line]}, and optionally "mode" of the files and "aside".
"""

from __future__ import annotations

import json
from typing import Any

from boundary.facts import Printed

from . import PlanError, reading
from . import network_ifupdown as ifupdown
from . import network_netplan as netplan
from . import network_networkd as networkd
from . import network_nm as nm
from . import preserved_settings as preserved

# The facts that programs print.
PRINTED = ("nmcli", "connection", "networkctl", "card_dns", "card_search", "resolv", "card_ip4",
           "leases", "route")  # fmt: skip
_PLANNERS = {
    "NetworkManager": nm.plan,
    "netplan": netplan.plan,
    "systemd-networkd": networkd.plan,
    "ifupdown": ifupdown.plan,
}


def network_plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Plan a static address.

    facts: host, interface, card (see interface_facts), files ({path: text} of its managers),
    nmcli (values GENERAL.STATE, .CONNECTION, .CON-UUID, .TYPE, a line each), connection (of that
    connection ipv4.method, .addresses, .gateway, .dns, a line each), networkctl (text of
    `networkctl status CARD`), and what preserved_settings.present_way reads.
    want: mode (add or replace), address (with prefix length), gateway ("" as today, "none"), dns
    (list; empty: as today). Other settings of the interface stay (preserved_settings.py).
    Returns {"manager", "files": {path: {"content", "mode"}}, "aside": [path], "apply" and "back":
    [shell line], "wrong": [difference from the plan]}. Raises PlanError if nothing can be planned.
    """
    for name in PRINTED:
        reading.read(facts[name], Printed, f"{facts['host']}: {name}")
    # Ansible's strings and lists carry tags that yaml.safe_dump does not know: take plain ones.
    facts, want = json.loads(json.dumps(facts)), json.loads(json.dumps(want))
    interface, master = facts["interface"], facts["card"]["master"]
    if master:  # with an address of its own, such a card no longer carries the traffic of others
        raise PlanError(
            f"{facts['host']}: {interface} is a port of {master}, which has the address. "
            f"Write interface={master} into its line in inventory.ini, or omit `interface`."
        )
    manager = _manager(facts)
    if want["mode"] == "replace":
        want = preserved.complete(facts, want)
    plan = {"aside": [], "mode": "0644", **_PLANNERS[manager](facts, want), "manager": manager}
    mode = plan.pop("mode")
    plan["files"] = {path: {"content": text, "mode": mode} for path, text in plan["files"].items()}
    # Differences from the plan: those of the running system, then those of the next boot.
    differences, addresses = [], facts["card"]["addresses"]
    if want["address"] not in addresses:
        differences.append(f"{interface} has no address {want['address']}")
    if want["mode"] == "replace":
        extra = [address for address in addresses if address != want["address"]]
        differences += [f"{interface} has {address} too" for address in extra]
    for path, file in plan["files"].items():
        if facts["files"].get(path) != file["content"]:
            state = "is changed" if path in facts["files"] else "is missing"
            differences.append(f"{path} {state}")
    plan["wrong"] = differences
    return plan


def _manager(facts: dict[str, Any]) -> str:
    """Name the program that manages the interface; PlanError if none does, or it is not wired."""
    state, connection, _, kind = nm.nmcli(facts)
    if state and not state.startswith("10 "):  # 10 is "unmanaged"
        if kind != "ethernet":
            raise PlanError(
                f"{facts['host']}: {facts['interface']} has the type {kind}, but Tandem sets "
                "addresses only of wired network cards. Set it in NetworkManager, and omit "
                "`address`."
            )
        return "netplan" if connection.startswith("netplan-") else "NetworkManager"
    # NetworkManager and networkd also serve netplan, under names that netplan makes.
    network_file = networkd.network_file(facts)
    if network_file:
        return "netplan" if "-netplan-" in network_file else "systemd-networkd"
    if any(ifupdown.has_stanza(text, facts["interface"]) for text in facts["files"].values()):
        return "ifupdown"
    raise PlanError(
        f"{facts['host']}: neither NetworkManager, netplan, systemd-networkd nor ifupdown "
        f"manages {facts['interface']}. Set its address yourself, and omit `address`."
    )
