"""Asks OpenSSH for the route to a machine. OpenSSH reads ansible/ssh_config and ~/.ssh/config, so
the launcher (ssh.py) and Ansible use the same route."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from contract.errors import UserError
from contract.text import clean

SSH = ("ssh", "-F", str(Path(__file__).resolve().parents[2] / "ansible/ssh_config"))
# {option of ssh that the launcher does not follow: remedy}. With such an option ssh would take
# another route, or trust other keys, than the launcher checks.
UNSUPPORTED = {
    "proxycommand": "Tandem cannot check the keys of the hosts that it uses: write it as ProxyJump",
    "revokedhostkeys": "mark these keys as @revoked in known_hosts",
    "knownhostscommand": "put these keys into known_hosts",
    "bindaddress": "leave it out",
    "bindinterface": "leave it out",
}


@dataclass(frozen=True)
class Route:
    """Describes the route of ssh to a machine. An empty field means the default of ssh."""

    address: str = ""
    port: int = 22
    user: str = ""
    key_name: str = ""  # the machine's name in known_hosts
    hops: str = ""  # jump hosts, as ProxyJump lists them: `anna@gate:2222,pc1`
    identity_files: tuple[str, ...] = ()
    known_hosts: tuple[str, ...] = ()

    def proxy(self, address: str, port: int) -> list[str]:
        """Return a command that connects stdin and stdout to the machine through the jump hosts."""
        # -W forwards from the last jump host to the machine; -J takes the jump hosts before it.
        *hops, gateway = self.hops.split(",")
        jump = ["-J", ",".join(hops)] if hops else []
        target = gateway if gateway.startswith("ssh://") else f"ssh://{gateway}"
        words = ["-o", "BatchMode=yes", *jump, "-W", f"[{address}]:{port}", "--", target]
        return [*SSH, *words]


def find_route(address: str, words: list[str]) -> Route:
    """Return the route to a machine. `address`: its ansible_host in the inventory; `words`: options
    of ssh in the inventory. Raises UserError."""
    # With -G, ssh does not connect but prints options, such as `hostname 192.168.1.5`.
    argv = [*SSH, "-G", *words, "--", address]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UserError("ssh is not installed here: sudo apt install openssh-client.") from None
    if done.returncode != 0:
        last_lines = done.stderr.splitlines()[-2:]  # the error, below warnings
        reason = clean(" ".join(last_lines)) or "it gave no reason"
        raise UserError(
            f"ssh rejects {address!r}: {reason}: correct ansible_host in the inventory, or "
            "~/.ssh/config."
        )
    options = defaultdict[str, list[str]](list)
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
    # In known_hosts a machine is called `name`, or `[name]:port` if its port is not 22.
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
