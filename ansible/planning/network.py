"""Which program manages a network card, and what to write where so that it gets a static address.

Everything is decided here from text that the machine printed; roles/network only carries it out.
"""

from __future__ import annotations

import json
import re

import yaml

from . import network_kept as kept
from .errors import PlanError

KEYFILE = "/etc/NetworkManager/system-connections/tandem-{}.nmconnection"
# '-' sorts before every digit and letter: networkd finds this file first.
NETWORKD_WHOLE = "/etc/systemd/network/0-tandem-{}.network"
NETPLAN = "/etc/netplan/90-tandem.yaml"
INTERFACES = "/etc/network/interfaces"


def network_plan(facts: dict, want: dict) -> dict:
    """Plan a static address.

    facts: host, interface, card (see card_facts), files ({path: text} of the managers' folders),
    nmcli (values GENERAL.STATE, .CONNECTION, .CON-UUID, .TYPE, a line each), connection (of that
    connection ipv4.method, .addresses, .gateway, .dns, a line each), networkctl (text of
    `networkctl status CARD`), and what network_kept.present_way reads.
    want: mode (add or replace), address (with prefix length), gateway ("" as today, "none"), dns
    (list; empty: as today). What else the card has stays: see network_kept.
    Returns {"manager", "files": {path: {"content", "mode"}}, "aside": [path], "apply" and "back":
    [shell line], "wrong": [what is not so yet]}. Raises one sentence where nothing can be planned.
    """
    # Ansible's strings and lists carry tags that yaml.safe_dump does not know: take plain ones.
    facts, want = json.loads(json.dumps(facts)), json.loads(json.dumps(want))
    manager = _manager(facts)
    if want["mode"] == "replace":
        want = kept.completed(facts, want)
    plan = {"manager": manager, "aside": [], **_PLANNERS[manager](facts, want)}
    plan["wrong"] = _wrong(facts, want, plan["files"])
    return plan


def _wrong(facts: dict, want: dict, files: dict) -> list[str]:
    """What keeps a machine from having its address, now and after the next boot."""
    card, addresses = facts["interface"], facts["card"]["addresses"]
    wrong = []
    if want["address"] not in addresses:
        wrong.append(f"{card} has no address {want['address']}")
    if want["mode"] == "replace":
        wrong += [f"{card} has {other} too" for other in addresses if other != want["address"]]
    for path, file in files.items():
        if facts["files"].get(path) != file["content"]:
            wrong.append(f"{path} {'is changed' if path in facts['files'] else 'is missing'}")
    return wrong


def _manager(facts: dict) -> str:
    state, connection, _, kind = _nmcli(facts)
    if state and not state.startswith("10 "):  # 10 is "unmanaged"
        if kind != "ethernet":
            raise PlanError(
                f"{facts['host']}: {facts['interface']} is of type {kind}; only wired cards get an "
                "address here. Set it in NetworkManager, and leave `address` away."
            )
        return "netplan" if connection.startswith("netplan-") else "NetworkManager"
    network_file = _network_file(facts)
    if network_file:
        return "netplan" if "-netplan-" in network_file else "systemd-networkd"
    if any(_has_stanza(text, facts["interface"]) for text in facts["files"].values()):
        return "ifupdown"
    raise PlanError(
        f"{facts['host']}: neither NetworkManager, netplan, systemd-networkd nor ifupdown manages "
        f"{facts['interface']}. Set its address by hand, and leave `address` away."
    )


def _nmcli(facts: dict) -> list[str]:
    return [*facts["nmcli"].splitlines(), "", "", "", ""][:4]


def _network_file(facts: dict) -> str:
    found = re.search(r"^\s*Network File: (/\S+)", facts["networkctl"], re.MULTILINE)
    return found.group(1) if found else ""


def _has_stanza(text: str, interface: str) -> bool:
    return bool(re.search(rf"^\s*iface\s+{re.escape(interface)}\s+inet\s", text, re.MULTILINE))


def _file(content: str, mode: str = "0644") -> dict[str, str]:
    return {"content": content, "mode": mode}


