"""`make top`: a run on a live screen; between runs, how the machines are.

A run is read from its folder, as `make status` reads it. Machines that run nothing are asked over
one connection each: a program that is sent there prints a line a second.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from contract.errors import UserError
from contract.text import clean, pluralize
from launcher import control, folders, remote
from launcher.machines import engine, inventory
from launcher.machines.engine import Host, Node, Process
from report import status
from report.files import last_of, object_in
from report.read import Machine
from report.status import STALE, Follower, MachineNow, Progress
from report.text import section_lines, wrap
from report.view import Section

EVERY = 1.0  # seconds
PIECE = 1 << 16  # bytes of a machine's lines that are looked at in one turn
QUIT = b"qQ\x03\x1b"
HEAD = 1 << 14  # bytes of controller.log whose last lines are shown


class Idle:
    """One machine that runs nothing."""

    def __init__(self, host: Host, process: Process):
        self.host, self.process = host, process
        self.machine = Machine(host.name)
        self.heard = time.monotonic()
        self.why = ""
        self._rest = b""

    @property
    def now(self) -> MachineNow | None:
        return status.machine_now(self.machine) if self.machine.recent else None

    def look(self) -> None:
        """Take its new lines."""
        data = self._rest
        while not self.why and len(data) < PIECE:
            try:
                piece = self.process.read()
            except OSError:
                piece = b""
            if piece == b"":
                self.why = "its connection ended"
            if not piece:
                break
            data += piece
        *whole, self._rest = data.split(b"\n")
        if len(self._rest) >= PIECE:
            self.why = "it sends what is no figure"
        for line in whole:
            sample = object_in(line) if line.startswith(b"{") else None
            if sample is not None:
                self.heard, self.machine.unix = time.monotonic(), time.time()
                self.machine.recent.append(sample)


class Machines:
    """All machines of an inventory, asked for as long as they run nothing."""

    def __init__(self, hosts: list[Host]):
        self._hosts = hosts
        self._nodes, self.failures = engine.open_all(hosts)
        text = remote.program("launcher.node.records", "stream()").encode()
        self._idle: list[Idle] = []
        for host in hosts:
            if host.name in self._nodes:
                with self._isolate_errors(host):
                    self._idle.append(Idle(host, _started(self._nodes[host.name], host, text)))

    def lines(self, width: int) -> list[str]:
        told = []
        for one in self._idle:
            with self._isolate_errors(one.host):
                one.look()
                told += [one.now] if one.now else []
        found = [f"  {pluralize(len(self._hosts), 'machine')}; no run is under way here", ""]
        section = Section("", status.machines_of(told, False) if told else [])
        found += [*section_lines(section, width), ""] if told else []
        for one in self._idle:
            silent = time.monotonic() - one.heard
            if why := one.why or (f"silent for {silent:.0f} s" if silent > STALE else ""):
                found.append(f"  {one.host.name}: {why}")
        for name in sorted(self.failures):
            found += wrap(self.failures[name], "  ", "    ", max(24, width))
        return found

    @contextlib.contextmanager
    def _isolate_errors(self, host: Host) -> Iterator[None]:
        """Around what is done with one machine and what it sends: the others are shown whatever
        goes wrong there."""
        try:
            yield
        except Exception as error:
            self.failures[host.name] = f"{host.label()}: it cannot be asked: {error}"[:1000]
            self._idle = [one for one in self._idle if one.host != host]

    def close(self) -> None:
        for one in self._idle:
            one.process.close()
        engine.close_all(self._nodes)


def _started(node: Node, host: Host, program: bytes) -> Process:
    process = node.start([host.engine.guard_python, "-"])
    rest = memoryview(program)
    while rest:
        taken = process.write(rest)
        rest = rest[taken:]
        if not taken:
            time.sleep(0.01)
    process.close_stdin()
    return process


def run_lines(folder: Path, follower: Follower, width: int) -> tuple[list[str], set[str]]:
    """What is shown of a run, and the machines that the others wait for."""
    state = control.state(folder)
    running = state == "running"
    found = [f"  {folder.name}: {state}"]
    progress = follower.look()
    if progress is None:
        return [*found, "  nothing was told of its steps yet"], set()
    found += section_lines(status.section_of(progress, running), width)
    return found, slow_hosts(progress) if running else set()


def slow_hosts(progress: Progress) -> set[str]:
    """The machines that the others wait for."""
    judgement = progress.judgement
    if progress.hang is not None:
        return {host for host, _ in progress.hang.ranks}
    if judgement is None or judgement.slower is None:
        return set()
    return {rank.host for rank in judgement.step.ranks if rank.rank == judgement.slower}


def tail(folder: Path, count: int) -> list[str]:
    """The last lines that the run's terminal showed."""
    text = last_of(folder / "controller.log", HEAD)
    return [f"  {line}" for line in text.splitlines() if line.strip()][-count:] if count > 0 else []


