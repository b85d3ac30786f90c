"""The folders of a run, on the control node and on its connected machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contract.runs import folder_on_machine
from launcher.look import OpenMachines
from launcher.machines.engine import Host
from launcher.program import Needs
from launcher.terminal import Terminal

if TYPE_CHECKING:
    from launcher.watch.attempts import Attempts


@dataclass(frozen=True)
class RunSite:
    """A run and its machines, for handover.py. `folder`: the run's folder on the control node.
    `hosts`: all machines of the run. `machines`: the machines that are connected now."""

    folder: Path
    needs: Needs
    hosts: Sequence[Host]
    machines: OpenMachines
    attempts: Attempts
    terminal: Terminal

    @property
    def folders(self) -> dict[str, str]:
        """Return the run's folder on each connected machine, by its name."""
        return folders_of(self.machines, self.folder.name)


def folders_of(machines: OpenMachines, run: str) -> dict[str, str]:
    """Return the run's folder on each machine, by its name."""
    return {
        host.name: folder_on_machine(machines.facts[host.name].absolute(host.node_dir), run)
        for host in machines.hosts
    }
