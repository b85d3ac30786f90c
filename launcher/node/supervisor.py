"""Stands between launch and one worker: gives it its rank's pipes and reports its end to the guard.

torch.distributed.run starts it in place of Python (PYTHON_EXEC) with Python's arguments. It is
needed because launch returns 1 whatever its workers returned, mixes the output of all workers, and
leaves them training on when it is killed.
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
    """Another end of a pipe that the guard holds, by way of /proc: it needs no name on a disk."""
    return os.open("/proc/{}/fd/{}".format(guard, number), os.O_WRONLY)


def report(control, **fields):
    """One line to the guard, below PIPE_BUF, so that lines cannot interleave. If the guard is gone,
    launch's death will end this process."""
    try:
        os.write(control, json.dumps(fields).encode() + b"\n")
    except OSError:
        return


def arguments(given, option, local_rank):
    """Python's arguments, with the option by which a script of the user's wants its local rank
    where torch.distributed.launch would put it: newer ones spell it in another way."""
    if not option:
        return given
    place = given.index("-m") + 2 if "-m" in given[:2] else given.index("-u") + 2
    return [*given[:place], "{}={}".format(option, local_rank), *given[place:]]


def start_worker(argv):
    """Fork the worker; signals are blocked until their handlers are set. Returns the worker's
    pid."""
    supervisor = os.getpid()
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
    """End as the worker ended, so that launch sees the same."""
    code = decode_status(status)[0]
    if code is not None:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped already, if at all
    number = os.WTERMSIG(status)
    signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
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
        # With launch's store a script that names a port of its own waits there for nobody.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        os.environ["MASTER_PORT"] = port
    for name in ("PYTHON_EXEC", "TANDEM_GUARD_PYTHON"):
        del os.environ[name]
    let_rank_answer(os.environ, os.environ.pop("TANDEM_STACKS_FOLDER"), os.environ["RANK"])
    for target, number in zip((1, 2), streams[local_rank].split(",")):
        os.dup2(open_pipe(guard, number), target)
    control = open_pipe(guard, control_fd)
    pid = start_worker([python, *arguments(sys.argv[1:], option, local_rank)])
    report(control, event="start", local_rank=local_rank, pid=pid)
    _, status, used = os.wait4(pid, 0)
    peak = used.ru_maxrss << 10
    report(control, event="exit", local_rank=local_rank, status=status, peak=peak)
    end_like(status)


if __name__ == "__main__":
    main()
