"""Guards that are services: by whichever manager, nothing of a run outlives them.

A user's own manager under other faults: test_chaos.py. Where no manager serves the user:
tests/unit/launcher/test_guard_wardens.py, test_users.py.
"""

import os
import signal

from tests.lab.chaos_run import read
from tests.unit.launcher.guard_client import wait_until_gone

NODES = 1
NO_MANAGER = "systemctl mask --now user@$(id -u tandem).service"


def trains(run):
    run.wait_for(r"\] step 3\n")
    return run.pids(1)


def test_the_machine_is_shut_down(start, machines):
    """A worker that does not exit must not make systemd wait for 90 s."""
    run = start(100)
    pids = trains(run)
    assert "/user@" in read(pids["guard"], "cgroup")
    os.kill(pids["worker"], signal.SIGSTOP)
    machines.ssh(1, "systemctl --user stop 'tandem-*'")
    assert wait_until_gone(run.mark, 10) == []


def test_a_guard_of_the_systems_manager_is_killed(start, machines):
    """A user who may use sudo and has no manager of its own."""
    machines.admin(1, f"sudo sh -c '{NO_MANAGER}'")
    run = start(100)
    guard = trains(run)["guard"]
    assert "/system.slice/" in read(guard, "cgroup")
    os.kill(guard, signal.SIGKILL)
    assert wait_until_gone(run.mark, 10) == []
    assert run.end() not in (0, None) and run.processes() == []