def _network_manager(facts: dict, want: dict) -> dict:
    """A connection of our own with a higher priority; the one that was there stays untouched.

    Ours takes its place, so it says all that the other one says but for the address.
    """
    interface, uuid = facts["interface"], _nmcli(facts)[2]
    name, path = f"tandem-{interface}", KEYFILE.format(interface)
    base = kept.keyfile_of(facts, uuid, path)
    rest = kept.keyfile_kept(base, want["mode"] == "replace")
    lines = ["[connection]", f"id={name}", "type=ethernet", f"interface-name={interface}",
             "autoconnect-priority=100", "", "[ethernet]"]  # fmt: skip
    mtu = facts["card"]["mtu"]
    told = any(line.startswith("mtu=") for line in rest["ethernet"])
    lines += [f"mtu={mtu}"] if mtu != 1500 and not told else []
    lines += [*rest.pop("ethernet"), "", "[ipv4]", *_keyfile_ipv4(facts, want)]
    lines += _with_search(rest.pop("ipv4"), want)
    for section, own in {"ipv6": ["method=auto"], **rest}.items():
        lines += ["", f"[{section}]", *own]
    return {
        "files": {path: _file("\n".join([*lines, ""]), "0600")},
        "apply": ["nmcli connection reload", f"nmcli connection up id {name}"],
        "back": ["nmcli connection reload", f"nmcli connection up uuid {uuid}"],
    }


def _with_search(lines: list[str], want: dict) -> list[str]:
    """The lines of [ipv4], with the search domain that DHCP gave so far."""
    told = any(line.startswith("dns-search=") for line in lines)
    if told or not want.get("search"):
        return lines
    return [*lines, f"dns-search={';'.join(want['search'])};"]


def _keyfile_ipv4(facts: dict, want: dict) -> list[str]:
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


def _networkd(facts: dict, want: dict) -> dict:
    """A drop-in that adds an address, or a whole file that comes first."""
    if want["mode"] == "add":
        path = f"/etc/systemd/network/{_network_file(facts).rpartition('/')[2]}.d/tandem.conf"
        text = f"[Network]\nAddress={want['address']}\n"
        return {"files": {path: _file(text)}, **_restart_networkd(facts, want)}
    path = NETWORKD_WHOLE.format(facts["interface"])
    found = _network_file(facts)
    folder = f"{found.rpartition('/')[2]}.d/"
    drop_ins = [each for each in facts["files"] if f"/network/{folder}" in each]
    if [each for each in drop_ins if not each.endswith("/tandem.conf")]:
        raise PlanError(
            f"{facts['host']}: {found} has drop-ins ({', '.join(sorted(drop_ins))}), which a file "
            "of ours would switch off. Write the address there by hand, and leave `address` away."
        )
    if found not in facts["files"]:
        raise PlanError(
            f"{facts['host']}: {found}, which rules {facts['interface']}, was not read: it is in "
            "neither /etc nor /run. Copy it to /etc/systemd/network, or leave `address` away."
        )
    network = [f"Address={want['address']}"]
    network += [f"Gateway={want['gateway']}"] if want["gateway"] else []
    network += [f"DNS={server}" for server in want["dns"]]
    others = kept.networkd_kept(facts["files"][found])
    network += [line for name, lines in others if name == "Network" for line in lines]
    if want["search"] and not any(line.startswith("Domains") for line in network):
        network.append(f"Domains={' '.join(want['search'])}")
    lines = ["[Match]", f"Name={facts['interface']}", "", "[Network]", *network]
    for name, own in others:
        lines += ["", f"[{name}]", *own] if name != "Network" else []
    return {"files": {path: _file("\n".join([*lines, ""]))}, **_restart_networkd(facts, want)}


def _restart_networkd(facts: dict, want: dict) -> dict[str, list[str]]:
    """A restarted networkd leaves addresses that are configured no more where they are."""
    restart = "systemctl restart systemd-networkd"
    device = f"dev {facts['interface']}"
    if want["mode"] == "add":
        delete = f"ip address delete {want['address']} {device}"
        return {"apply": [restart], "back": [delete, restart]}
    both = [f"ip address flush {device}", restart]
    return {"apply": both, "back": both}


