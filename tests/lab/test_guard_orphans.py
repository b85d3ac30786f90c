"""Guards over real ssh: whatever is killed, frozen or unplugged, nothing stays alive on the node.

The nodes' processes are this machine's, too, so the tests see them when a node cannot be reached.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher.plan.code import FOLDERS
from tests.unit.launcher.guard_client import DEAF_WORKER, Client, alive, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "192.168.56.111"
LAUNCH = "tandem/code/guard_launch.py"
PLAIN = "plain"  # a user who may have no service: no sudo, no manager of one's own


def copy_code(lab, user):
    """The guard and the stand-in for launch, where the launcher puts the code."""
    files = [*FOLDERS, "tests/unit/launcher/guard_launch.py"]
    tar = subprocess.Popen(
        [
            "tar",
            "-cf",
            "-",
            "--exclude=__pycache__",
            "--transform=s,tests/unit/launcher/,,",
            *files,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    unpack = "mkdir -p tandem/code && tar -xf - -C tandem/code"
    lab.control("ssh", f"{user}@{ADDRESS}", unpack, stdin=tar.stdout)
    assert tar.wait() == 0


@pytest.fixture(scope="module")
def machine(start_lab):
    """A machine with the guard's code, for the ordinary run user and for one without services."""
    lab = start_lab("guard", "--nodes", "1", "--no-bundle")
    lab.ssh(
        1,
        f"sudo useradd -m -s /bin/bash {PLAIN} && sudo install -d -m 700 -o {PLAIN} -g {PLAIN}"
        f" /home/{PLAIN}/.ssh && sudo install -m 600 -o {PLAIN} -g {PLAIN}"
        f" ~/.ssh/authorized_keys /home/{PLAIN}/.ssh/ &&"
        f" sudo systemctl mask --quiet user@$(id -u {PLAIN}).service",
    )
    for user in ("tandem", PLAIN):
        copy_code(lab, user)
    return lab


WAYS = {
    "own manager": ("tandem", "", "service"),
    "system manager": ("tandem", "XDG_RUNTIME_DIR=/nowhere ", "service"),
    "wardens": (PLAIN, "", "wardens"),
}


class Run:
    """A guard on node 1 that runs a worker with a child."""

    def __init__(self, lab, way, mark):
        user, before, kind = WAYS[way]
        line = f"exec env {before}/usr/bin/python3 -IB tandem/code/launcher/node test-1"
        self.client = Client(lab.argv("exec", "--", "ssh", f"{user}@{ADDRESS}", line))
        self.lab, self.user, self.mark = lab, user, mark
        name, _, value = mark.partition("=")
        self.client.start(
            f"runs/{value}",
            ["/usr/bin/python3", LAUNCH, "1", DEAF_WORKER],
            env={name: value, "DEAF": "1"},
            record=True,
        )
        hello = self.client.wait_for("hello")
        assert hello["way"] == kind, hello
        self.client.wait_for_output(b"child")
        self.pids = {
            "guard": hello["pid"],
            "launch": self.client.wait_for("started")["pid"],
            "worker": self.client.wait_for("worker")["pid"],
            "child": int(self.client.output[0, "stdout"].split()[1]),
        }
        assert len(alive(mark)) == 4  # launch, supervisor, worker, child

    def kill(self, name):
        self.lab.ssh(1, f"sudo kill -9 {self.pids[name]}")

    def renew_for(self, seconds):
        """Acts as a live control side for some time."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and not self.client.ended:
            self.client.send(type="lease")
            self.client.pump(0.5)

    def guards_left(self):
        """Which processes of the guard itself, its wardens and recorders still live on the node."""
        return self.lab.ssh(
            1, f"ps -u {self.user} -o args= | grep -E 'launcher/[n]ode|[i]ostat' || true"
        )


@pytest.fixture
def mark():
    value = f"TANDEM_TEST_MARK={os.urandom(16).hex()}"
    yield value
    for pid in alive(value):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(machine, mark):
    runs = []

    def begin(way="own manager"):
        runs.append(Run(machine, way, mark))
        return runs[-1]

    yield begin
    machine("mend", "1")
    for run in runs:
        run.client.process.kill()
        run.client.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("victim", ["guard", "launch", "worker"])
def test_a_process_is_killed(start, way, victim):
    run = start(way)
    run.kill(victim)
    assert wait_until_gone(run.mark, 10) == []
    if victim != "guard":
        assert run.client.wait_for("exit")["reason"] == "failed"
    run.client.process.wait(10)
    assert run.guards_left() == ""


@pytest.mark.parametrize("way", WAYS)
def test_the_control_side_is_killed(start, way):
    run = start(way)
    run.client.process.kill()
    assert wait_until_gone(run.mark, 10) == []


def test_a_frozen_machine_thaws(start, machine):
    run = start("wardens")
    machine("freeze", "1")
    run.renew_for(20)  # renewals wait in the frozen machine
    assert len(alive(run.mark)) == 4
    machine("mend", "1")
    assert wait_until_gone(run.mark, 5) == []
    assert run.client.wait_for("exit", renew=False)["reason"] == "lease"


def test_the_machine_is_shut_down(start, machine):
    """A worker that does not exit must not make systemd wait for 90 s."""
    run = start()
    run.lab.ssh(1, "systemctl --user stop 'tandem-*'")
    assert wait_until_gone(run.mark, 10) == []
