"""Runs between launch and one worker: gives it its rank's pipes and reports its end to the guard.

torch.distributed.run starts it in place of Python (PYTHON_EXEC) with Python's arguments. It is
needed because launch returns 1 for any error of its workers, mixes the output of all workers, and
leaves them running when it is killed.
"""

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
    # By way of /proc: the pipe needs no name on a disk.
    return os.open("/proc/{}/fd/{}".format(guard, number), os.O_WRONLY)


def report(control, **fields):
    """Send one line to the guard."""
    # Below PIPE_BUF, so that lines cannot interleave. If the guard is gone, launch's death ends
    # this process.
    try:
        os.write(control, json.dumps(fields).encode() + b"\n")
    except OSError:
        return


def insert_local_rank(arguments, option, local_rank):
    """Return Python's arguments with `option=local_rank` as the script's first one, as
    torch.distributed.launch would put it; unchanged if the script wants no such option."""
    # Done here because versions of launch spell the option differently.
    if not option:
        return arguments
    flag = arguments.index("-m") if "-m" in arguments[:2] else arguments.index("-u")
    place = flag + 2
    return [*arguments[:place], "{}={}".format(option, local_rank), *arguments[place:]]


def start_worker(argv):
    """Fork the worker and forward signals to it. Returns its pid."""
    supervisor = os.getpid()
    # A signal that comes before the handlers are set waits until then.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL, supervisor)
        os.setsid()  # launch may signal the supervisor's group; the supervisor passes it on, once
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            os.execvp(argv[0], argv)  # noqa: S606 (the very process)
        except OSError as error:
            os.write(2, "{}: {}\n".format(argv[0], error.strerror).encode())
            os._exit(127)
    for number in FORWARDED:
        signal.signal(number, lambda received, _frame: os.kill(pid, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return pid


def end_like(status):
    """End with the worker's exit code or signal, so that launch sees the same."""
    code = decode_status(status)[0]
    if code is not None:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped already, if at all
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # a signal that by default does not end a process


def main():
    """Hold one worker until it ends."""
    die_with_parent(signal.SIGKILL, os.getppid())
    guard, control_fd, *streams = os.environ.pop("TANDEM_GUARD_PIPES").split(":")
    local_rank = int(os.environ["LOCAL_RANK"])
    python = os.environ.pop("TANDEM_WORKER_PYTHON")
    option = os.environ.pop("TANDEM_LOCAL_RANK", None)
    port = os.environ.pop("TANDEM_RANK_PORT", None)
    if port:
        # Rank 0 has to open a store at this port. With launch's store all ranks would wait for it.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = port
    # The script may start Pythons, which are no workers.
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
    end_like(status)


if __name__ == "__main__":
    main()
