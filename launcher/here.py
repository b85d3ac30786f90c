"""torch in this checkout's own environment: only where nodes of this machine train by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from contract.errors import UserError
from launcher.machines.engine import Host
from launcher.machines.inventory import CHECKOUT
from launcher.terminal import Terminal

OWN = CHECKOUT / ".venv"
INSTALL = [str(CHECKOUT / "tools/venv.sh"), "torch"]


def add_torch(hosts: Sequence[Host], terminal: Terminal) -> None:
    """Install what nodes of this machine need to train, where `make env` made their environment;
    the script says how much that is, and does nothing a second time. Raises UserError."""
    ours = [host for host in hosts if host.engine.is_local and OWN in Path(host.env_python).parents]
    if not ours or Path(sys.prefix) != OWN:
        return
    terminal.drain()
    if subprocess.call(INSTALL):
        raise UserError(
            f"{ours[0].name} trains on this machine, which needs torch, and it could not be "
            "installed (above): make room or mend the network, then start again."
        )
