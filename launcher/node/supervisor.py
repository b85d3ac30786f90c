"""Runs between launch and one worker: the supervisor gives the worker the pipes of its rank, and
reports the worker's end to the guard.

torch.distributed.run starts the supervisor instead of Python (PYTHON_EXEC), with Python's
arguments. Without a supervisor, launch would return 1 for any error of a worker and mix the output
of all workers. If launch were killed, its workers would continue.
"""

import contextlib
import json
import os
import pathlib
import resource
import signal
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent))

from launcher.node.processes import decode_status, die_with_parent
from launcher.node.stacks import let_rank_answer

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def open_pipe(guard, number):
    """Open the writing end of the guard's pipe `number`. Raises OSError."""
    # A pipe of another process can be opened in /proc, so it needs no name on a disk.
    return os.open("/proc/{}/fd/{}".format(guard, number), os.O_WRONLY)


def report(control, **fields):
    """Send one line to the guard."""
    # A line is shorter than PIPE_BUF, so the lines of several supervisors do not mix. If the guard
    # is gone, launch ends, and then this process.
    try:
        os.write(control, json.dumps(fields).encode() + b"\n")
    except OSError:
        return


def insert_local_rank(arguments, option, local_rank):
    """Return Python's arguments with `option=local_rank` as the first argument of the script, as
    torch.distributed.launch inserts it. Returns the same arguments if there is no `option`."""
    # The supervisor does this, because versions of launch spell the option differently.
    if not option:
        return arguments
    # `-u train.py ...` or `-u -m package.train ...`
    flag = arguments.index("-m") if "-m" in arguments[:2] else arguments.index("-u")
    place = flag + 2
    return [*arguments[:place], "{}={}".format(option, local_rank), *arguments[place:]]


def start_worker(argv):
    """Fork the worker and forward signals to it. Returns its pid."""
    supervisor = os.getpid()
    # A signal waits until the handlers are set.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, supervisor)
        # Launch may signal the supervisor's group. The worker must get a signal only once.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            os.execvp(argv[0], argv)  # noqa: S606 (the very process)
        except OSError as error:
            os.write(2, "{}: {}\n".format(argv[0], error.strerror).encode())
            os._exit(127)

    def forward(received, _frame):
        # The worker may have ended already: its exit must still be reported.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, received)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return pid


def main():
    """Start one worker with the pipes of its rank, hold it until it ends, and end alike. The form
    of TANDEM_GUARD_PIPES is that of Workers.address."""
    die_with_parent(signal.SIGKILL, os.getppid())
    guard, control_fd, *streams = os.environ.pop("TANDEM_GUARD_PIPES").split(":")
    local_rank = int(os.environ["LOCAL_RANK"])
    python = os.environ.pop("TANDEM_WORKER_PYTHON")
    option = os.environ.pop("TANDEM_LOCAL_RANK", None)
    port = os.environ.pop("TANDEM_RANK_PORT", None)
    if port:
        # Rank 0 opens a store at this port. Told to use launch's store, rank 0 would wait for it.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = port
    # The script may start other Pythons, which must not become workers.
    for name in ("PYTHON_EXEC", "TANDEM_GUARD_PYTHON"):
        del os.environ[name]
    let_rank_answer(os.environ, os.environ.pop("TANDEM_STACKS_FOLDER"), os.environ["RANK"])
    *pipes, counters = streams[local_rank].split(",")
    if counters != "-1":
        os.environ["TANDEM_SUMS"] = "/proc/{}/fd/{}".format(guard, counters)
    for target, number in zip((1, 2), pipes):
        os.dup2(open_pipe(guard, number), target)
    control = open_pipe(guard, control_fd)
    pid = start_worker([python, *insert_local_rank(sys.argv[1:], option, local_rank)])
    report(control, event="start", local_rank=local_rank, pid=pid)
    _, status, usage = os.wait4(pid, 0)
    peak = usage.ru_maxrss << 10  # bytes
    report(control, event="exit", local_rank=local_rank, status=status, peak=peak)
    # End with the worker's exit code or signal, so that launch sees the same.
    code, _ = decode_status(status)
    if code is not None:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a second core dump would be of no use
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # reached if the signal ends no process by default


if __name__ == "__main__":
    main()