def newest_running() -> Path | None:
    """The newest run that a process of this machine carries out."""
    found = sorted((path.parent for path in folders.RUNS.glob("*Z-*/plan.json")), reverse=True)
    return next((folder for folder in found[:20] if control.controller(folder)), None)


class Top:
    """What is on the screen: the run that was named, else the one under way, else the machines."""

    def __init__(self, name: str | None, machines: str):
        self._named = folders.find(name) if name else None
        self._list = machines
        self._folder: Path | None = None
        self._follower: Follower | None = None
        self._machines: Machines | None = None
        self._slow: set[str] = set()

    def drawn(self, width: int, height: int) -> Group:
        """The lines, of which the row of a machine that the others wait for stands out."""
        return Group(*(Text(line, self._style(line)) for line in self.lines(width, height)))

    def _style(self, line: str) -> str:
        return "yellow" if (line.split() or [""])[0] in self._slow else ""

    def lines(self, width: int, height: int) -> list[str]:
        """At most so many lines of at most so many columns."""
        folder, self._slow = self._named or newest_running(), set()
        if folder is not None:
            self._leave_machines()
            if folder != self._folder:
                self._folder, self._follower = folder, Follower(folder)
            assert self._follower is not None
            found, self._slow = run_lines(folder, self._follower, width)
            if (room := height - len(found) - 2) > 2:
                found += ["", *tail(folder, room)]
        else:
            if self._machines is None:
                self._machines = Machines(inventory.load(Path(self._list)))
            found = self._machines.lines(width)
        title = f"tandem  {time.strftime('%H:%M:%S')}  q ends this view, not the run"
        return fitting([title, *found], width, height)

    def _leave_machines(self) -> None:
        if self._machines is not None:
            self._machines.close()
            self._machines = None

    def close(self) -> None:
        self._leave_machines()


def fitting(lines: list[str], width: int, height: int) -> list[str]:
    """The lines without what a terminal would obey, cut to its size."""
    plain = ["".join(filter(str.isprintable, clean(line)))[:width] for line in lines]
    if len(plain) <= height:
        return plain
    more = len(plain) - height + 1
    return [*plain[: height - 1], f"  ... {more} lines more: make the window taller"[:width]]


@contextlib.contextmanager
def keys_as_they_come() -> Iterator[None]:
    """Afterwards the terminal is as before."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    try:
        if before is not None:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def top(name: str | None, machines: str) -> int:
    """Show it until `q` is pressed. Where the output is no terminal, once. Raises UserError."""
    view, console = Top(name, machines), Console(highlight=False)
    try:
        first = view.drawn(*console.size)
        if not console.is_terminal or console.is_dumb_terminal:
            if view._machines is not None:
                time.sleep(2 * EVERY)  # until they have told
            print("\n".join(view.lines(console.width, 1000)))
            return 0
        live = Live(first, console=console, screen=True, auto_refresh=False)
        with keys_as_they_come(), live, contextlib.suppress(KeyboardInterrupt):
            while not pressed(EVERY):
                live.update(view.drawn(*console.size), refresh=True)
        return 0
    finally:
        view.close()


def pressed(seconds: float) -> bool:
    """Whether a key was pressed in that time that ends the view."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    if not keys:
        raise UserError("the terminal is gone.")
    return any(key in QUIT for key in keys)
