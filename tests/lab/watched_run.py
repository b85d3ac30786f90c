"""An attempt on machines of a lab without torch: the launcher's own watch over real guards.

Runs on the control machine: watched_run.py NODES MARK. Prints what the ranks print, then JSON:
how it ended.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from contract.options import Config
from launcher.machines import engine
from launcher.machines.engine import Host
from launcher.plan.plan import NodePlan, Plan
from launcher.terminal import Stopper, Terminal
from launcher.watch.failures import explained
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch

WORKER = """
import os, signal, sys, time
def save(*_):
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
os.write(1, b"ready\\n")
time.sleep(600)
"""


def machine(number):
    address = f"192.168.56.{110 + number}"
    return Host(f"node{number}", "ssh", address, 22, "tandem", "python3", "tandem", "/data")


def part(host, rank, mark):
    name, _, value = mark.partition("=")
    argv = ("/usr/bin/python3", "tandem/code/guard_launch.py", "1", WORKER)
    return NodePlan(
        host=host.name,
        node_rank=rank,
        ranks=(rank,),
        connection="ssh",
        address=host.address,
        port=22,
        user=host.user,
        interface=None,
        argv=argv,
        env={name: value},
        cwd=".",
        output=f"runs/{value}",
        data="",
        versions={},
    )


def plan_of(parts):
    texts = dict.fromkeys(("tandem", "model", "data", "sync", "precision", "code_sha256"), "")
    return Plan(
        run="watched",
        attempt=1,
        created_unix=time.time(),
        epochs=1,
        world_size=len(parts),
        master_addr=parts[0].address,
        master_port=29500,
        git_revision=None,
        git_diff="",
        options=Config(),
        nodes=tuple(parts),
        **texts,
    )


def main(count, mark):
    hosts = [machine(number) for number in range(1, count + 1)]
    plan = plan_of([part(host, rank, mark) for rank, host in enumerate(hosts)])
    nodes, failures = engine.open_all(hosts)
    assert not failures, failures
    argv = ["/usr/bin/python3", "-IB", "tandem/code/launcher/node", "watched-1"]
    with tempfile.TemporaryDirectory() as folder, Stopper().listening() as stopper:
        logs = RunLogs(Path(folder), Terminal(), count)
        processes = {host.name: nodes[host.name].start(argv) for host in hosts}
        outcome = Watch(plan, processes, logs, stopper).run()
        logs.close()
    cause = outcome.cause and {
        "host": outcome.cause.host,
        "kind": outcome.cause.source,
        "rank": outcome.cause.rank,
        "signal": outcome.cause.signal,
        "said": explained(outcome.cause)[0],
    }
    left = [process for frame in outcome.exits.values() for process in frame["left"]]
    told = {"status": outcome.status, "cause": cause, "gone": outcome.gone, "left": left}
    # When nothing lived any more, by the clock that all machines of a lab have.
    told["over"] = max(frame["mono_end"] for frame in outcome.exits.values())
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
