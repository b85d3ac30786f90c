"""Scripts of a user's own on two nodes of this machine, as `make train SCRIPT=...` starts them."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from contract.errors import STOPPED
from tests import run_directory
from tests.train.script_runs import (
    CHECKOUT,
    EXAMPLE,
    TRAIN,
    ended,
    left,
    start,
    train,
    until_it_says,
)

pytest.importorskip("fabric", reason="a run needs the control machine's environment")


def test_a_plain_script_trains_and_what_it_wrote_comes_here():
    words = ("--output=checkpoints",)
    said, code, run = train(EXAMPLE, *words, arguments=("--lr", "0.2", "--epochs", "2"))
    assert code == 0, said
    assert "[node1 0] epoch 1: loss" in said
    assert "train.py --lr 0.2 --epochs 2, 2 nodes (2 ranks)" in said
    assert "nobody timed its steps" in said and "MEMORY" in said
    assert run_directory.problems(run) == []
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["nodes"], summary["world_size"]) == ("finished", 2, 2)
    came = sorted(str(p.relative_to(run)) for p in (run / "work").rglob("*") if p.is_file())
    assert came == [f"work/node1/checkpoints/epoch-00{n}.pt" for n in (0, 1)]


def test_two_lines_time_its_steps_as_the_records_of_a_run_have_them(script):
    source = EXAMPLE.read_text()
    for old, new in (
        ("import torch\n", "import torch\nfrom tandem import timings\n"),
        ("in loader:", "in timings.timed(loader, model):"),
        ("        optimizer.step()\n", "        optimizer.step()\n        timings.step()\n"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    said, code, run = train(script(source), arguments=("--epochs", "2"))
    assert code == 0, said
    assert run_directory.problems(run) == []
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["sync"]) == (64, "allreduce")
    assert summary["images_per_second"] > 0 and "nobody timed" not in said


def test_a_dry_run_prints_what_a_run_executes():
    argv = [
        *TRAIN[:3],
        "dry-run",
        *TRAIN[4:],
        "--nodes=2",
        f"--script={EXAMPLE}",
        "--",
        "--lr",
        "1",
    ]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("cd ")]
    assert len(lines) == 2
    assert all(line.endswith("--use_env train.py --lr 1") for line in lines)
    assert f"script train.py, with {EXAMPLE.parent}" in done.stdout


FAILS = """
import os, sys, time
from torch import distributed
distributed.init_process_group("gloo")
if distributed.get_rank() == 1:
    raise ValueError("the second one fails")
distributed.barrier()
"""


def test_the_first_cause_is_named_and_the_failure_is_final(script):
    said, code, run = train(script(FAILS))
    assert code == 1, said
    cause = json.loads((run / "attempts.json").read_text())["attempts"][0]["first_cause"]
    assert (cause["host"], cause["rank"]) == ("node2", 1)
    assert cause["exception"] == "ValueError: the second one fails"
    assert "this run cannot be continued: how its script goes on was not said" in said


STUBBORN = """
import os, signal, subprocess, sys, time
from torch import distributed
signal.signal(signal.SIGTERM, signal.SIG_IGN)
distributed.init_process_group("gloo")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(3600)
    os._exit(0)
sys.stdout.buffer.write(bytes(range(256)) + b"\\n")
print("all of them run", flush=True)
time.sleep(3600)
"""


def test_a_script_that_ignores_sigterm_and_forks_a_daemon_leaves_nothing(script):
    """It also prints binary."""
    run = start(script(STUBBORN))
    line = until_it_says(run, "all of them run")
    assert line.startswith("[node")
    name = (CHECKOUT / "runs/latest").resolve().name
    assert len(left(f"runs/{name}/work")) >= 6
    os.kill(run.pid, signal.SIGTERM)
    said, code, _ = ended(run)
    assert code == STOPPED, said
    assert "the workers have 20 s to end" in said
    assert left(f"runs/{name}/work") == []


def test_it_goes_on_from_its_newest_checkpoint_after_a_kill():
    words = ("--output=checkpoints", "--resume-args=--resume {last}", "--max-restarts=1")
    run = start(EXAMPLE, *words, arguments=("--epochs", "400"))
    until_it_says(run, "epoch 2: loss")
    name = (CHECKOUT / "runs/latest").resolve().name
    victims = [pid for pid in left(f"node2/runs/{name}") if is_rank(pid)]
    assert len(victims) == 1
    os.kill(victims[0], signal.SIGKILL)
    until_it_says(run, "the script goes on from checkpoints/epoch-")
    first = int(re.search(r"epoch (\d+):", until_it_says(run, ": loss"))[1])
    assert first >= 2
    os.kill(run.pid, signal.SIGTERM)
    said, code, _ = ended(run)
    assert code == STOPPED, said
    began = json.loads((CHECKOUT / "runs" / name / "attempts.json").read_text())["attempts"]
    assert [one["status"] for one in began] == ["failed", "stopped"]
    assert began[0]["first_cause"]["signal"] == "SIGKILL"


def is_rank(pid):
    """Whether it is the script itself."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"train.py" in words and b"-u" in words and not any(b"supervisor" in w for w in words)


def test_two_runs_of_a_script_at_a_time_do_not_meet(script):
    """The second one is refused by the machine's lock, or started on purpose; each has its own
    folder, port and output."""
    source = script(
        "import os, pathlib\nfrom torch import distributed\n"
        "distributed.init_process_group('gloo')\n"
        "pathlib.Path('out').mkdir()\n"
        "pathlib.Path('out', os.environ['MASTER_PORT']).write_text('')\n"
        "print('it runs', flush=True)\n"
        "import time\nwhile not pathlib.Path('../../end').exists(): time.sleep(0.1)\n"
    )
    first = start(source, "--output=out")
    until_it_says(first, "it runs")
    one = (CHECKOUT / "runs/latest").resolve()
    argv = [word for word in TRAIN if word != "--queue"]
    refused = subprocess.run(
        [*argv, "--nodes=2", f"--script={source}"], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "it is in use by" in refused.stderr and one.name in refused.stderr
    while time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) in one.name:
        time.sleep(0.1)
    second = start(source, "--output=out", "--force", waits=False)
    until_it_says(second, "it runs")
    other = (CHECKOUT / "runs/latest").resolve()
    assert one != other
    for run in (one, other):
        for node in ("node1", "node2"):
            (CHECKOUT / ".tandem" / node / "runs" / run.name / "end").write_text("")
    ports = []
    for process, run in ((first, one), (second, other)):
        said, code, _ = ended(process)
        assert code == 0, said
        ports.append({path.name for path in run.glob("work/*/out/*")})
    assert [len(some) for some in ports] == [1, 1]
    assert ports[0] != ports[1]
