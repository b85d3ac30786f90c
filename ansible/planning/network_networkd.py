"""Plan a static address by systemd-networkd, whose files are in /etc/systemd/network."""

from __future__ import annotations

import re
from typing import Any

from . import PlanError
from . import preserved_settings as preserved

# networkd uses the first file that matches an interface, in the order of their names. "-" sorts
# before every digit and letter, so this file comes before 10-enp3s0.network.
NETWORK_FILE = "/etc/systemd/network/0-tandem-{}.network"


def plan(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """Plan a drop-in that adds an address, or a whole file that comes first."""
    if want["mode"] == "add":
        # A [Match] that fits several interfaces would give all of them the address.
        matched = [
            line.partition("=")[2].split()
            for section, lines in preserved.sections(facts["files"].get(network_file(facts), ""))
            for line in lines
            if section == "Match" and line.partition("=")[0].strip() == "Name"
        ]
        if facts["card"]["ports"] and matched != [[facts["interface"]]]:
            raise PlanError(
                f"{facts['host']}: {network_file(facts)} configures {facts['interface']}, and "
                f"perhaps also its ports ({', '.join(facts['card']['ports'])}). Write "
                f"Name={facts['interface']} into its section [Match], or omit `address`."
            )
        path = f"/etc/systemd/network/{network_file(facts).rpartition('/')[2]}.d/tandem.conf"
        text = f"[Network]\nAddress={want['address']}\n"
        return {"files": {path: text}, **restart(facts, want)}
    path = NETWORK_FILE.format(facts["interface"])
    file = network_file(facts)
    # Drop-ins are in FILE.d, so they would not count for Tandem's file, which has another name.
    folder = f"{file.rpartition('/')[2]}.d/"
    drop_ins = [name for name in facts["files"] if f"/network/{folder}" in name]
    if [name for name in drop_ins if not name.endswith("/tandem.conf")]:
        raise PlanError(
            f"{facts['host']}: {file} has drop-ins ({', '.join(sorted(drop_ins))}), which "
            f"Tandem's file would switch off. Write the address into {file} yourself, and "
            "omit `address`."
        )
    if file not in facts["files"]:
        raise PlanError(
            f"{facts['host']}: {file}, which configures {facts['interface']}, is in neither "
            "/etc nor /run. Copy it to /etc/systemd/network, or omit `address`."
        )
    network = [f"Address={want['address']}"]
    network += [f"Gateway={want['gateway']}"] if want["gateway"] else []
    network += [f"DNS={server}" for server in want["dns"]]
    present = preserved.networkd_options(facts["files"][file])
    network += [line for name, lines in present if name == "Network" for line in lines]
    if want["search"] and not any(line.startswith("Domains") for line in network):
        network.append(f"Domains={' '.join(want['search'])}")
    lines = ["[Match]", f"Name={facts['interface']}", "", "[Network]", *network]
    for name, settings in present:
        lines += ["", f"[{name}]", *settings] if name != "Network" else []
    for row in want["routes"]:
        next_hop = f"Gateway={row['gateway']}" if row["gateway"] else "Scope=link"
        lines += ["", "[Route]", f"Destination={row['to']}", next_hop]
    return {"files": {path: "\n".join([*lines, ""])}, **restart(facts, want)}


def restart(facts: dict[str, Any], want: dict[str, Any]) -> dict[str, list[str]]:
    """Return shell lines {"apply", "back"} that restart networkd with and without the address."""
    # networkd keeps addresses that are no longer configured, so they are deleted or flushed first.
    restart_line = "systemctl restart systemd-networkd"
    device = f"dev {facts['interface']}"
    if want["mode"] == "add":
        delete = f"ip address delete {want['address']} {device}"
        return {"apply": [restart_line], "back": [delete, restart_line]}
    lines = [f"ip address flush {device}", restart_line]
    return {"apply": lines, "back": lines}


def network_file(facts: dict[str, Any]) -> str:
    """Return the path of the file that configures the interface; "" if networkd does not."""
    match = re.search(r"^\s*Network File: (/\S+)", facts["networkctl"], re.MULTILINE)
    return match.group(1) if match else ""
