"""Plan a static address: find the program that manages the interface, and write its files.

The decisions are made from texts that the machine printed; role network carries them out, and takes
them back if the machine cannot be reached afterwards. Each program has a module. Its `plan(facts,
want)` returns {"files": {path: text}, "apply" and "back": [shell line]}, and optionally "mode" of
the files and "aside".
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

# The names of the facts that are outputs of programs, which may be large.
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
    `networkctl status CARD`), and what preserved_settings.present_settings reads.
    want: mode (add or replace), address (with prefix length), gateway (an address, "none", or ""
    for the present one), dns (addresses; [] for the present ones).
    Returns {"manager", "files": {path: {"content", "mode"}}, "aside": [path], "apply" and "back":
    [shell line], "wrong": [difference from the plan]}. Raises PlanError if nothing can be planned.
    """
    for name in PRINTED:
        reading.read(facts[name], Printed, f"{facts['host']}: {name}")
    # Ansible's strings and lists carry tags that yaml.safe_dump does not know. JSON drops the tags.
    facts, want = json.loads(json.dumps(facts)), json.loads(json.dumps(want))
    interface, master = facts["interface"], facts["card"]["master"]
    # A port of a bridge must not get an address: it would no longer forward packets of the bridge.
    if master:
        raise PlanError(
            f"{facts['host']}: {interface} is a port of {master}, which has the address. "
            f"Write interface={master} into its line in inventory.ini, or omit `interface`."
        )
    manager = _find_manager(facts)
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


def _find_manager(facts: dict[str, Any]) -> str:
    """Name the program that manages the interface. Raises PlanError if none does."""
    state, connection, _, kind = nm.nmcli(facts)
    if state and not state.startswith("10 "):  # 10 is "unmanaged"
        if kind != "ethernet":
            raise PlanError(
                f"{facts['host']}: {facts['interface']} has the type {kind}, but Tandem sets "
                "addresses only of wired network cards. Set it in NetworkManager, and delete "
                "`address` in inventory.ini."
            )
        return "netplan" if connection.startswith("netplan-") else "NetworkManager"
    # netplan generates files for both, such as /run/systemd/network/10-netplan-enp3s0.network.
    network_file = networkd.network_file(facts)
    if network_file:
        return "netplan" if "-netplan-" in network_file else "systemd-networkd"
    if any(ifupdown.has_stanza(text, facts["interface"]) for text in facts["files"].values()):
        return "ifupdown"
    raise PlanError(
        f"{facts['host']}: neither NetworkManager, netplan, systemd-networkd nor ifupdown "
        f"manages {facts['interface']}. Set its address yourself, and delete "
        "`address` in inventory.ini."
    )
