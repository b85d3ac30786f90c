"""Two processes above the guard that only wait, where no systemd service can clean up after it.

Each of the three is a subreaper: whichever survives inherits what the others left behind.
"""

import os
import signal

from launcher.node.processes import (
    become_subreaper,
    decode_status,
    die_with_parent,
    end_descendants,
    reap,
)

NUMBER = 2
WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)  # USR1: the process above has ended
ORDERLY = 5  # seconds the guard gets to end the run itself


def guarded(run):
    """Call `run` in a grandchild. Returns the exit code, in each of the three processes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's; the control side decides
        signal.signal(number, signal.SIG_IGN)
    for _ in range(NUMBER):
        become_subreaper()
        parent = os.getpid()
        child = os.fork()
        if child:
            return wait_for(child)
        die_with_parent(signal.SIGUSR1, parent)
        os.setsid()  # whoever ends the control side's process group must not reach these
    return run()


def wait_for(child):
    """Wait until the child ends or an end is ordered; then end all descendants."""
    code = 1
    while True:
        signals = signal.sigwaitinfo(WATCHED).si_signo
        if signals == signal.SIGCHLD:
            statuses = reap()
            if child in statuses:
                code = decode_status(statuses[child])[0]
                break
        elif signals == signal.SIGTERM:
            os.kill(child, signal.SIGTERM)
        else:
            os.kill(child, signal.SIGUSR1)
            signal.sigtimedwait([signal.SIGCHLD], ORDERLY)
            break
    end_descendants()
    return 1 if code is None else code