def _netplan(facts: dict, want: dict) -> dict:
    """netplan joins the lists of all its files: an address can be added by a file of our own.

    It cannot be taken away by one, so to replace, all files become one and the others step aside.
    """
    texts = {
        path: text for path, text in facts["files"].items() if path.startswith("/etc/netplan/")
    }
    others = sorted(path for path in texts if path != NETPLAN)
    # Where all others stepped aside in an earlier run, ours holds everything.
    merged = _merge_all([yaml.safe_load(texts[path]) or {} for path in others or texts])
    cards = merged.setdefault("network", {}).setdefault("ethernets", {})
    name = _netplan_name(cards, facts)
    if want["mode"] == "add":
        content = {"network": {"version": 2, "ethernets": {name: {"addresses": [want["address"]]}}}}
    else:
        cards[name] = kept.netplan_card(cards[name] or {}, want)
        content = merged
    if merged["network"].get("renderer") == "NetworkManager":
        run = {"apply": ["netplan apply"], "back": ["netplan apply"]}
    else:
        server = _restart_networkd(facts, want)
        run = {key: ["netplan generate", *lines] for key, lines in server.items()}
    return {
        "files": {NETPLAN: _file(yaml.safe_dump(content, sort_keys=True), "0600")},
        "aside": others if want["mode"] == "replace" else [],
        **run,
    }


def _netplan_name(cards: dict, facts: dict) -> str:
    """Find netplan's own name of a card, which need not be the kernel's."""
    for name, card in cards.items():
        match = (card or {}).get("match", {})
        names = {match.get("name"), (card or {}).get("set-name"), None if match else name}
        if (
            facts["interface"] in names
            or match.get("macaddress", "").lower() == facts["card"]["mac"]
        ):
            return name
    raise PlanError(
        f"{facts['host']}: none of the files in /etc/netplan names the card {facts['interface']}. "
        "Add it there, or set its address by hand and leave `address` away."
    )


def _merge_all(documents: list[dict]) -> dict:
    merged: dict = {}
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


def _ifupdown(facts: dict, want: dict) -> dict:
    """A second stanza for the card adds an address; to replace, its stanzas are rewritten."""
    interface = facts["interface"]
    stanza = [f"iface {interface} inet static", f"    address {want['address']}"]
    if want["mode"] == "add":
        return _ifupdown_add(facts, want, stanza)
    stanza += [f"    gateway {want['gateway']}"] if want["gateway"] else []
    given = bool(want["dns"])
    stanza += [f"    dns-nameservers {' '.join(want['dns'])}"] if given else []
    stanza += [f"    dns-search {' '.join(want['search'])}"] if given and want["search"] else []
    for path, text in sorted(facts["files"].items()):
        if path.startswith(INTERFACES):
            stanza += kept.stanza_options(text, interface, given)
    files = {}
    for path, text in facts["files"].items():
        if path.startswith(INTERFACES) and _has_stanza(text, interface):
            files[path] = _file(
                _without_stanzas(text, interface) + "".join(f"{s}\n" for s in stanza)
            )
            stanza = []
    again = [
        f"ifdown --force {interface}",
        f"ip address flush dev {interface}",
        f"ifup {interface}",
    ]
    return {"files": files, "apply": again, "back": again}


def _ifupdown_add(facts: dict, want: dict, stanza: list[str]) -> dict:
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
        "files": {f"{INTERFACES}.d/tandem-{interface}": _file("\n".join([*stanza, ""]))},
        "apply": [f"ip address add {want['address']} broadcast + dev {interface}"],
        "back": [f"ip address delete {address}"],
    }


def _without_stanzas(text: str, interface: str) -> str:
    kept, inside = [], False
    for line in text.splitlines():
        if re.match(r"\s*(iface|auto|allow-\S+|mapping|source\S*|no-auto-down|no-scripts)\s", line):
            inside = bool(re.match(rf"\s*iface\s+{re.escape(interface)}\s+inet\s", line))
        if not inside:
            kept.append(line)
    return "\n".join([*kept, ""])


_PLANNERS = {
    "NetworkManager": _network_manager,
    "netplan": _netplan,
    "systemd-networkd": _networkd,
    "ifupdown": _ifupdown,
}
