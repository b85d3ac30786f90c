"""How a guard ends a run: stopped, killed, silent too long, its connection gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.launcher.guard_client import ROOT, environment, kill, wait_until_gone, workers

SAVES = (
    "import signal, sys, time\n"
    "def save(*_): print('saved'); sys.exit(75)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "print('ready\\n', end='')\n"
    "time.sleep(600)\n"
)
DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready\\n', end='')\n"
    "time.sleep(600)\n"
)
# The child's first thread ends and the other goes on, which /proc shows as a zombie.
HEADLESS = (
    "import os, signal, threading, time\n"
    "from ctypes import CDLL\n"
    "pid = os.fork()\n"
    "if pid == 0:\n"
    "    os.setsid()\n"
    "    threading.Thread(target=time.sleep, args=[600]).start()\n"
    "    CDLL(None).syscall({'x86_64': 60}.get(os.uname().machine, 93), 0)\n"
    "while ') Z ' not in open('/proc/%d/stat' % pid).read():\n"
    "    time.sleep(0.01)\n"
    "print('headless', pid)\n"
    "time.sleep(600)\n"
)
# A child that ends with its parent, before anything else is done.
FAMILY = """
import os, subprocess, sys, time
from launcher.node import processes
PARENT = (
    "import os, signal, subprocess, sys\\n"
    "from launcher.node.processes import die_with_parent\\n"
    "orders = lambda me=os.getpid(): die_with_parent(signal.SIGKILL, me)\\n"
    "subprocess.Popen([sys.executable, '-c', sys.argv[1]], preexec_fn=orders).wait()\\n"
)
processes.become_subreaper()
argv = [sys.executable, "-c", PARENT, "import time; print('ready', flush=True); time.sleep(600)"]
parent = subprocess.Popen(argv, stdout=subprocess.PIPE)
parent.stdout.readline()
(child,) = set(processes.descendants(os.getpid())) - {parent.pid}
end = os.kill
def kill(pid, number):
    end(pid, number)
    while pid == parent.pid and processes.stat_of(child).alive:
        time.sleep(0.001)
os.kill = kill
print(processes.end_descendants()[0][child])
"""


def test_what_ends_with_its_parent_is_reported_by_its_own_command():
    done = subprocess.run([sys.executable, "-c", FAMILY], cwd=ROOT, capture_output=True, text=True)
    assert "print('ready', flush=True)" in done.stdout and "orders" not in done.stdout, done


def test_stop_ends_those_who_do_not_leave(guards, tmp_path, mark):
    guard = guards()
    guard.start(tmp_path, workers(DEAF), env=environment(mark))
    guard.wait_for_output(b"ready")
    guard.send(type="stop", grace=0.3)
    end = guard.wait_for("exit")
    assert (end["reason"], end["left"]) == ("stopped", [])
    assert any("time.sleep(600)" in process["command"] for process in end["ended"])
    assert wait_until_gone(mark, 0) == []


def test_a_process_whose_first_thread_has_ended_is_ended_too(guards, tmp_path, mark):
    guard = guards()
    guard.start(tmp_path, workers(HEADLESS), env=environment(mark))
    guard.wait_for_output(b"headless ")
    guard.wait_for_output(b"\n")
    pid = int(guard.output[0, "stdout"].split()[1])
    guard.send(type="kill")
    end = guard.wait_for("exit")
    try:
        assert pid in [process["pid"] for process in end["ended"]]
        assert not Path(f"/proc/{pid}").exists()
    finally:
        kill(pid)


def test_a_guard_that_the_system_ends_lets_the_workers_save(guards, tmp_path):
    guard = guards()
    guard.start(tmp_path, workers(SAVES))
    guard.wait_for_output(b"ready")
    guard.process.send_signal(signal.SIGTERM)
    end = guard.wait_for("exit")
    assert (end["reason"], end["workers"]["0"]["exit_code"]) == ("guard", 75)
    assert not any(f["first"] for f in guard.frames if f["type"] == "worker_exit")
    assert guard.output[0, "stdout"] == b"ready\nsaved\n"


@pytest.mark.parametrize("reason", ["killed", "eof", "lease"])
def test_without_its_control_side_everything_ends_at_once(guards, tmp_path, mark, reason):
    guard = guards()
    lease = 1.0 if reason == "lease" else 60.0
    guard.start(tmp_path, workers(DEAF), env=environment(mark), lease=lease)
    guard.wait_for_output(b"ready")
    if reason == "killed":
        guard.send(type="kill")
    elif reason == "eof":
        guard.process.stdin.close()
    assert guard.wait_for("exit", renew=False)["reason"] == reason
    assert wait_until_gone(mark, 0) == []


def test_a_guard_that_slept_does_not_believe_renewals_that_waited(guards, tmp_path, mark):
    guard = guards()
    guard.start(tmp_path, workers(DEAF), env=environment(mark), lease=1.0)
    guard.wait_for_output(b"ready")
    pid = guard.wait_for("hello")["pid"]
    os.kill(pid, signal.SIGSTOP)
    for _ in range(4):
        guard.send(type="lease")
        time.sleep(0.35)
    os.kill(pid, signal.SIGCONT)
    assert guard.wait_for("exit")["reason"] == "lease"  # though it is renewed from here on
    assert wait_until_gone(mark, 0) == []
