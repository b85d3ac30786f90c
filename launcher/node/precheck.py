"""Runs a program's check (PRECHECK=) on the machine of node 0 before any rank starts, in the folder
and with the environment of a rank."""

import json
import os
import signal
import subprocess
import threading

from launcher.node.machine import PATH, current_user

TAIL_BYTES = 8192  # the end of the check's output, which is sent


def main(mark, task):
    """Run `task`, and print one line of JSON after the mark: the exit code, None if the check did
    not end in time, and its last lines."""
    name, home = current_user()
    env = {"PATH": PATH, "LANG": "C.UTF-8", "HOME": os.environ.get("HOME", home)}
    env.update(task["env"], USER=name, LOGNAME=name)
    process = subprocess.Popen(
        task["argv"],
        cwd=task["cwd"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    timed_out = threading.Event()

    # Kill the whole group, because a process that the check started may hold the pipe open.
    def end_group():
        timed_out.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(task["seconds"], end_group)
    timer.start()
    # Keep only the end of the output: the reason is there, and a check may print without end.
    tail, piece = b"", b"-"
    while piece:
        piece = os.read(process.stdout.fileno(), 1 << 16)
        tail = (tail + piece)[-TAIL_BYTES:]
    code = process.wait()
    timer.cancel()
    lines = [line for line in tail.decode("utf-8", "replace").splitlines() if line.strip()]
    print(mark + json.dumps({"code": None if timed_out.is_set() else code, "lines": lines}))
