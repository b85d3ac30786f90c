"""`make top`: shows a run on a live screen; between runs, the load of the machines.

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
from launcher.machines.engine import Host, Process
from launcher.terminal import ESCAPES
from report import status
from report.files import last_of, object_in
from report.read import Machine
from report.status import STALE, Follower, MachineNow
from report.text import section_lines, wrap
from report.view import Section

REDRAW_SECONDS = 1.0
TURN_BYTES = 1 << 16  # that are read from a machine in one turn
WRITE_SECONDS = 20.0  # for a machine to read its program
QUIT_KEYS = b"qQ\x03\x1b"  # q, Q, Ctrl-C and Esc
LOG_TAIL_BYTES = 1 << 14  # of controller.log, whose last lines are shown


class IdleMachine:
    """A machine that runs nothing, and the program on it that prints a sample each second.
    `sample_time`: when its last sample came, in monotonic seconds. `problem`: why no more samples
    come."""

    def __init__(self, host: Host, process: Process):
        self.host, self.process = host, process
        self.machine = Machine(host.name)
        self.sample_time = time.monotonic()
        self.problem = ""
        self._unread = b""  # the beginning of a line

    @property
    def row(self) -> MachineNow | None:
        """The machine's row of the table; None before its first sample."""
        return status.machine_now(self.machine) if self.machine.recent else None

    def look(self) -> None:
        """Read the machine's new lines, at most about TURN_BYTES: a machine that sends without end
        must not stop the screen."""
        data = self._unread
        while not self.problem and len(data) < TURN_BYTES:
            try:
                piece = self.process.read()
            except OSError:
                piece = b""
            if piece == b"":
                self.problem = "its connection ended"
            if not piece:  # or None: no bytes have come yet
                break
            data += piece
        *lines, self._unread = data.split(b"\n")
        if len(self._unread) >= TURN_BYTES:
            self.problem = "it sends a line without an end"
        for line in lines:
            sample = object_in(line) if line.startswith(b"{") else None
            if sample is not None:
                self.sample_time, self.machine.unix = time.monotonic(), time.time()
                self.machine.recent.append(sample)


class IdleMachines:
    """All machines of an inventory, connected while no run is under way. `failures`: a sentence on
    each machine that cannot be shown, by name."""

    def __init__(self, hosts: list[Host]):
        self._hosts = hosts
        self._nodes, self.failures = engine.open_all(hosts)
        program = remote.program("launcher.node.records", "stream()").encode()
        self._idle: list[IdleMachine] = []
        for host in hosts:
            if host.name not in self._nodes:
                continue
            with self._isolate_errors(host):
                process = self._nodes[host.name].start([host.engine.guard_python, "-"])
                # The program is larger than a pipe: a write takes a part of it.
                unsent = memoryview(program)
                deadline = time.monotonic() + WRITE_SECONDS
                while unsent:
                    if time.monotonic() > deadline:  # a frozen machine takes no bytes
                        raise OSError("it does not read its program")
                    size = process.write(unsent)
                    unsent = unsent[size:]
                    if not size:
                        time.sleep(0.01)
                process.close_stdin()
                self._idle.append(IdleMachine(host, process))

    def lines(self, width: int) -> list[str]:
        """Read new samples, and return the lines of the screen."""
        rows = []
        for idle in self._idle:
            with self._isolate_errors(idle.host):
                idle.look()
                rows += [idle.row] if idle.row else []
        lines = [f"  {pluralize(len(self._hosts), 'machine')}; no run is active", ""]
        if rows:
            section = Section("", status.machines_of(rows, running=False))
            lines += [*section_lines(section, width), ""]
        for idle in self._idle:
            silent_seconds = time.monotonic() - idle.sample_time
            silence = f"silent for {silent_seconds:.0f} s" if silent_seconds > STALE else ""
            if reason := idle.problem or silence:
                lines.append(f"  {idle.host.name}: {reason}")
        for name in sorted(self.failures):
            lines += wrap(self.failures[name], "  ", "    ", max(24, width))
        return lines

    @contextlib.contextmanager
    def _isolate_errors(self, host: Host) -> Iterator[None]:
        """Turn every error with one machine, and with its answers, into a line about it. The other
        machines are still shown."""
        try:
            yield
        except Exception as error:
            self.failures[host.name] = f"{host.label()}: it does not answer: {error}"[:1000]
            self._idle = [idle for idle in self._idle if idle.host != host]

    def close(self) -> None:
        for idle in self._idle:
            idle.process.close()
        engine.close_all(self._nodes)


