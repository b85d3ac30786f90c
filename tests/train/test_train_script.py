"""Scripts of a user's own on two nodes of this machine, as `make train SCRIPT=...` starts them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_directory
from tests.train.script_runs import (
    CHECKOUT,
    EXAMPLE,
    ended,
    in_time,
    left,
    start,
    train,
    until_it_says,
)

pytest.importorskip("fabric", reason="a run needs the control node's environment")


def test_a_script_trains_its_steps_are_timed_and_what_it_wrote_comes_here(script):
    """One of PyTorch alone, with the two lines that time its steps."""
    source = EXAMPLE.read_text()
    for old, new in (
        ("import torch\n", "import torch\nfrom tandem import timings\n"),
        ("in loader:", "in timings.timed(loader, model):"),
        ("        optimizer.step()\n", "        optimizer.step()\n        timings.step()\n"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    words = ("--l", "0.2", "--epochs", "2")  # as short as its own parser allows
    said, code, run = train(script(source), "--output=checkpoints", arguments=words)
    assert code == 0, said
    assert "[node1 0] epoch 1: loss" in said
    assert run_directory.problems(run) == []
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["nodes"], summary["world_size"]) == ("finished", 2, 2)
    assert (summary["steps"], summary["sync"]) == (64, "allreduce")
    assert summary["images_per_second"] > 0
    came = sorted(str(p.relative_to(run)) for p in (run / "work").rglob("*") if p.is_file())
    assert came == [f"work/node1/checkpoints/epoch-00{n}.pt" for n in (0, 1)]


def is_rank(pid, script):
    """Whether it is the script itself."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    return script in words and b"-u" in words and not any(b"supervisor" in w for w in words)


def losses(said):
    """{step: what was printed of it, each thing once}."""
    found = {}
    for step, loss in re.findall(r"\[node1 0\] step (\d+): loss (\S+)", said):
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--sync", "ef:3")])
def test_a_language_model_that_was_killed_learns_what_one_that_was_not_does(more):
    """To the bit; with a strategy that keeps something for each rank by that state, too."""
    model = EXAMPLE.with_name("language_model.py")
    arguments = ("--steps", "40", "--save-every", "10", *more)
    said, code, _ = train(model, "--output=checkpoints", arguments=arguments)
    assert code == 0, said
    whole = losses(said)
    assert sorted(whole) == list(range(40))
    words = ("--output=checkpoints", "--resume-args=--resume {last}", "--max-restarts=1")
    run = start(model, *words, arguments=arguments)
    until_it_says(run, "] step 25: loss")
    name = (CHECKOUT / "runs/latest").resolve().name
    pids = left(f"node2/runs/{name}")
    (victim,) = (pid for pid in pids if is_rank(pid, b"language_model.py"))
    os.kill(victim, signal.SIGKILL)
    said, code, _ = ended(run)
    assert code == 0, said
    assert re.search(r"the script continues from checkpoints/step-0000[23]0\.pt", said), said
    again = losses(said)
    assert max(again) == 39 and again == {step: whole[step] for step in again}


HANGS = """
import os, signal, time
import torch
import torch.distributed as dist

def wait_for_the_others():
    dist.all_reduce(torch.ones(1))

def compute_for_ever():
    while True:
        pass

dist.init_process_group("gloo")
wait_for_the_others()
print("all are here", flush=True)
if dist.get_rank() == 0:
    compute_for_ever() if "HOW" == "computes" else os.kill(os.getpid(), signal.SIGSTOP)
wait_for_the_others()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "place"),
    [("computes", "train.py:1[01], in compute_for_ever"), ("stops", "is stopped")],
)
def test_status_and_report_say_where_each_rank_of_a_hanging_script_stands(script, how, place):
    process = start(script(HANGS.replace("HOW", how)))
    until_it_says(process, "all are here")
    run = (CHECKOUT / "runs/latest").resolve()
    status = [sys.executable, "-m", "launcher", "status", run.name, "--json"]
    ranks = {}
    with in_time(process):
        while len(ranks) < 2 and process.poll() is None:
            shown = json.loads(subprocess.check_output(status, cwd=CHECKOUT))
            ranks = {standing["rank"]: standing for standing in shown.get("stands", [])}
    process.send_signal(signal.SIGINT)
    said, _, _ = ended(process)
    assert re.search(place, ranks[0]["place"]) and ranks[0]["seconds"] >= 20
    assert "in wait_for_the_others" in ranks[1]["place"]
    attempt = json.loads((run / "attempts.json").read_text())["attempts"][0]
    *lines, uncounted = attempt["silent_ranks"]
    assert uncounted.startswith("Tandem cannot tell which rank is missing")
    assert sorted(line.split(",")[0] for line in lines) == ["rank 0 (node1)", "rank 1 (node2)"]
    assert re.search(place, lines[0]) and place.split(":")[0] in said
