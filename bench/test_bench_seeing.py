"""What seeing costs, and how true it is: processor time of all measuring, and the exposed part of
gradient sums beside the same run without them."""

import json
import os
import statistics
import time
from pathlib import Path

import pytest
import torch

from launcher.node.processes import command_of, descendants
from report.measure import measure_step
from report.read import read_run
from tandem.timings import Clock, Lines
from tests.trainer_ranks import make_images, run_ranks, trainer
from tests.unit.launcher.guard_client import ROOT, Client, workers

PAIRS, SECONDS, RANKS, STEPS = 3, 20, 2, 20_000
MODEL = f"{ROOT}/tests/lab/faults/model.py:timed"
ARGV = [
    "--model", MODEL, "--precision", "fp32", "--augment", "none", "--device", "cpu", "--workers",
    0, "--image_size", 16, "--per_node_batch_size", 2, "--trial", SECONDS,
]  # fmt: skip
RUN = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv = ["trainer", *{argv!r}]
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"), per_class=300)


def step_of(folder):
    return measure_step(read_run(folder), [])


def alone(*argv):
    """A rank of a world of its own, beside others."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    argv = [*argv[:-1], f"{argv[-1]}{os.environ['RANK']}"]
    os.environ.update(own, MASTER_PORT=str(20000 + os.getpid() % 20000))
    return trainer(*argv)


def test_exposed_sync_is_what_the_step_is_longer_by(figure, images, tmp_path):
    errors, limits = [], []
    for pair in range(PAIRS):
        words = ["--data", images, *ARGV, "--output"]
        run_ranks([1] * RANKS, alone, *words, tmp_path / f"alone{pair}-", quiet=True)
        run_ranks([1] * RANKS, trainer, *words, tmp_path / f"all{pair}", quiet=True)
        apart = [step_of(tmp_path / f"alone{pair}-{rank}").seconds for rank in range(RANKS)]
        step = step_of(tmp_path / f"all{pair}")
        longer = step.seconds - statistics.fmean(apart)
        errors.append(abs(longer - step.network - step.peers))
        limits.append(max(0.05 * step.seconds, 0.01))
    assert min(limits) > 0  # steps were timed, with and without the others
    figure("exposed sync: error beside the run without it", 1000 * statistics.median(errors), "ms")
    aim = f"{1000 * statistics.median(limits):.0f}"
    figure("exposed sync: what it may be, of these steps", float(aim), "ms")


def processor_time(pid):
    """Seconds of the guard, of those that watch it and of what records for it."""
    measuring = [pid]
    for process in descendants(pid):
        command = command_of(process)
        if "launcher/node" in command and "supervisor" not in command:
            measuring.append(process)
    total = 0
    for process in measuring:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def test_what_guard_and_records_take(figure, images, tmp_path):
    """Processor time while a rank trains; a share of one core's time."""
    argv = ["--data", images, *ARGV, "--output", tmp_path]
    script = RUN.format(root=str(ROOT), argv=[str(word) for word in argv])
    guard = Client()
    try:
        env = {"OMP_NUM_THREADS": "1"}
        settings = {"record": True, "interface": "lo", "env": env}
        guard.start(tmp_path, workers(script), **settings)
        path = tmp_path / "nodes/node1/rank0.1.steps.jsonl"
        until = time.monotonic() + 120
        while not path.exists() or '"kind": "step"' not in path.read_text():
            assert guard.pump(0.2) or time.monotonic() < until
            guard.send(type="lease")
        pid = guard.process.pid
        before, began = processor_time(pid), time.monotonic()
        while time.monotonic() < began + SECONDS / 2:
            guard.pump(0.5)
            guard.send(type="lease")
        spent, passed = processor_time(pid) - before, time.monotonic() - began
    finally:
        guard.close()
    assert spent > 0 and path.read_text().count('"kind": "step"') > 1
    figure("guard with its records, of one core", 100 * spent / passed, "%", "1")


def test_what_the_stopwatch_and_its_lines_take(figure, tmp_path):
    """Per step, as the trainer uses them: ten switches, a line, flushed once a second."""

    clock = Clock(torch.device("cpu"))
    lines = Lines(str(tmp_path), "node1", 0, clock)
    began = time.process_time()
    for step in range(STEPS):
        for category in ("data", "h2d", "optimizer", "forward", "backward") * 2:
            clock.enter(category)
        lines.add("step", step=step, epoch=0, samples=8)
        lines.keep_up()
    spent = (time.process_time() - began) / STEPS
    lines.end(status="finished")
    (path,) = tmp_path.rglob("rank0.1.steps.jsonl")
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(line.get("steps", 0) for line in written) == STEPS
    figure("stopwatch and lines, a step", 1e6 * spent, "us")
    figure("stopwatch and lines, of a step of 100 ms", 100 * spent / 0.1, "%", "1")
