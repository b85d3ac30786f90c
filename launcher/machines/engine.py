"""What the launcher asks of the ways to machines. Each is one module of
`launcher/machines/engines/`, found by the name that the inventory has as ansible_connection, and
defines `ENGINE`.
"""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector
from typing import TYPE_CHECKING, Protocol

from contract.errors import UserError
from launcher.machines import engines

if TYPE_CHECKING:
    from launcher.machines.inventory import Host

LARGEST = 4 << 20  # bytes of an answer: a .bashrc that runs `yes` must not fill our memory


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

    `here`: their files are this machine's, and relative paths begin at the checkout.
    `guard_python` runs the guard; `mends` and `digits` end the sentences about an environment that
    lacks something, and about example images that are missing.
    """

    node: Callable[[Host], Node]
    here: bool
    guard_python: str
    mends: str
    digits: str


def of(name: str) -> Engine:
    """The engine of an ansible_connection, one of `names()`."""
    found = importlib.import_module(f"{engines.__name__}.{name}").ENGINE
    assert isinstance(found, Engine)
    return found


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(engines.__path__))


class Late(Exception):
    """A command sent nothing, or less than it had to, in the time that it was given."""


def pieces(
    process: Process, seconds: float, data: bytes = b"", renewed: int = 0
) -> Iterator[bytes]:
    """What a command prints, until its end, while it is given its whole input.

    Raises Late after so many seconds. They begin anew each time that `renewed` bytes have arrived,
    so n bytes arrive within (1 + n / renewed) * seconds. (If every byte renewed the deadline, a
    machine that sends one now and then would never reach it.)
    """
    deadline, missing = time.monotonic() + seconds, renewed
    rest = memoryview(data)
    with DefaultSelector() as selector:
        selector.register(process.fileno(), EVENT_READ)
        while time.monotonic() < deadline:
            rest = _give(process, rest)
            if not selector.select(0.02 if rest else 0.5):
                continue
            piece = process.read()
            if piece == b"":
                return
            if piece:
                missing -= len(piece)
                if renewed and missing <= 0:
                    deadline, missing = time.monotonic() + seconds, renewed
                yield piece
    raise Late


def _give(process: Process, data: memoryview) -> memoryview:
    """What is left of the input after the command has taken as much as it can now."""
    try:
        while data:
            taken = process.write(data)
            data = data[taken:]
            if not data:
                process.close_stdin()
            if not taken:
                break
    except BrokenPipeError:  # it ended before it read all: its output says why
        return memoryview(b"")
    return data


def talk(process: Process, data: bytes, seconds: float) -> tuple[bytes, str, int | None]:
    """Give a command its whole input; return its output, its stderr and its exit status.

    The status is None when it did not end in time. Raises UserError when it prints too much.
    """
    output = bytearray()
    try:
        for piece in pieces(process, seconds, data):
            output += piece
            if len(output) > LARGEST:
                raise UserError(
                    f"it said more than {LARGEST >> 20} MiB where an answer was wanted: "
                    "does a .bashrc print there?"
                )
        status = process.wait()
        return bytes(output), " ".join(process.stderr().split())[-300:], status
    except Late:
        return bytes(output), "", None
    finally:
        process.close()
