"""What machines did while the training loop ran: one walk through the lines of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from contract.errors import UserError
from report.devices import Gpus, GpuUse
from report.disk import Disks, DiskUse, Shares, ShareUse
from report.files import natural
from report.machines import MachineUse, Processors, together
from report.network import Cards, NetworkUse
from report.read import Run
from report.windows import loop_windows, within


@dataclass(frozen=True)
class ResourceUsage:
    """What each kind of device did, by attempt and machine, in the order of the machines' names."""

    networks: list[NetworkUse] = field(default_factory=list)
    disks: list[DiskUse] = field(default_factory=list)
    shares: list[ShareUse] = field(default_factory=list)
    gpus: list[GpuUse] = field(default_factory=list)
    machines: list[MachineUse] = field(default_factory=list)

    def in_attempt(self, attempt: int | None) -> ResourceUsage:
        """Those of one attempt; none where that is None."""
        kinds = ((name, getattr(self, name)) for name in READERS)
        return ResourceUsage(
            **{name: [u for u in uses if u.attempt == attempt] for name, uses in kinds}
        )

    def machine(self, host: str) -> MachineUse | None:
        return next((use for use in self.machines if use.host == host), None)


# What reads its part of a line, by the field of ResourceUsage.
READERS: dict[str, Callable[[Run, str], Any]] = {
    "networks": Cards,
    "disks": Disks,
    "shares": Shares,
    "gpus": Gpus,
    "machines": Processors,
}


def uses_of(run: Run) -> ResourceUsage:
    """All uses of a run. Lines that a reader cannot take end that reader for that machine, with a
    sentence in `run.missing`."""
    windows, uses = loop_windows(run), ResourceUsage()
    for host in sorted(run.machines, key=natural):
        readers = {name: reader(run, host) for name, reader in READERS.items()}
        for window, mono, line in within(run.machines[host], windows.get(host, [])):
            for name in list(readers):
                with skip_on_error(run, host, name, readers):
                    readers[name].add(window, mono, line)
        for name in list(readers):
            with skip_on_error(run, host, name, readers):
                getattr(uses, name).extend(readers[name].uses())
    return replace(uses, machines=together(run, uses.machines))


@contextlib.contextmanager
def skip_on_error(run: Run, host: str, name: str, readers: dict[str, Any]) -> Iterator[None]:
    """An error in one machine's records ends its part alone."""
    try:
        yield
    except (UserError, MemoryError):  # a limit of the report's own
        raise
    except Exception as error:
        del readers[name]
        kind = type(error).__name__
        run.missing.append(f"{host}: its {name} cannot be read ({kind}: {error}).")
