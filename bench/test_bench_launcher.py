"""What the control side costs: lines, idling, and the overhead over the same commands by hand."""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.options import Config
from launcher.machines.local import LocalProcess
from launcher.plan.plan import NodePlan, Plan
from launcher.program import Program
from launcher.terminal import Stopper, Terminal
from launcher.watch.lines import RunLogs
from launcher.watch.watch import Watch

CHECKOUT = Path(__file__).resolve().parents[1]
STAND_IN = CHECKOUT / "tests/unit/launcher/guard_launch.py"
NODES = 4
CHATTER = """
import time
begin = time.monotonic()
for number in range({lines}):
    print(f"step {{number:>7}} loss 0.1234 top1 97.5 % 123.4 images/s, data 0.01 s, sync 0.02 s")
    if number % 50 == 0:
        time.sleep(max(0, begin + number / {rate} - time.monotonic()))
print("took", time.monotonic() - begin)
"""


def plan_of(tmp_path, script):
    """Local nodes whose launch is the stand-in with this worker."""
    nodes = tuple(
        NodePlan(
            host=f"node{index + 1}",
            node_rank=index,
            ranks=(index,),
            connection="local",
            address="127.0.0.1",
            port=22,
            user=None,
            interface="lo",
            argv=(sys.executable, str(STAND_IN), "1", script),
            env={},
            code=str(CHECKOUT),
            cwd=str(CHECKOUT),
            output=str(tmp_path / "run"),
            data="",
            versions={},
        )
        for index in range(NODES)
    )
    named = ("tandem", "data", "code_sha256")
    return Plan(
        run="bench",
        attempt=1,
        created_unix=0.0,
        world_size=NODES,
        master_addr="127.0.0.1",
        master_port=29500,
        git_revision=None,
        git_diff="",
        options=Config(force=True),  # another run may have this machine
        program=Program(name="bench", typed="bench", words=()),
        nodes=nodes,
        **dict.fromkeys(named, ""),
    )


def watched(tmp_path, script):
    """Carry out the attempt. Returns its outcome, its wall time, and this process's CPU seconds."""
    plan = plan_of(tmp_path, script)
    argv = [sys.executable, "-IB", str(CHECKOUT / "launcher/node"), "bench"]
    processes = {node.host: LocalProcess(argv) for node in plan.nodes}
    tmp_path.mkdir(exist_ok=True)
    with (tmp_path / "terminal").open("w") as out:
        logs = RunLogs(tmp_path / "run", Terminal(out), NODES)
        begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        outcome = Watch(plan, processes, logs, Stopper()).run()
        after, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - begin
        logs.close()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return outcome, wall, cpu


def test_ten_thousand_lines_a_second(tmp_path, figure):
    rate, seconds = 10_000 // NODES, 8
    lines = rate * seconds
    outcome, wall, cpu = watched(tmp_path, CHATTER.format(lines=lines, rate=rate))
    assert outcome.status == "finished"
    took = []
    for rank in range(NODES):
        log = (tmp_path / f"run/nodes/node{rank + 1}/rank{rank}.log").read_text().splitlines()
        took.append(float(log.pop().split()[1]))  # longer, if the worker had to wait for a reader
        assert [int(line.split()[1]) for line in log] == list(range(lines))
    reached = NODES * lines / max(took)
    figure("lines from 4 nodes, all kept and in order", reached, "lines/s", "10000")
    figure("control side while they come", 100 * cpu / wall, "% of a core")


def test_an_idle_run(tmp_path, figure):
    outcome, wall, cpu = watched(tmp_path, "import time; time.sleep(20)")
    assert outcome.status == "finished"
    figure("control side of an idle run, 4 local nodes", 100 * cpu / wall, "% of a core", "5")


def test_overhead_without_torch(tmp_path, figure):
    """The same four commands by a stand-in for launch, which costs the machine nothing."""
    script = "import time; time.sleep(2)"
    argv = [sys.executable, str(STAND_IN), "1", script]
    overhead = []
    for number in range(5):
        outcome, wall, _ = watched(tmp_path / str(number), script)
        assert outcome.status == "finished"
        begin = time.monotonic()
        env = {**os.environ, "PYTHON_EXEC": sys.executable}
        running = [subprocess.Popen(argv, env=env) for _ in range(NODES)]
        assert [process.wait() for process in running] == [0] * NODES
        overhead.append(wall - (time.monotonic() - begin))
    figure("overhead over four idle commands (median of 5)", statistics.median(overhead), "s", "1")


def by_hand(plan, output):
    """The four commands of a plan into another folder, without launcher or guard: wall seconds."""
    for node in plan["nodes"]:
        node["argv"][-1] = json.dumps({**json.loads(node["argv"][-1]), "output": str(output)})
    begin = time.monotonic()
    running = [
        subprocess.Popen(
            node["argv"],
            env={**os.environ, **node["env"], "TANDEM_NODE": node["host"]},
            cwd=CHECKOUT / node["cwd"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in plan["nodes"]
    ]
    assert [process.wait() for process in running] == [0] * len(running)
    return time.monotonic() - begin


@pytest.mark.skipif(not (CHECKOUT / "data/digits").exists(), reason="needs `make data/digits`")
def test_overhead_over_the_same_commands_by_hand(figure, tmp_path):
    train = [sys.executable, "-m", "launcher", "train", "--inventory", "examples/demo.ini"]
    train += ["--nodes", "4", "--epochs", "1"]
    whole, attempt = [], []
    for number in range(3):
        begin = time.monotonic()
        subprocess.run(train, cwd=CHECKOUT, check=True, capture_output=True)
        wall = time.monotonic() - begin
        folder = CHECKOUT / "runs" / "latest"
        plan = json.loads((folder / "plan.json").read_text())
        (entry,) = json.loads((folder / "attempts.json").read_text())["attempts"]
        hand = by_hand(plan, tmp_path / str(number))
        whole.append(wall - hand)
        attempt.append(entry["wall_seconds"] - hand)
    figure(
        "overhead of guards and watching (median of 3 pairs)", statistics.median(attempt), "s", "1"
    )
    figure("with preflight, collecting and the report", statistics.median(whole), "s")
