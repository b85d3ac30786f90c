"""A machine of the inventory, and what is asked of the way to it. Each way is one module of
`launcher/machines/engines/`, found by the name that the inventory has as ansible_connection, and
defines `ENGINE`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from contract.errors import UserError
from launcher.machines import engines


class MachineError(UserError):
    """A UserError about machines of the run; `hosts` are their names in the inventory."""

    def __init__(self, hosts: list[str], *problems: str):
        super().__init__(*problems)
        self.hosts = hosts


class Busy(UserError):
    """Another run took a machine first: waiting helps."""


class Process(Protocol):
    """One command on a machine. No method but `wait` blocks."""

    def fileno(self) -> int:
        """For select(): readable when `read` has something, the end included."""

    def read(self) -> bytes | None:
        """What has arrived on stdout; b"" at the end; None when there is nothing yet."""

    def write(self, data: bytes | memoryview) -> int:
        """Bytes taken, perhaps 0. Raises OSError when the other side is gone."""

    def close_stdin(self) -> None: ...

    def wait(self) -> int:
        """The exit status, -1 when the connection broke; call it after read() returned b""."""

    def stderr(self) -> str:
        """The end of its stderr, once it has ended."""

    @property
    def broken(self) -> bool:
        """Whether the connection to the machine was lost, rather than the command's end reached."""

    def close(self) -> None:
        """Close its pipes. A guard whose stdin ends kills what it started, then itself."""


class Node(Protocol):
    """The connection to one machine."""

    @property
    def host(self) -> Host: ...

    def open(self) -> None:
        """Connect. Raises MachineError."""

    def start(self, argv: list[str]) -> Process:
        """Run a command. Raises MachineError when the connection to the machine broke."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Engine:
    """What all machines that are reached in the same way have in common.

    `is_local`: their files are this machine's, and relative paths begin at the checkout.
    `guard_python` runs the guard; `repair_hint` and `data_hint` end the sentences about an
    environment that lacks something, and about example images that are missing.
    """

    node: Callable[[Host], Node]
    is_local: bool
    guard_python: str
    repair_hint: str
    data_hint: str


def of(name: str) -> Engine:
    """The engine of an ansible_connection, one of `names()`."""
    found = importlib.import_module(f"{engines.__name__}.{name}").ENGINE
    assert isinstance(found, Engine)
    return found


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(engines.__path__))


@dataclass(frozen=True)
class Host:
    """One machine of group `cluster`; its index in the list is its node rank.

    Paths of a host that is this machine are absolute; elsewhere node_dir may be relative to the
    home folder of the run user. `user` is the run user: train_user, or ansible_user where that is
    not set (group_vars/all.yml has the same rule, run_user). On this machine it is whoever starts
    the run.
    """

    name: str
    connection: str
    address: str
    port: int
    user: str | None
    env_python: str
    node_dir: str
    data_root: str
    gpus: int | None = None
    interface: str | None = None
    cuda_home: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        return of(self.connection)

    def label(self) -> str:
        return self.name if self.engine.is_local else f"{self.name} ({self.address})"

    def data_path(self, data: str) -> str:
        """Where this machine has the images: a name is looked up below its data_root; "" stays
        "". Raises UserError."""
        if not data:
            return ""
        if "/" not in data:
            return f"{self.data_root}/{data}"
        if Path(data).is_absolute():
            return data
        if self.engine.is_local:
            return str(Path(data).absolute())
        raise UserError(
            f"DATA={data}: on {self.name} this path would begin nowhere: give a name below "
            f"{self.data_root} or a path from /."
        )
