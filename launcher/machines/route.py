"""Finds the route of ssh to a machine. OpenSSH itself reads ansible/ssh_config and ~/.ssh/config,
so the launcher and Ansible use the same route."""

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
    "proxycommand": "Tandem cannot check the keys of the hosts that it uses: write it as ProxyJump",
    "revokedhostkeys": "mark these keys as @revoked in known_hosts",
    "knownhostscommand": "put these keys into known_hosts",
    "bindaddress": "leave it out",
    "bindinterface": "leave it out",
}


@dataclass(frozen=True)
class Route:
    """The route of ssh to a machine. `key_name`: its name in known_hosts; `hops` as ProxyJump lists
    them. An empty field means ssh's default."""

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
        # -J takes all hops but the last one, from which -W forwards to the machine.
        *hops, gateway = self.hops.split(",")
        jump = ["-J", ",".join(hops)] if hops else []
        target = gateway if gateway.startswith("ssh://") else f"ssh://{gateway}"
        words = ["-o", "BatchMode=yes", *jump, "-W", f"[{address}]:{port}", "--", target]
        return [*SSH, *words]


def find(address: str, words: list[str]) -> Route:
    """Return the route to a machine, which the inventory calls `address`, by these options of ssh.
    Raises UserError."""
    # -G prints the options for this address and connects nowhere.
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
            f"ssh rejects {address!r}: {reason}: correct ansible_host in the inventory, or "
            "~/.ssh/config."
        )
    options = defaultdict[str, list[str]](list)  # ssh -G prints each option with its values
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        options[name].append(value)

    def option(name: str, default: str = "") -> str:
        value = options[name][0] if options[name] else default
        return "" if value == "none" else value

    for name, remedy in UNSUPPORTED.items():
        if option(name):
            raise UserError(f"ssh's option {name} ({option(name)}) is not supported: {remedy}.")
    if option("stricthostkeychecking") not in ("yes", "true"):
        raise UserError("ssh's option StrictHostKeyChecking must be yes: remove it.")
    # known_hosts has a name without its port if that is 22, and [name]:port otherwise.
    name, port = option("hostname", address), int(option("port", "22"))
    known_name = option("hostkeyalias") or (name if port == 22 else f"[{name}]:{port}")
    files = [*options["userknownhostsfile"], *options["globalknownhostsfile"]]
    return Route(
        address=name,
        port=port,
        user=option("user"),
        key_name=known_name,
        hops=option("proxyjump"),
        identity_files=tuple(options["identityfile"]),
        known_hosts=tuple(word for line in files for word in line.split()),
    )
