"""Faults in random order: each ends the run in time, is named, and leaves nothing behind.

The trainer is a stand-in, so that the machines' cores do not decide. TANDEM_CHAOS_TRIALS sets how
many trials there are; the seed is fixed.
"""

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab import chaos_standin

CHECKOUT = Path(__file__).resolve().parents[2]
NODES = 4
# Seconds for the control side to notice, beside what the issue of the run takes on a busy machine.
SLACK = 20
TRIALS = int(os.environ.get("TANDEM_CHAOS_TRIALS", "8"))


@pytest.fixture(scope="module")
def arena(start_lab):
    lab = start_lab("chaos", "--nodes", str(NODES), "--no-bundle")
    for node in range(1, NODES + 1):
        chaos_standin.install(lab, node)
    return lab


class Started:
    """A run under way; `ready` lines tell how many ranks train."""

    def __init__(self, lab, folder: Path, *words: str, seconds: int = 600):
        before = set((CHECKOUT / "runs").glob("*Z-*"))
        file = chaos_standin.inventory(folder, NODES, seconds)
        argv = ["python", "-m", "launcher", "train", "--inventory", str(file), "--data", "d"]
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            lab.argv("exec", "--", *argv, *words),
            cwd=CHECKOUT, stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.wait_for("training", NODES)
        self.folder = (set((CHECKOUT / "runs").glob("*Z-*")) - before).pop()

    def said(self) -> str:
        return Path(self.output.name).read_text()

    def wait_for(self, word: str, times: int) -> None:
        deadline = time.monotonic() + 120
        while self.said().count(f"] {word}") < times:
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def end(self, within: float) -> int:
        return self.process.wait(timeout=within + SLACK)

    @property
    def controller(self) -> int:
        return int((self.folder / "controller.pid").read_text())

    def cause(self) -> dict:
        told = json.loads((self.folder / "attempts.json").read_text())
        return told["attempts"][0]["first_cause"]


def kill_rank(lab, run, node):
    lab.ssh(node, "pkill -KILL -f '^/usr/bin/python3 /opt/standin/launch.py -m [t]rainer'")
    run.end(5)
    assert (run.cause()["host"], run.cause()["signal"]) == (f"node{node}", "SIGKILL")
    assert run.cause()["rank"] == node - 1


def kill_guard(lab, run, node):
    lab.ssh(node, "kill -KILL $(pgrep -f '[l]auncher/node' | head -1)")
    run.end(5)
    assert run.cause()["host"] == f"node{node}"


def kill_launch(lab, run, node):
    lab.ssh(node, "pkill -KILL -f '[t]orch.distributed.launch'")
    run.end(5)
    assert run.cause()["host"] == f"node{node}"


def kill_node(lab, run, node):
    lab("kill", str(node))
    run.end(20)
    assert run.cause()["host"] == f"node{node}"


def freeze(lab, run, node):
    lab("freeze", str(node))
    run.end(20)
    assert run.cause()["host"] == f"node{node}"
    assert "no heartbeat" in run.cause()["message"]


def cut(lab, run, node):
    lab("cut", str(node))
    run.end(20)
    assert run.cause()["host"] == f"node{node}"


def stall(lab, run, node):
    """A cable that is out for 8 s kills nothing: the run is stopped in order afterwards."""
    lab("cut", str(node))
    time.sleep(8)
    lab("mend", str(node))
    time.sleep(14)
    assert run.process.poll() is None, run.said()
    os.kill(run.controller, 15)
    assert run.end(20) == 75
    assert run.said().count("saved") == NODES


def kill_controller(lab, run, node):
    os.kill(run.controller, 9)
    run.end(5)


FAULTS = [kill_rank, kill_guard, kill_launch, kill_node, freeze, cut, stall, kill_controller]


def trials() -> list:
    dice = random.Random(20260)
    order: list = []
    while len(order) < TRIALS:
        order += dice.sample(FAULTS, len(FAULTS))
    return [(fault, dice.randrange(1, NODES + 1)) for fault in order[:TRIALS]]


@pytest.mark.parametrize(
    ("fault", "node"), trials(), ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_is_named_and_leaves_nothing(arena, tmp_path, fault, node):
    run = Started(arena, tmp_path)
    try:
        fault(arena, run, node)
    finally:
        if run.process.poll() is None:
            run.process.kill()
        arena("mend", str(node))
    # 10 s on a reachable node, and as long on one that was mended just now.
    deadline = time.monotonic() + 10 + SLACK
    while left := [n for n in range(1, NODES + 1) if chaos_standin.alive(arena, n)]:
        assert time.monotonic() < deadline, f"still alive on {left}"
        time.sleep(0.5)


def test_a_run_goes_on_without_a_machine_and_with_it_again(arena, tmp_path):
    run = Started(arena, tmp_path, "--max-restarts", "1", "--min-nodes", "3")
    arena("kill", "1")
    assert run.end(60) == 0, run.said()
    arena("mend", "1")
    told = json.loads((run.folder / "attempts.json").read_text())
    assert [attempt["nodes"] for attempt in told["attempts"]] == [
        ["node1", "node2", "node3", "node4"],
        ["node2", "node3", "node4"],
    ]
    assert told["status"] == "finished"


def test_a_run_goes_on_after_its_controller_died(arena, tmp_path):
    run = Started(arena, tmp_path)
    os.kill(run.controller, 9)
    run.end(5)
    argv = ["python", "-m", "launcher", "train", "--resume", run.folder.name]
    done = arena.control(*argv)
    assert "resumed by hand" in (run.folder / "attempts.json").read_text()
    assert done.stdout.count("] training") == NODES


SMI = """#!/bin/sh
case "$*" in
*query-gpu*) echo "0, 580.126.20" ;;
*query-compute-apps*) pgrep -x -u tandem -f 'sleep 8888' ;;
esac
"""


def test_a_busy_gpu_is_refused_with_its_holders_name(arena, tmp_path):
    """A stand-in for nvidia-smi names a real process; FORCE=1 starts nevertheless."""
    smi = "/usr/local/bin/nvidia-smi"
    arena.ssh(2, f"sudo sh -c 'cat > {smi} && chmod +x {smi}'", input=SMI)
    arena.ssh(2, "setsid sleep 8888 >/dev/null 2>&1 </dev/null &")
    file = chaos_standin.inventory(tmp_path, NODES, 0)
    argv = ["python", "-m", "launcher", "dry-run", "--inventory", str(file), "--data", "d"]
    try:
        done = arena.control(*argv, check=False)
        assert done.returncode == 2
        assert "node2 (192.168.56.112): its GPUs are in use by tandem: sleep 8888" in done.stderr
        assert "QUEUE=1" in done.stderr and "FORCE=1" in done.stderr
        assert "node1" not in done.stderr
        assert arena.control(*argv, "--force").returncode == 0
    finally:
        arena.ssh(2, f"sudo rm {smi}; pkill -x -f 'sleep 8888'")
    assert arena.control(*argv).returncode == 0
