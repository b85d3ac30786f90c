"""Plan a static address by netplan, whose files are in /etc/netplan.

netplan merges all its files: mappings and lists of several files join. It writes configurations for
networkd or NetworkManager, so files of these programs are not touched here.
"""

from __future__ import annotations

from typing import Any

import yaml

from contract.text import read_yaml

from . import PlanError
from . import network_networkd as networkd
from . import preserved_settings as preserved

NETPLAN = "/etc/netplan/90-tandem.yaml"
# Kinds of interfaces that may have the address. Interfaces of the last three are made of other
# interfaces, and have the same names in netplan and in the kernel.
KINDS = ("ethernets", "bridges", "bonds", "vlans")


def plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Plan the files and commands of netplan; facts and want: see network.network_plan."""
    # To replace an address, our file gets the merged contents of all files, which are set aside:
    # otherwise their address would stay in netplan's list.
    texts = {
        path: text for path, text in facts["files"].items() if path.startswith("/etc/netplan/")
    }
    foreign_files = sorted(path for path in texts if path != NETPLAN)
    # If an earlier run has set the other files aside, our file has everything.
    merged: dict[str, Any] = {}
    for path in foreign_files or texts:
        merged = _merge(merged, _read(path, texts[path], facts))
    merged["network"] = merged.get("network") or {}
    kind, name = _find_definition(merged["network"], facts)
    cards = merged["network"][kind]
    if want["mode"] == "add":
        content = {"network": {"version": 2, kind: {name: {"addresses": [want["address"]]}}}}
    else:
        cards[name] = preserved.netplan_definition(cards[name] or {}, want)
        content = merged
    # The renderer of the interface counts, or that of its kind, or that of all (netplan(5)).
    renderer = (cards.get(name) or {}).get("renderer") or cards.get("renderer")
    if (renderer or merged["network"].get("renderer")) == "NetworkManager":
        run = {"apply": ["netplan apply"], "back": ["netplan apply"]}
    else:
        server = networkd.restart(facts, want)
        run = {key: ["netplan generate", *lines] for key, lines in server.items()}
    return {
        "files": {NETPLAN: yaml.safe_dump(content, sort_keys=True)},
        "mode": "0600",  # the merged contents may have a password of 802.1X
        "aside": foreign_files if want["mode"] == "replace" else [],
        **run,
    }


def _read(path: str, text: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Read a file of netplan. Raises PlanError if a value that is used here has a wrong type."""
    try:
        document = read_yaml(text) or {}
        network = _mapping(_mapping(document).get("network"))
        for kind in KINDS:
            for name, definition in _mapping(network.get(kind)).items():
                if name == "renderer":  # a setting for all interfaces of the kind
                    continue
                card = _mapping(definition)
                match = _mapping(card.get("match"))
                keys = [card.get("set-name"), match.get("name"), match.get("macaddress")]
                if not all(isinstance(key, (str, type(None))) for key in keys):
                    raise ValueError("a card's name is no text")
                _mapping(card.get("nameservers"))
                for address in _items(card.get("addresses")):
                    texts = [address] if isinstance(address, str) else _mapping(address)
                    if not all(isinstance(text, str) for text in texts):
                        raise ValueError("an address is no text")
                for row in _items(card.get("routes")):
                    _mapping(row)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise PlanError(
            f"{facts['host']}: {path} is not a netplan file: {reason}. Correct it (sudo "
            "netplan generate shows the error), or omit `address`."
        ) from None
    return document


def _mapping(value: Any) -> dict[str, Any]:
    """Return a mapping, {} for None. Raises ValueError for another type."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} is not a mapping")
    return value or {}


def _items(value: Any) -> list[Any]:
    """Return a list, [] for None. Raises ValueError for another type."""
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{str(value)[:40]!r} is not a list")
    return value or []


def _find_definition(network: dict[str, Any], facts: dict[str, Any]) -> tuple[str, str]:
    """Find (kind, name) under which netplan's files define an interface. Raises PlanError."""
    interface, card = facts["interface"], facts["card"]
    below = [*card["ports"], *([card["parent"]] if card["parent"] else [])]
    for kind in KINDS[1:]:
        if interface != "renderer" and interface in (network.get(kind) or {}):
            return kind, interface
    # A bridge has the hardware address of its port, so a match by that address would find the port.
    for name, definition in (network.get("ethernets") or {}).items() if not below else ():
        if name == "renderer":
            continue
        match = (definition or {}).get("match") or {}
        # Without `match`, netplan's name is the kernel's name of the interface.
        names = {match.get("name"), (definition or {}).get("set-name"), None if match else name}
        if interface in names or (match.get("macaddress") or "").lower() == card["mac"]:
            return "ethernets", name
    made_of = f" (made of {', '.join(below)})" if below else ""
    raise PlanError(
        f"{facts['host']}: no file in /etc/netplan contains the network card "
        f"{interface}{made_of}. Add it to a file, or set its address yourself and delete "
        "`address` in inventory.ini."
    )


def _merge(below, above):
    """Merge values of two files as netplan does: mappings and lists join, or `above` wins."""
    if isinstance(below, dict) and isinstance(above, dict):
        shared = {key: _merge(below[key], above[key]) for key in below if key in above}
        return {**below, **above, **shared}
    if isinstance(below, list) and isinstance(above, list):
        return below + [item for item in above if item not in below]
    return above
