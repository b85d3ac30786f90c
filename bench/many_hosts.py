"""Connect to many hosts, start a stand-in for the guard on each, and idle.

Runs on a lab's control machine: many_hosts.py HOSTS FIRST_ADDRESS USER. Prints JSON: seconds to
connect and to start, and CPU in percent of a core while idle.
"""

import ipaddress
import json
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from contract.options import Config
from launcher.machines import engine
from launcher.machines.engine import Host
from launcher.plan.plan import NodePlan, Plan
from launcher.program import Program
from launcher.terminal import Stopper, Terminal
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch

SECONDS = 20
# Answers each renewal with a heartbeat, as often as the real guard sends one; $0: how many.
HELLO = {"type": "hello", "protocol": 2, "way": "service"}
BEAT = {"type": "beat", "unix": 0.5, "running": []}
EXIT = {
    **{"type": "exit", "reason": "finished", "message": None, "exit_code": 0, "signal": None},
    **{"mono_start": 0.5, "mono_end": 1.5, "workers": {}, "ended": [], "left": []},
}
GUARD = (
    f"echo '{json.dumps(HELLO)}'; n=0; "
    f"while [ $n -lt $0 ]; do read -r line; n=$((n+1)); echo '{json.dumps(BEAT)}'; done; "
    f"echo '{json.dumps(EXIT)}'"
)


def host(index, first, user):
    address = str(ipaddress.ip_address(first) + index)
    return Host(f"node{index + 1}", "ssh", address, 22, user, "python3", "tandem", "/data")


def node_plan(host, rank):
    place = {"connection": "ssh", "address": host.address, "port": 22, "user": host.user}
    parts = {
        "argv": ("true",),
        "env": {},
        "code": ".",
        "cwd": ".",
        "output": "run",
        "data": "",
        "versions": {},
    }
    return NodePlan(host=host.name, node_rank=rank, ranks=(rank,), interface=None, **place, **parts)


def plan(hosts):
    texts = dict.fromkeys(("tandem", "data", "code_sha256"), "")
    return Plan(
        run="bench",
        attempt=1,
        created_unix=0.0,
        world_size=len(hosts),
        master_addr=hosts[0].address,
        master_port=29500,
        git_revision=None,
        git_diff="",
        options=Config(),
        program=Program(name="bench", typed="bench", words=()),
        nodes=tuple(node_plan(host, rank) for rank, host in enumerate(hosts)),
        **texts,
    )


def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def watched(hosts, started, folder):
    """The outcome, and the control side's CPU in percent of a core."""
    with (folder / "terminal").open("w") as out:
        logs = RunLogs(folder, Terminal(out), len(hosts))
        before, now = cpu(), time.monotonic()
        processes = {host.name: process for host, process in zip(hosts, started)}
        outcome = Watch(plan(hosts), processes, logs, Stopper()).run()
        idle = 100 * (cpu() - before) / (time.monotonic() - now)
        logs.close()
    return outcome, idle


def main(count, first, user):
    hosts = [host(index, first, user) for index in range(count)]
    begin = time.monotonic()
    nodes, failures = engine.open_all(hosts)
    assert not failures, next(iter(failures.values()))
    connected = time.monotonic()
    with ThreadPoolExecutor(max_workers=64) as pool:
        guard = ["sh", "-c", GUARD, str(SECONDS)]
        started = list(pool.map(lambda host: nodes[host.name].start(guard), hosts))
    running = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome, idle = watched(hosts, started, Path(folder))
    engine.close_all(nodes)
    assert outcome.status == "finished", outcome
    print(json.dumps({"connect": connected - begin, "start": running - connected, "idle": idle}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
