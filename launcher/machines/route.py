"""Finds the route of ssh to a machine. OpenSSH itself reads ansible/ssh_config and ~/.ssh/config,
so the launcher goes the way that Ansible goes."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from contract.errors import UserError
from contract.text import clean

SSH = ("ssh", "-F", str(Path(__file__).resolve().parents[2] / "ansible/ssh_config"))
# With these options ssh would go elsewhere, or trust somebody else, than this launcher checks.
UNSUPPORTED = {
    "proxycommand": "which hosts it goes over cannot be checked: write it as ProxyJump",
    "revokedhostkeys": "mark these keys as @revoked in known_hosts",
    "knownhostscommand": "put these keys into known_hosts",
    "bindaddress": "leave it out",
    "bindinterface": "leave it out",
}


@dataclass(frozen=True)
class Route:
    """The route of ssh to a machine. `key_name`: its name in known_hosts; `hops` as ProxyJump lists
    them. An empty field stands for ssh's default."""

    address: str = ""
    port: int = 22
    user: str = ""
    key_name: str = ""
    hops: str = ""
    identity_files: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()

    def proxy(self, address: str, port: int) -> list[str]:
        """Return the command that connects its stdin and stdout with the machine's ssh, by the
        hops."""
        *hops, gateway = self.hops.split(",")
        jump = ["-J", ",".join(hops)] if hops else []
        target = gateway if gateway.startswith("ssh://") else f"ssh://{gateway}"
        words = ["-o", "BatchMode=yes", *jump, "-W", f"[{address}]:{port}", "--", target]
        return [*SSH, *words]


def find(address: str, words: list[str]) -> Route:
    """Return the route to a machine, which the inventory calls `address`, by these options of ssh.
    Raises UserError."""
    argv = [*SSH, "-G", *words, "--", address]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError("ssh is not installed here: sudo apt install openssh-client.") from None
    if done.returncode != 0:
        reason = clean(" ".join(done.stderr.splitlines()[-2:])) or "it gave no reason"
        raise UserError(
            f"ssh refuses {address!r}: {reason}: correct ansible_host in the inventory, or "
            "~/.ssh/config."
        )
    options = defaultdict[str, list[str]](list)  # ssh -G prints each option with its values
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        options[name].append(value)

    def first(name: str, default: str = "") -> str:
        value = options[name][0] if options[name] else default
        return "" if value == "none" else value

    for name, remedy in UNSUPPORTED.items():
        if first(name):
            raise UserError(f"ssh's option {name} ({first(name)}) is not supported: {remedy}.")
    if first("stricthostkeychecking") not in ("yes", "true"):
        raise UserError("ssh's option StrictHostKeyChecking has to be yes: leave it out.")
    name, port = first("hostname", address), int(first("port", "22"))
    known_name = first("hostkeyalias") or (name if port == 22 else f"[{name}]:{port}")
    files = [*options["userknownhostsfile"], *options["globalknownhostsfile"]]
    return Route(
        address=name,
        port=port,
        user=first("user"),
        key_name=known_name,
        hops=first("proxyjump"),
        identity_files=tuple(options["identityfile"]),
        known_hosts=tuple(word for line in files for word in line.split()),
    )
