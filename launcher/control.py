"""The verbs for a run that is under way, or over: runs, stop, attach, and starting detached.

A run's controller is the process that holds the lock on its controller.pid; what it printed is in
controller.log. There is no other state, so none can be stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from contract.errors import UserError
from contract.result_lines import WANTED, read_results
from contract.text import clean
from launcher import background, folders, terminal
from launcher.folders import relative
from launcher.machines.inventory import CHECKOUT
from launcher.node import processes
from launcher.notify import top1
from report.files import open_record, read_object

LOOK_EVERY = 0.2
LONGEST, AT_ONCE = 1 << 16, 1000  # characters of a line; lines


def controller(folder: Path) -> int | None:
    """The pid of the process that carries the run out, or None. A lock does not say who holds it: a
    process here is the controller only if it began when the controller did."""
    with contextlib.suppress(OSError), open_record(folder / "controller.pid") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            match = re.fullmatch(r"([0-9]{1,9}) (\S+) (\S+)\n", file.read(LONGEST))
            if match:
                pid, host, start = match.groups()
                if host != socket.gethostname() or start == processes.start_of(int(pid)):
                    return int(pid)
    return None


def elsewhere(folder: Path) -> str | None:
    """The controller's machine, if it is not this one: runs/ may be on a file share."""
    with open_record(folder / "controller.pid") as file:
        words = file.read(LONGEST).split()
    return words[1] if len(words) > 1 and words[1] != socket.gethostname() else None


def read(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where it is missing or broken."""
    return read_object(path, [])


def state(folder: Path) -> str:
    """running, finished, failed, stopped, or abandoned (its controller died)."""
    if controller(folder):
        return "running"
    status = read(folder / "attempts.json").get("status")
    return str(status) if status in ("finished", "failed", "stopped") else "abandoned"


def runs() -> int:
    """All runs, the newest first."""
    found = sorted((p.parent for p in folders.RUNS.glob("*Z-*/plan.json")), reverse=True)
    if not found:
        print("no runs yet: `make train` starts one")
        return 0
    print(f"{'run':<38} {'state':<10} {'nodes':>5} {'top-1':>8}")
    for folder in found:
        nodes = "?"
        with contextlib.suppress(KeyError, TypeError):
            nodes = str(len(read(folder / "plan.json")["nodes"]))
        say(f"{folder.name:<38} {state(folder):<10} {nodes:>5} {top1(folder):>8}")
    return 0


def say(text: str) -> None:
    """Print names and words that a run's files hold; its folder may be somebody else's."""
    print(clean(text))


def stop(name: str) -> int:
    """End a run properly: its workers save, then exit. Shows that nothing is left of it."""
    folder = folders.find(name)
    pid = controller(folder)
    if pid is None:
        raise UserError(f"run {folder.name} is not under way; its state is `{state(folder)}`.")
    machine = elsewhere(folder)
    if machine:
        raise UserError(
            f"run {folder.name} is carried out on {machine}: type `make stop "
            f"RUN={folder.name}` there."
        )
    if (folder / "controller.pid").stat().st_uid != os.getuid():  # it may name any process of ours
        raise UserError(
            f"run {folder.name} is another user's: only that user can type `make stop "
            f"RUN={folder.name}`."
        )
    log = folder / "controller.log"
    before = log.stat().st_size if log.exists() else 0
    os.kill(pid, signal.SIGTERM)
    follow(folder, before)
    return 0 if state(folder) in ("stopped", "finished") else 1


def attach(name: str) -> int:
    """Show all that a run has printed, then follow it to its end. Ctrl-C ends only the view."""
    folder = folders.find(name)
    try:
        follow(folder, 0)
    except KeyboardInterrupt:
        print()
        terminal.show(
            f"run {folder.name} goes on: `make attach RUN={folder.name}` shows it again", sys.stdout
        )
    return 0


def follow(folder: Path, begin: int) -> None:
    """Show controller.log from byte `begin` while its controller lives: what a terminal would obey
    stays out, since the folder may be somebody else's."""
    log = folder / "controller.log"
    for older in background.parts(log)[:-1] if begin == 0 else []:
        with _opened(older) as file:
            while _show(file):
                pass
    with contextlib.ExitStack() as stack:
        text: TextIO | None = None
        while True:
            alive = controller(folder) is not None  # before reading, so that no last line is lost
            if text is None and log.exists():
                text = stack.enter_context(_opened(log))
                text.buffer.seek(begin)
            if text and _show(text):
                continue
            if text and _rotated(text, log):
                text, begin = None, 0
            elif not alive:
                return
            else:
                time.sleep(LOOK_EVERY)


def _show(text: TextIO) -> bool:
    """Print the lines that are new; whether there were any. Each was written at once, with its
    end."""
    lines = list(islice(iter(lambda: text.readline(LONGEST), ""), AT_ONCE))
    print(clean("".join(lines)), end="", flush=True)
    return bool(lines)


def _opened(log: Path) -> TextIO:
    try:
        return open_record(log)
    except OSError as error:
        raise UserError(f"{relative(log)} cannot be shown: {error.strerror}.") from None


def _rotated(file: TextIO, log: Path) -> bool:
    """Whether the log's name now belongs to another file. (For a moment before that it belongs to
    none.)"""
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(file.fileno()).st_ino != log.stat().st_ino
    return False


def detach(argv: list[str]) -> int:
    """Start the same command without this terminal; return when its run has begun or failed to."""
    words = [word for word in argv if word.partition("=")[0] not in ("--detach", "DETACH")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", WANTED: "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "launcher", *words],
        cwd=CHECKOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        for line in child.stdout or ():
            results = read_results(line)
            if not results:
                print(line, end="", flush=True)
            if "waits" in results:  # for AT=, QUEUE=1 or owners: it has no run yet
                text = f"detached as process {child.pid}: `kill {child.pid}` takes it back"
                terminal.show(text, sys.stdout)
                return 0
            if name := results.get("run"):
                terminal.show(
                    f"detached; {relative(folders.find(name))}: `make attach RUN={name}` shows it, "
                    f"`make stop RUN={name}` ends it",
                    sys.stdout,
                )
                return 0
        return child.wait()
    except KeyboardInterrupt:  # it has no terminal from which it would hear that
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
