"""Runs of several people and without a terminal: refused, queued, detached, shown, ended.

The trainer is a stand-in; machines and ssh are real.
"""

import os
import re
import shlex
import signal
import subprocess
import time
import uuid

import pytest

from tests.lab import chaos_standin
from tests.lab.chaos_run import CHECKOUT, PATIENCE, ended

NODES = 2
LAUNCHER = ("python", "-m", "launcher")


def names():
    return {path.name for path in (CHECKOUT / "runs").glob("*Z-*")}


def control(lab, *words, check=True):
    return lab.control(*LAUNCHER, *words, check=check)


@pytest.mark.long
def test_a_second_run_is_refused_by_name_or_waits(machines, start):
    first = start(100)
    first.wait_for(r"\] step 3\n", NODES)
    before = names()
    second = start(1)
    assert second.end() == 2
    for node in range(1, NODES + 1):
        held = rf"in use by root@\S+: run {first.name}, for .*: "
        told = rf"node{node} \(192.168.56.11{node}\).*: {held}"
        assert re.search(told, second.said()), second.said()
    assert "QUEUE=1" in second.said() and "FORCE=1" in second.said()
    assert names() == before and len(first.guards()) > 0
    third = start(1, "--queue")
    third.wait_for("tandem: waiting: node1")
    assert first.process.poll() is None
    done = control(machines, "stop", first.name)
    assert (done.returncode, first.end()) == (0, 75)
    for node in range(1, NODES + 1):
        assert f"tandem: node{node}: all processes of the run have ended" in done.stdout
    assert third.end() == 0, third.said()
    assert third.name != first.name


HOLD = """
import socket
mark = socket.socket(socket.AF_UNIX)
mark.bind("\\0tandem-alone")
mark.listen()
print("held", flush=True)
input()
"""


@pytest.mark.long
def test_of_two_that_looked_in_the_same_second_one_begins(machines, start):
    """The race of two launchers: the machine was free when it was checked, and is taken now."""
    argv = machines.argv("ssh", "2", "--", f"python3 -c {shlex.quote(HOLD)}")
    with subprocess.Popen(
        argv, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "held\n"
        refused = start(1)
        assert refused.end() == 2
        assert "tandem: node2: in use by process " in refused.said()
        assert "Traceback" not in refused.said() and refused.processes() == []
        waits = start(1, "--queue")
        waits.wait_for("tandem: waiting: node2: in use by process ")
        first.communicate("\n")
    assert waits.end() == 0, waits.said()


def test_a_detached_run_is_shown_without_losing_a_line(machines, tmp_path):
    lab, mark = machines, f"TANDEM_TEST_MARK={uuid.uuid4().hex}"
    file = chaos_standin.inventory(tmp_path, NODES, mark, step_seconds=0.1)
    words = ("--inventory", str(file), "--data", "d", "--epochs", "10")
    said = control(lab, "train", "--detach", *words).stdout
    name = re.search(r"^tandem: run (\S+), attempt 1", said, re.M).group(1)
    assert said.endswith(f"`make attach RUN={name}` shows it, `make stop RUN={name}` ends it\n")
    folder = CHECKOUT / "runs" / name
    assert f"run {name}: running, controlled by process " in control(lab, "status", name).stdout
    assert re.search(rf"^{name} +running +2 ", control(lab, "runs").stdout, re.M)
    early = attach(lab, name)
    impatient = attach(lab, name)
    assert impatient.stdout.readline()  # it shows something: now Ctrl-C
    impatient.send_signal(signal.SIGINT)
    assert f"run {name} continues" in impatient.communicate(timeout=PATIENCE)[0]
    assert f"run {name}: running" in control(lab, "status", name).stdout
    seen = early.communicate(timeout=PATIENCE)[0]
    late = control(lab, "attach", name).stdout
    assert seen == late == (folder / "controller.log").read_text()
    for rank in range(NODES):
        kept = (folder / f"nodes/node{rank + 1}/rank{rank}.log").read_text().splitlines()
        shown = [line for line in seen.splitlines() if line.startswith(f"[node{rank + 1} {rank}] ")]
        assert shown == [f"[node{rank + 1} {rank}] {line}" for line in kept]
        assert [line for line in kept if line.startswith("step")] == [
            f"step {number}" for number in range(1, len(kept))
        ]
    assert f"run {name}: finished" in control(lab, "status", name).stdout
    refused = control(lab, "stop", name, check=False)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"tandem: run {name} is not running; its state is `finished`.\n",
    )


def attach(lab, name):
    """`make attach`, from a terminal of its own: Ctrl-C counts there even if it does not here."""
    return subprocess.Popen(
        lab.argv("exec", "--", *LAUNCHER, "attach", name),
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_a_window_that_is_closed_ends_a_run_in_order(start):
    run = start(100, terminal=True)
    run.wait_for(r"\] step 3\n", NODES)
    folder = run.folder
    run.hang_up()
    assert run.end() == 75
    kept = (folder / "controller.log").read_text()
    assert kept.count("] saved\n") == NODES and f"make train RESUME={folder.name}" in kept
    assert run.processes() == []


@pytest.mark.long
@pytest.mark.parametrize(("size", "forced"), [(60, True), (600, False)])
def test_a_run_is_refused_where_its_disk_is_full(start, small_disk, size, forced):
    run = start(1, *(["--force"] if forced else []), disk=small_disk(size))
    assert run.end() == 2
    assert re.search(
        r"^tandem: control node: only \d+ MiB are free on the disk of runs/", run.said(), re.M
    )
    assert ("FORCE=1" in run.said()) == (not forced)
    assert ", attempt 1" not in run.said() and list(run.disk.iterdir()) == []


CLOCK = """
import time
real, begin = time.time, time.monotonic()
def jumps():
    seconds = time.monotonic() - begin
    return real() + (86400 if 8 < seconds < 12 else -86400 if seconds >= 12 else 0)
time.time = jumps
"""


@pytest.mark.long
def test_a_clock_that_is_set_ends_nothing(start, tmp_path):
    """A day forwards, then two days back: that of the controller's Python alone, since machines of
    a lab have the clock of this one, which no test may set."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    run = start(25, before=f"export PYTHONPATH={shlex.quote(str(tmp_path))}")
    assert run.end() == 0, run.said()
    (attempt,) = run.attempts()
    assert (attempt["status"], attempt["first_cause"]) == ("finished", None)
    assert attempt["wall_seconds"] < 600


def test_ctrl_c_twice_kills_at_once(start, tmp_path):
    """It also ends workers that cannot react to the first: they wait for a frozen peer."""
    run = start(100)
    run.wait_for(r"\] step 3\n", NODES)
    run.lab("freeze", str(NODES))
    os.kill(run.controller, signal.SIGINT)
    run.wait_for("tandem: stopping")
    again = time.monotonic()
    os.kill(run.controller, signal.SIGINT)
    assert run.end() == 75
    assert ended(run.fetch([1], tmp_path), attempt=1)["node1"] - again < 5
    run.lab("mend", str(NODES))
