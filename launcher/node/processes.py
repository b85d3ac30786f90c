"""Finds and ends the descendants of a process, and lets the kernel keep the descent complete."""

import collections
import contextlib
import ctypes
import os
import pathlib
import signal
import subprocess
import time

# Loaded before any fork, because a forked child should not load libraries.
LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PROC = pathlib.Path("/proc")
TICK = 1.0 / os.sysconf("SC_CLK_TCK")  # seconds; the unit of times in /proc


def prctl(option, value):
    """Call prctl(2) with one argument. Raises OSError."""
    if LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper():
    """Make this process the new parent of descendants whose parent ends. Raises OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(number, parent):
    """Let the kernel send the signal `number` when the parent (a pid) ends. Raises OSError."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


# `parent`: its pid; `state`: a letter, as in ps; `alive`: whether a thread lives; `start`: the tick
# at which the process began, as text; `seconds`: of processors, which the process used.
Stat = collections.namedtuple("Stat", "parent state alive start seconds")


def stat_of(pid):
    """Return the Stat of a process, or None if the process is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # `4711 (python) S 4700 ...`. The command in brackets may contain anything, so the fields begin
    # after the last bracket: state, parent, ..., user and system time (11, 12), ..., number of
    # threads (17), ..., start (19). See proc(5).
    fields = text[text.rindex(")") + 2 :].split()
    # A process whose first thread has ended has that thread's state, Z, while other threads live.
    # A thread that hangs in the kernel, in a call to a GPU or a share, still holds resources.
    alive = fields[0] not in "ZX" or int(fields[17]) > 1
    seconds = (int(fields[11]) + int(fields[12])) * TICK
    return Stat(int(fields[1]), fields[0], alive, fields[19], seconds)


def start_of(pid):
    """Return the tick of a process's start, which distinguishes the process from a later one with
    the same pid; None if the process is gone."""
    stat = stat_of(pid)
    return stat and stat.start


def command_of(pid):
    """Return the command line of a process for people, cut to 200 characters."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
        text = " ".join(word.decode(errors="replace") for word in words if word)
        # A thread of the kernel, or a zombie, has no command line.
        return (text or (PROC / str(pid) / "comm").read_text().strip())[:200]
    except OSError:
        return "(ended)"


def descendants(ancestor):
    """Return the pids of all living descendants of a pid."""
    # Dead processes have no children, because the kernel gives their children to another parent.
    children = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            stat = stat_of(entry.name)
            if stat is not None and stat.alive:
                children.setdefault(stat.parent, []).append(int(entry.name))
    pids, queue = [], [ancestor]
    while queue:
        child_pids = children.get(queue.pop(), [])
        pids += child_pids
        queue += child_pids
    return pids


class LineProcess:
    """Runs a command that prints lines, for as long as this process lives. No call waits for a
    line, because the command may hang."""

    def __init__(self, argv):
        parent = os.getpid()
        self.partial, self.has_ended = b"", False
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL, parent),
        )
        os.set_blocking(self.process.stdout.fileno(), False)

    def lines(self):
        """Return the complete lines since the last call."""
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        self.has_ended = not data
        *lines, self.partial = (self.partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def stop(self):
        """Kill the command, and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def reap():
    """Collect ended children. Returns {pid: wait status}."""
    statuses = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there are no children
            return statuses
        if pid == 0:  # all children live
            return statuses
        statuses[pid] = status


def end_descendants(spare=(), seconds=10.0):
    """Kill every descendant, except the pids in `spare`, until a search finds none or the time is
    over. The caller must be a subreaper.

    Returns (commands, hanging, statuses): {pid: command} of all processes that were killed, the
    pids that hang in the kernel, and {pid: wait status}.
    """
    commands, statuses, ancestor = {}, {}, os.getpid()
    deadline = time.monotonic() + seconds
    # Several searches are needed, because a process may fork meanwhile.
    while True:
        alive = [pid for pid in descendants(ancestor) if pid not in spare]
        # All commands are read before any process is killed: a child may end with its parent
        # (die_with_parent), and then has no command line any more.
        commands.update({pid: command_of(pid) for pid in alive if pid not in commands})
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        statuses.update(reap())
        if not alive or time.monotonic() > deadline:
            return commands, alive, statuses
        time.sleep(0.01)


def decode_status(status):
    """Return a wait status as (exit code, None) or (None, signal name)."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return None, signal.Signals(number).name
        except ValueError:  # a real-time signal has no name
            return None, "signal {}".format(number)
    return os.WEXITSTATUS(status), None
