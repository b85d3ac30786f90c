"""Carries out the commands for runs that are under way, or over: runs, stop, attach, and --detach.

A run's launcher is the process that holds the lock on controller.pid (folders.lock);
controller.log has what it printed. There is no other state that could be stale.
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

LOOK_SECONDS = 0.2  # between two looks at a log that has no new lines
MAX_LINE = 1 << 16  # characters; another user's file may have a line of any length
LINES_AT_ONCE = 1000  # that are printed together


def launcher_pid(folder: Path) -> int | None:
    """Return the pid of the process that carries the run out, None if the run is not running."""
    with contextlib.suppress(OSError), open_record(folder / "controller.pid") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # another process holds the lock
            # The file has a line such as `4711 pc1 834512`. By now another process may have the
            # pid, so its start time has to agree. The start time of a process on another PC cannot
            # be read here: the lock is proof enough.
            match = re.fullmatch(r"([0-9]{1,9}) (\S+) (\S+)\n", file.read(MAX_LINE))
            if match:
                pid, host, start = match.groups()
                if host != socket.gethostname() or start == processes.start_of(int(pid)):
                    return int(pid)
    return None


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if it is missing or broken."""
    return read_object(path, [])


def read_state(folder: Path) -> str:
    """Return the run's state: running, finished, failed, stopped, or abandoned (its launcher
    died)."""
    if launcher_pid(folder):
        return "running"
    status = read_document(folder / "attempts.json").get("status")
    return str(status) if status in ("finished", "failed", "stopped") else "abandoned"


def list_runs() -> int:
    """Print all runs, the newest first. Returns the exit code."""
    run_folders = folders.newest_first()
    if not run_folders:
        print("no runs yet: `make train` starts one")
        return 0
    print(f"{'run':<38} {'state':<10} {'nodes':>5} {'top-1':>8}")
    for folder in run_folders:
        # A damaged plan.json must not hide the other runs.
        nodes = "?"
        with contextlib.suppress(KeyError, TypeError):
            nodes = str(len(read_document(folder / "plan.json")["nodes"]))
        print_clean(f"{folder.name:<38} {read_state(folder):<10} {nodes:>5} {top1(folder):>8}")
    return 0


def print_clean(text: str) -> None:
    """Print text from a run's files, without what a terminal would obey: they may be another
    user's."""
    print(clean(text))


def stop(name: str) -> int:
    """End a run: its workers save, then exit. Shows the run's log until then. Returns the exit
    code. Raises UserError."""
    folder = folders.find(name)
    pid = launcher_pid(folder)
    if pid is None:
        raise UserError(f"run {folder.name} is not running; its state is `{read_state(folder)}`.")
    # runs/ may be on a file share, and the launcher on another PC.
    with open_record(folder / "controller.pid") as file:
        words = file.read(MAX_LINE).split()  # 4711, pc1, 834512
    if len(words) > 1 and words[1] != socket.gethostname():
        raise UserError(
            f"the control node of run {folder.name} is {words[1]}: type `make stop "
            f"RUN={folder.name}` on that machine."
        )
    # Another user's file may have the pid of any process of this user.
    if (folder / "controller.pid").stat().st_uid != os.getuid():
        raise UserError(
            f"run {folder.name} belongs to another user: only that user can type `make stop "
            f"RUN={folder.name}`."
        )
    log = folder / "controller.log"
    # The size is read before the signal, so that all lines are shown which the signal causes.
    size = log.stat().st_size if log.exists() else 0
    os.kill(pid, signal.SIGTERM)
    follow(folder, size)
    return 0 if read_state(folder) in ("stopped", "finished") else 1


def attach(name: str) -> int:
    """Show all that a run has printed, then follow it to its end. Ctrl-C ends only the view.
    Returns the exit code. Raises UserError."""
    folder = folders.find(name)
    try:
        follow(folder, 0)
    except KeyboardInterrupt:
        print()
        terminal.show(
            f"run {folder.name} continues: `make attach RUN={folder.name}` shows it again",
            sys.stdout,
        )
    return 0


def follow(folder: Path, begin: int) -> None:
    """Show controller.log from byte `begin` while the run's launcher lives. Raises UserError."""
    log = folder / "controller.log"
    # A full log was renamed, and a new file continues it.
    for path in background.older_files(log) if begin == 0 else []:
        if path.exists():
            with _open_log(path) as older_file:
                while _show_lines(older_file):
                    pass
    with contextlib.ExitStack() as stack:
        file: TextIO | None = None
        while True:
            # This is asked before reading, so that a launcher's last lines are shown, too.
            is_alive = launcher_pid(folder) is not None
            if file is None and log.exists():
                file = stack.enter_context(_open_log(log))
                file.buffer.seek(begin)
            if file and _show_lines(file):
                continue
            is_rotated = False  # the log's name now belongs to another file; for a moment to none
            with contextlib.suppress(FileNotFoundError):
                is_rotated = file is not None and not os.path.samestat(
                    os.fstat(file.fileno()), log.stat()
                )
            if is_rotated:
                file, begin = None, 0
            elif not is_alive:
                return
            else:
                time.sleep(LOOK_SECONDS)


def _show_lines(file: TextIO) -> bool:
    """Print the next lines, which were written whole. Returns whether there were any."""
    lines = list(islice(iter(lambda: file.readline(MAX_LINE), ""), LINES_AT_ONCE))
    print(clean("".join(lines)), end="", flush=True)
    return bool(lines)


def _open_log(log: Path) -> TextIO:
    try:
        return open_record(log)
    except OSError as error:
        raise UserError(f"{relative(log)} cannot be shown: {error.strerror}.") from None


def detach(argv: list[str]) -> int:
    """Start the same command without this terminal, and wait until its run has begun, waits, or
    has failed to begin. Returns the exit code."""
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
        start_new_session=True,  # so that closing this terminal sends it no signal
    )
    try:
        for line in child.stdout or ():
            results = read_results(line)
            if not results:
                print(line, end="", flush=True)
            if "waits" in results:  # for AT=, QUEUE=1 or owners; the run has no name yet
                text = f"detached as process {child.pid}: `kill {child.pid}` cancels it"
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
    except KeyboardInterrupt:  # the child has no terminal that would send it the signal
        child.send_signal(signal.SIGINT)
        child.wait()
        raise
