"""Shows the launcher's sentences, its waits and rank 0's progress bar on the user's terminal. It
also counts the signals by which the user stops a run: Ctrl-C, SIGTERM and a closed terminal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TextIO

from contract import verbs
from contract.options import DEFAULT_INVENTORY
from contract.result_lines import result_line
from contract.text import clean
from launcher.background import LOG_BYTES, Screen, Spool, SpooledLog

NAME = "tandem: "
CLEAR_LINE = "\r\x1b[K"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # such as \x1b[31m, which makes text red
FIRST_NOTICE, NOTICE_EVERY = 5.0, 15.0  # seconds of a wait until its first line, and between lines


def remember_inventory(inventory: str) -> None:
    """Add INVENTORY=, unless it is the default, to the commands that this process and its children
    print."""
    # The environment reaches the report, a child that prints such commands, too.
    if inventory == DEFAULT_INVENTORY:
        os.environ.pop(verbs.INVENTORY_VARIABLE, None)
    else:
        os.environ[verbs.INVENTORY_VARIABLE] = inventory


def show(text: str, stream: TextIO) -> None:
    """Print a sentence of the launcher, wrapped if the stream is a terminal."""
    width = 0
    with contextlib.suppress(OSError, ValueError):
        width = os.get_terminal_size(stream.fileno()).columns
    print(*wrap_sentence(text, width), sep="\n", file=stream, flush=True)


def wrap_sentence(text: str, width: int) -> list[str]:
    """Split a sentence into lines of `width` columns (0: one line). No command is broken in two, so
    that it can be copied; an indented line is a program's output, and stays as it is."""
    text = clean(verbs.with_inventory(text))
    if not width or text.startswith(" ") or "\n" in text:
        return (NAME + text).split("\n")
    return verbs.wrap_lines(NAME + text, width).split("\n")


class Terminal:
    """The user's terminal: lines, and below them rank 0's progress bar. No call waits until the
    terminal has taken a line. controller.log has every line, too, and `attach` shows that log."""

    def __init__(self, out: IO[str] | None = None):
        self._out = out if out is not None else sys.stdout
        self.is_tty = self._out.isatty()
        self._screen = Screen(self._out)
        self._bar = ""
        self.spool = Spool()
        self._log_file: SpooledLog | None = None

    def open_log(self, path: Path, limit: int = LOG_BYTES) -> None:
        """Write each later line into this file, too, up to `limit` bytes."""
        self._log_file = SpooledLog(path, limit, self.spool)

    def close_log(self) -> None:
        """Write no later line into the log."""
        if self._log_file:
            self._log_file.close()
            self._log_file = None
            self.spool.drain()

    def say(self, *texts: str) -> None:
        """Show some of the launcher's own sentences."""
        for text in texts:
            self.lines(wrap_sentence(text, self.columns))

    def result(self, **facts: str) -> None:
        """Report facts to the program that started the launcher, if it reads them."""
        if line := result_line(**facts):
            self._screen.write(line)

    def lines(self, texts: list[str]) -> None:
        """Show lines, all in one write: at thousands of lines a second each write counts."""
        text = clean("\n".join(texts))
        # The log never has the bar, which would be one more line for each step.
        if self._log_file:
            self._log_file.write(text.split("\n"))
        if self._bar:
            self._screen.write(f"{CLEAR_LINE}{text}\n{self._bar}")
        else:
            self._screen.write(text + "\n")

    def bar(self, text: str) -> None:
        """Replace the progress bar; an empty text removes it. Does nothing without a terminal."""
        # In a file each state of the bar would be a line.
        if not self.is_tty:
            return
        text = clean(text)
        if self.columns:  # a bar that wraps could not be overwritten
            text = ESCAPES.sub("", text)[: self.columns - 1]
        if text != self._bar:
            self._screen.write(CLEAR_LINE + text)
            self._bar = text

    @property
    def columns(self) -> int:
        """Return the terminal's width; 0 if the output is no terminal, or its width is unknown."""
        if self.is_tty:
            with contextlib.suppress(OSError):
                return os.get_terminal_size(self._out.fileno()).columns
        return 0

    def drain(self) -> bool:
        """Wait until all is written and shown. Returns False if the terminal takes nothing."""
        self.spool.drain()
        return self._screen.drain()


class WaitNotice:
    """Shows a line on the terminal now and then, as long as `update` is called."""

    def __init__(self, terminal: Terminal, activity: str):
        self._terminal, self._activity = terminal, activity
        self._start_time = time.monotonic()
        self._next_time = self._start_time + FIRST_NOTICE

    def update(self, progress: str = "") -> None:
        """Show a line, if one is due. `progress`: a clause at its end."""
        seconds = time.monotonic()
        if seconds >= self._next_time:
            self._next_time = seconds + NOTICE_EVERY
            clause = f", {progress}" if progress else ""
            duration = seconds - self._start_time
            self._terminal.say(f"{self._activity}: {duration:.0f} s so far{clause}")


@contextlib.contextmanager
def waiting(terminal: Terminal, activity: str) -> Iterator[None]:
    """Report the wait now and then, from a thread, while the body runs."""
    notice = WaitNotice(terminal, activity)

    def say(over: threading.Event) -> None:
        while not over.wait(1.0):
            notice.update()

    with in_thread("waiting", say):
        yield


@contextlib.contextmanager
def in_thread(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread while the body runs. At the end of the body its event is set: then it
    has to return."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopper:
    """Counts how often the user asked to stop: after one signal the workers save, after two they
    are killed. SIGHUP and SIGINT that were ignored from the start stay ignored, as nohup and a
    script's `&` want it. SIGTERM always counts, since `make stop` sends it."""

    def __init__(self):
        self.stop_requests = 0
        self.suspended = False  # Ctrl-Z was pressed; watch.py reports that it is ignored

    def _handle(self, number: int, _frame: object) -> None:
        if number == signal.SIGTSTP:
            self.suspended = True
        else:
            self.stop_requests += 1

    @contextlib.contextmanager
    def listening(self):
        """Handle the signals while the body runs."""
        # The handlers only count: the loop acts when it is safe to do so.
        ignored = {n for n in STOP_SIGNALS if signal.getsignal(n) is signal.SIG_IGN} - {
            signal.SIGTERM
        }
        handled = [number for number in STOP_SIGNALS if number not in ignored]
        handlers = {number: signal.signal(number, self._handle) for number in handled}
        handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._handle)
        # After Ctrl-Z `make` is stopped and this process is in the background, where it may print.
        handlers[signal.SIGTTOU] = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def wakeup():
    """Yield a socket that becomes readable at each signal, so that select() wakes up."""
    # Python retries a select() that a signal interrupts, so the signal alone would not end it.
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous)
        reader.close()
        writer.close()