def tail(folder: Path, count: int) -> list[str]:
    """Return the last `count` lines that the run's terminal showed."""
    text = last_of(folder / "controller.log", LOG_TAIL_BYTES)
    return [f"  {line}" for line in text.splitlines() if line.strip()][-count:] if count > 0 else []


class Top:
    """The screen: the run that the user named, else the run under way, else the machines. `slow`:
    the machines for which the other machines of the run wait."""

    def __init__(self, name: str | None, inventory_file: str):
        self._named_run = folders.find(name) if name else None
        self._inventory = inventory_file
        self._folder: Path | None = None
        self._follower: Follower | None = None
        self._machines: IdleMachines | None = None
        self._slow: set[str] = set()

    def draw(self, width: int, height: int) -> Group:
        """Return the lines; the row of a slow machine, which begins with its name, is yellow."""
        texts = []
        for line in self.lines(width, height):
            is_slow = any(word in self._slow for word in line.split()[:1])
            texts.append(Text(line, "yellow" if is_slow else ""))
        return Group(*texts)

    def lines(self, width: int, height: int) -> list[str]:
        """Return at most `height` lines of at most `width` columns."""
        # The run may begin or end while the screen is shown, so it is looked for each time.
        newest = folders.newest_first()[:20]
        running = next((folder for folder in newest if control.launcher_pid(folder)), None)
        folder, self._slow = self._named_run or running, set()
        if folder is None:
            if self._machines is None:
                self._machines = IdleMachines(inventory.load(Path(self._inventory)))
            lines = self._machines.lines(width)
        else:
            # A run uses the machines: nobody asks them for more now.
            self.close()
            if folder != self._folder:
                self._folder, self._follower = folder, Follower(folder)
            assert self._follower is not None
            state, progress = control.read_state(folder), self._follower.look()
            lines = [f"  {folder.name}: {state}"]
            if progress is None:
                lines.append("  no step was reported yet")
            else:
                lines += section_lines(status.section_of(progress, state == "running"), width)
                # Machines that hang are the slow ones; without a hang it is the slowest machine.
                judgement = progress.judgement
                if state == "running" and progress.hang is not None:
                    self._slow = {host for host, _ in progress.hang.ranks}
                elif state == "running" and judgement is not None:
                    ranks = judgement.step.ranks
                    self._slow = {rank.host for rank in ranks if rank.rank == judgement.slower}
            # The rest of the screen shows what the run's terminal showed last.
            if (row_count := height - len(lines) - 2) > 2:
                lines += ["", *tail(folder, row_count)]
        title = f"tandem  {time.strftime('%H:%M:%S')}  q closes this view; the run continues"
        # Lines without colours and control sequences, cut to the terminal's size: a line that wraps
        # would push another line off the screen. isprintable also removes tabs.
        texts = [ESCAPES.sub("", clean(line)) for line in [title, *lines]]
        plain = ["".join(filter(str.isprintable, text))[:width] for text in texts]
        if len(plain) > height:
            excess = f"  ... {len(plain) - height + 1} more lines: make the window taller"
            plain = [*plain[: height - 1], excess[:width]]
        return plain

    def close(self) -> None:
        """Close the connections to the machines."""
        if self._machines is not None:
            self._machines.close()
            self._machines = None


def top(name: str | None, machines: str) -> int:
    """Show the screen until `q` is pressed, or once if the output is no terminal. Returns the exit
    code. Raises UserError."""
    view, console = Top(name, machines), Console(highlight=False)
    try:
        screen = view.draw(*console.size)
        if not console.is_terminal or console.is_dumb_terminal:
            # The first screen opened the connections; by the second the machines have answered.
            if view._machines is not None:
                time.sleep(2 * REDRAW_SECONDS)
            print("\n".join(view.lines(console.width, 1000)))
            return 0
        live = Live(screen, console=console, screen=True, auto_refresh=False)
        with contextlib.ExitStack() as stack:
            if sys.stdin.isatty():  # each key comes at once; afterwards the terminal is as before
                settings = termios.tcgetattr(sys.stdin)
                stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, settings)
                tty.setcbreak(sys.stdin)
            stack.enter_context(live)
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            while not wait_for_quit(REDRAW_SECONDS):
                live.update(view.draw(*console.size), refresh=True)
        return 0
    finally:
        view.close()


def wait_for_quit(seconds: float) -> bool:
    """Return whether a key that closes the view was pressed in that time."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    if not keys:
        raise UserError("the terminal is gone.")
    return any(key in QUIT_KEYS for key in keys)
