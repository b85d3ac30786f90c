"""A static address by netplan, which joins the lists of all its files."""

from __future__ import annotations

from typing import Any

import yaml

from contract.text import read_yaml

from . import PlanError
from . import network_networkd as networkd
from . import preserved_settings as preserved

NETPLAN = "/etc/netplan/90-tandem.yaml"
# What may hold the address. Those behind the first are made of others, by names that the kernel has
# too.
KINDS = ("ethernets", "bridges", "bonds", "vlans")


def plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """To add an address, a file of our own is enough. To replace one it is not, since the address
    of another file stays in the list: all become one then, and the others step aside."""
    texts = {
        path: text for path, text in facts["files"].items() if path.startswith("/etc/netplan/")
    }
    others = sorted(path for path in texts if path != NETPLAN)
    # Where all others stepped aside in an earlier run, ours holds everything.
    merged = _merge_all([_read(path, texts[path], facts) for path in others or texts])
    merged["network"] = merged.get("network") or {}
    kind, name = _find_definition(merged["network"], facts)
    cards = merged["network"][kind]
    if want["mode"] == "add":
        content = {"network": {"version": 2, kind: {name: {"addresses": [want["address"]]}}}}
    else:
        cards[name] = preserved.netplan_card(cards[name] or {}, want)
        content = merged
    if _renderer(merged["network"], cards, name) == "NetworkManager":
        run = {"apply": ["netplan apply"], "back": ["netplan apply"]}
    else:
        server = networkd.restart(facts, want)
        run = {key: ["netplan generate", *lines] for key, lines in server.items()}
    return {
        "files": {NETPLAN: yaml.safe_dump(content, sort_keys=True)},
        "mode": "0600",  # it may hold what other files did, such as a password of 802.1X
        "aside": others if want["mode"] == "replace" else [],
        **run,
    }


def _renderer(network: dict[str, Any], cards: dict[str, Any], name: str) -> str | None:
    """Who serves a card: what is said of it, else of all such cards, else of all (netplan(5))."""
    own = (cards.get(name) or {}).get("renderer")
    return own or cards.get("renderer") or network.get("renderer")


def _read(path: str, text: str, facts: dict[str, Any]) -> dict[str, Any]:
    """One file, as far as this module looks at it in the shape that netplan gives it."""
    try:
        document = read_yaml(text) or {}
        network = _mapping(_mapping(document).get("network"))
        for kind in KINDS:
            for name, card in _mapping(network.get(kind)).items():
                if name != "renderer":  # of all these cards
                    _look_at(_mapping(card))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise PlanError(
            f"{facts['host']}: {path} is no file of netplan's: {reason}. Correct it there (sudo "
            "netplan generate says where), or leave `address` out."
        ) from None
    return document


def _look_at(card: dict[str, Any]) -> None:
    match = _mapping(card.get("match"))
    names = [card.get("set-name"), *(match.get(key) for key in ("name", "macaddress"))]
    if not all(isinstance(name, (str, type(None))) for name in names):
        raise ValueError("a card's name is no text")
    _mapping(card.get("nameservers"))
    for address in _items(card.get("addresses")):
        if not isinstance(address, str) and not all(isinstance(k, str) for k in _mapping(address)):
            raise ValueError("an address is no text")
    for row in _items(card.get("routes")):
        _mapping(row)


def _mapping(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} is no mapping")
    return value or {}


def _items(value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{str(value)[:40]!r} is no list")
    return value or []


def _find_definition(network: dict[str, Any], facts: dict[str, Any]) -> tuple[str, str]:
    """Find the kind and netplan's own name of a card, which need not be the kernel's."""
    interface, card = facts["interface"], facts["card"]
    below = [*card["ports"], *([card["parent"]] if card["parent"] else [])]
    for kind in KINDS[1:]:
        if interface != "renderer" and interface in (network.get(kind) or {}):
            return kind, interface
    # A bridge has the hardware address of its port, which must not be taken for it.
    for name, own in (network.get("ethernets") or {}).items() if not below else ():
        if name == "renderer":  # of all these cards
            continue
        match = (own or {}).get("match") or {}
        names = {match.get("name"), (own or {}).get("set-name"), None if match else name}
        if interface in names or (match.get("macaddress") or "").lower() == card["mac"]:
            return "ethernets", name
    made_of = f" (made of {', '.join(below)})" if below else ""
    raise PlanError(
        f"{facts['host']}: none of the files in /etc/netplan names the card {interface}{made_of}. "
        "Add it there, or set its address by hand and leave `address` out."
    )


def _merge_all(documents: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for document in documents:
        merged = _merge(merged, document)
    return merged


def _merge(first, second):
    if isinstance(first, dict) and isinstance(second, dict):
        both = {key: _merge(first[key], second[key]) for key in first if key in second}
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list):
        return first + [item for item in second if item not in first]
    return second
