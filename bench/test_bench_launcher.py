"""What the control side costs: lines, idling, and the overhead over the same commands by hand."""

import json
import os
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
STAND_IN = CHECKOUT / "tests/unit/launcher/guard_launch.py"  # for the launch of a node's ranks
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
    """Return a plan of local nodes. The stand-in runs `script` as each node's worker."""
    argv = (sys.executable, str(STAND_IN), "1", script)
    nodes = tuple(
        NodePlan(
            host=f"node{index + 1}", node_rank=index, ranks=(index,), connection="local",
            address="127.0.0.1", port=22, user=None, interface="lo", argv=argv, env={},
            code=str(CHECKOUT), cwd=str(CHECKOUT), output=str(tmp_path / "run"), data="",
            versions={},
        )
        for index in range(NODES)
    )  # fmt: skip
    return Plan(
        run="bench", attempt=1, created_unix=0.0, world_size=NODES, master_addr="127.0.0.1",
        master_port=29500, git_revision=None, git_diff="",
        options=Config(force=True),  # another run may have this machine
        program=Program(name="bench", typed="bench", words=()),
        nodes=nodes, tandem="", data="", code_sha256="",
    )  # fmt: skip


def run_attempt(tmp_path, script):
    """Run a plan's attempt. Return (outcome, wall seconds, this process's CPU seconds)."""
    plan = plan_of(tmp_path, script)
    argv = [sys.executable, "-IB", str(CHECKOUT / "launcher/node"), "bench"]
    guards = {node.host: LocalProcess(argv) for node in plan.nodes}
    tmp_path.mkdir(exist_ok=True)
    with (tmp_path / "terminal").open("w") as out:
        logs = RunLogs(tmp_path / "run", Terminal(out), NODES)
        begin, cpu_begin = time.monotonic(), time.process_time()
        outcome = Watch(plan, guards, logs, Stopper()).run()
        cpu, wall = time.process_time() - cpu_begin, time.monotonic() - begin
        logs.close()
    return outcome, wall, cpu


def time_processes(commands):
    """Run commands (lists of Popen's words and options) at once. Return their wall seconds."""
    begin = time.monotonic()
    processes = [subprocess.Popen(argv, **options) for argv, options in commands]
    assert [process.wait() for process in processes] == [0] * len(processes)
    return time.monotonic() - begin


def test_ten_thousand_lines_a_second(tmp_path, figure):
    rate, seconds = 10_000 // NODES, 8
    lines = rate * seconds
    outcome, wall, cpu = run_attempt(tmp_path, CHATTER.format(lines=lines, rate=rate))
    assert outcome.status == "finished"
    worker_seconds = []  # longer than `seconds` if a worker had to wait for its reader
    for rank in range(NODES):
        log = (tmp_path / f"run/nodes/node{rank + 1}/rank{rank}.log").read_text().splitlines()
        worker_seconds.append(float(log.pop().split()[1]))
        assert [int(line.split()[1]) for line in log] == list(range(lines))
    reached = NODES * lines / max(worker_seconds)
    figure("lines from 4 nodes, all kept and in order", reached, "lines/s", "10000")
    figure("control side while they come", 100 * cpu / wall, "% of a core")


def test_an_idle_run(tmp_path, figure):
    outcome, wall, cpu = run_attempt(tmp_path, "import time; time.sleep(20)")
    assert outcome.status == "finished"
    figure("control side of an idle run, 4 local nodes", 100 * cpu / wall, "% of a core", "5")


def test_overhead_without_torch(tmp_path, figure):
    """Compare with the same four commands by hand. Their workers cost the machine nothing."""
    script = "import time; time.sleep(2)"
    argv = [sys.executable, str(STAND_IN), "1", script]
    options = {"env": {**os.environ, "PYTHON_EXEC": sys.executable}}
    overhead = []
    for number in range(5):
        outcome, wall, _ = run_attempt(tmp_path / str(number), script)
        assert outcome.status == "finished"
        overhead.append(wall - time_processes([(argv, options)] * NODES))
    figure("overhead over four idle commands (median of 5)", statistics.median(overhead), "s", "1")


@pytest.mark.skipif(not (CHECKOUT / "data/digits").exists(), reason="needs `make data/digits`")
def test_overhead_over_the_same_commands_by_hand(figure, tmp_path):
    """Compare `make train` with the four commands of its plan, without launcher or guard."""
    train = [sys.executable, "-m", "launcher", "train", "--inventory", "examples/demo.ini"]
    train += ["--nodes", "4", "--epochs", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    whole, attempt = [], []
    for number in range(3):
        begin = time.monotonic()
        subprocess.run(train, cwd=CHECKOUT, check=True, capture_output=True)
        wall = time.monotonic() - begin
        folder = CHECKOUT / "runs" / "latest"
        (entry,) = json.loads((folder / "attempts.json").read_text())["attempts"]
        commands = []
        for node in json.loads((folder / "plan.json").read_text())["nodes"]:
            # The last word has the trainer's options. The output of the run itself is kept.
            options = {**json.loads(node["argv"][-1]), "output": str(tmp_path / str(number))}
            argv = [*node["argv"][:-1], json.dumps(options)]
            env = {**os.environ, **node["env"], "TANDEM_NODE": node["host"]}
            commands.append((argv, {"env": env, "cwd": CHECKOUT / node["cwd"], **quiet}))
        by_hand = time_processes(commands)
        whole.append(wall - by_hand)
        attempt.append(entry["wall_seconds"] - by_hand)
    name = "overhead of guards and watching (median of 3 pairs)"
    figure(name, statistics.median(attempt), "s", "1")
    figure("with preflight, collecting and the report", statistics.median(whole), "s")
