"""A script that hangs on two nodes of this machine: the launcher prints which rank did not enter
which sum, and its line, long before the sum times out."""

import re
import signal
import time

import pytest

from tests.train.script_runs import lines_of, start

pytest.importorskip("fabric", reason="a run needs the control node's environment")

SCRIPT = """
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from tandem import sync, timings

KIND, TOOL = sys.argv[1:]

def spin():
    while True:
        pass

def read_pipe():
    os.mkfifo("pipe")
    open("pipe").read()

def sum_metrics():
    dist.all_reduce(torch.ones(1), group=metrics)

def wait_in_kernel():
    # A process waits so for a child that has not replaced its program yet, by vfork.
    if ctypes.CDLL(None).syscall(56, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(600)

def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)

hangs = {"loop": spin, "pipe": read_pipe, "sum": sum_metrics, "kernel": wait_in_kernel}
hangs |= {"kill": kill_itself, "fewer": lambda: None}
dist.init_process_group("gloo")
rank, metrics = dist.get_rank(), dist.new_group()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
if TOOL == "attach":
    sync.attach(model, "bf16")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.full((2, 4), rank + 1.0)] * (41 - (KIND == "fewer" and rank == 1))
for number, batch in enumerate(timings.timed(batches, model) if TOOL == "timings" else batches):
    if number == 40 and rank == 1:
        print("hangs", flush=True)
        hangs[KIND]()
    loss = model(batch).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if TOOL == "timings":
        timings.step()
    time.sleep(0.05)
print("hangs", flush=True)
sum_metrics()
"""
PLACES = {
    "loop": r"is at train\.py:1[12], in spin",
    "pipe": r"is at train\.py:16, in read_pipe",
    "sum": r"waits in all_reduce at train\.py:19, in sum_metrics",
    "fewer": r"waits in all_reduce at train\.py:19, in sum_metrics",
    "kernel": r"cannot answer: it is in uninterruptible I/O \(state D\); the kernel waits in \w+",
}


def wait_for_line(process, pattern):
    """Return the seconds from the hang to the first line that matches, and the match."""
    begin, printed = time.monotonic(), []
    for line in lines_of(process):
        printed.append(line)
        if line.endswith("1] hangs\n"):
            begin = time.monotonic()
        if match := re.search(pattern, line):
            process.send_signal(signal.SIGINT)
            return time.monotonic() - begin, match
    raise AssertionError(f"no line has {pattern}: {''.join(printed)}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        ("loop", "timings"),
        ("pipe", "attach"),
        ("sum", "timings"),
        ("fewer", "attach"),
        ("kernel", "timings"),
    ],
)
def test_the_rank_the_sum_and_the_line_of_a_hang_are_printed(script, kind, tool):
    process = start(script(SCRIPT), arguments=(kind, tool))
    bucket = r" \(bucket 0\)" if tool == "attach" else ""
    missed = rf"node2, rank 1 did not enter sum 41{bucket}\. It {PLACES[kind]}\. "
    waiting = r"Rank 0 has waited in this sum for (\d+) s$"
    seconds, match = wait_for_line(process, missed + waiting)
    assert seconds < 35
    assert 20 <= int(match[1]) <= 35


@pytest.mark.long
def test_the_signal_of_a_rank_that_was_killed_is_printed_at_once(script):
    process = start(script(SCRIPT), arguments=("kill", "attach"))
    seconds, _ = wait_for_line(process, "node2, rank 1: SIGKILL|node2, rank 1 .*SIGKILL")
    assert seconds < 5
