"""An attempt whose guards do what a few lines of Python say."""

import io
import sys

from launcher.machines.local import LocalProcess
from launcher.terminal import Stopper, Terminal
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch
from tests.unit.launcher.launcher_values import build, facts, host

GUARD = """
import json, sys, time
def say(**frame):
    sys.stdout.write(json.dumps(frame) + "\\n")
    sys.stdout.flush()
task = json.loads(sys.stdin.readline())
say(type="hello", protocol=2, way="service")
def end(reason):
    say(type="exit", reason=reason, message=None, exit_code=0, signal=None, mono_start=0.0,
        mono_end=1.0, workers={}, ended=[], left=[])
"""
# A guard that ends its part when it is told to.
OBEYS = "\nfor line in sys.stdin:\n    if '\"kill\"' in line: end('killed'); break\n"


def watch(tmp_path, scripts, terminal=None):
    """An attempt of guards that run these scripts. Returns its outcome and what was said."""
    said = io.StringIO()
    nodes = range(1, len(scripts) + 1)
    hosts = [host(n, connection="local", address="127.0.0.1") for n in nodes]
    plan = build(hosts, [facts(n) for n in nodes])
    processes = {
        f"node{n}": LocalProcess([sys.executable, "-c", GUARD + script])
        for n, script in zip(nodes, scripts)
    }
    logs = RunLogs(tmp_path, terminal or Terminal(said), len(scripts))
    try:
        return Watch(plan, processes, logs, Stopper()).run(), said.getvalue()
    finally:
        logs.close()
        for process in processes.values():
            process.close()
