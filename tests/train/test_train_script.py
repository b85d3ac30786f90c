"""Scripts of a user's own on two nodes of this machine, as `make train SCRIPT=...` starts them."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from contract.errors import STOPPED
from tests import run_directory
from tests.train.script_runs import (
    CHECKOUT,
    EXAMPLE,
    ended,
    left,
    start,
    train,
    until_it_says,
)
from tests.trainer_ranks import free_port

pytest.importorskip("fabric", reason="a run needs the control machine's environment")


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


FAILS = """
import os, sys, time
from torch import distributed
distributed.init_process_group("gloo")
if distributed.get_rank() == 1:
    raise ValueError("the second one fails")
distributed.barrier()
"""


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


def is_rank(pid, script=b"train.py"):
    """Whether it is the script itself."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
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
    assert re.search(r"the script goes on from checkpoints/step-0000[23]0\.pt", said), said
    again = losses(said)
    assert max(again) == 39 and again == {step: whole[step] for step in again}


GOES_ON = """
import os, pathlib, time
from torch import distributed
distributed.init_process_group("gloo")
pathlib.Path("out").mkdir()
pathlib.Path("out", os.environ["MASTER_PORT"]).write_text("")
print("it runs as rank", distributed.get_rank(), flush=True)
while not pathlib.Path("../../end").exists():
    time.sleep(0.1)
"""


@pytest.mark.long
def test_two_runs_of_a_script_at_a_time_do_not_meet(script):
    """The second one is refused by the machine's lock, or started on purpose; each has its own
    folder, port and output."""
    source = script(GOES_ON)
    first = start(source, "--output=out")
    until_it_says(first, "it runs")
    one = (CHECKOUT / "runs/latest").resolve()
    said, code, _ = train(source, waits=False)
    assert code == 2, said
    assert "it is in use by" in said and one.name in said
    while time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()) in one.name:
        time.sleep(0.1)
    second = start(source, "--output=out", "--force", waits=False)
    until_it_says(second, "it runs")
    other = (CHECKOUT / "runs/latest").resolve()
    assert one != other
    ports = []
    for process, run in ((first, one), (second, other)):
        for node in ("node1", "node2"):
            (CHECKOUT / ".tandem" / node / "runs" / run.name / "end").write_text("")
        said, code, _ = ended(process)
        assert code == 0, said
        ports.append({path.name for path in run.glob("work/*/out/*")})
    assert [len(some) for some in ports] == [1, 1] and ports[0] != ports[1]


FIXED = """
import socket, time
from torch import distributed
distributed.init_process_group("gloo")
own = socket.create_server(("127.0.0.1", {port}))
time.sleep(3600)
"""


@pytest.mark.long
def test_a_fixed_port_is_named_where_two_nodes_are_one_machine(script):
    said, code, _ = train(script(FIXED.format(port=free_port())))
    assert code == 1, said
    assert "OSError: [Errno 98] Address already in use" in said
    assert "let the script take MASTER_PORT from its environment" in " ".join(said.split())


ALONE = "import time\nfrom torch import distributed\ntime.sleep(12)\n"
# A minute is long for a test: so many seconds instead.
SOON = """
import sys
from launcher import cli
from launcher.watch import guards
task = guards.task
guards.task = lambda plan, node: {**task(plan, node), "meet_within": 3.0}
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.long
def test_a_script_that_makes_no_process_group_is_told_after_a_while_and_has_not_finished(script):
    run = start(script(ALONE), program=SOON)
    said = [until_it_says(run, "met no other in 3 s") for _ in range(2)]
    assert sorted(line.split(": ")[1][:5] for line in said) == ["node1", "node2"]
    assert run.poll() is None
    said, code, _ = ended(run)
    assert code == 1, said
    summary = json.loads((CHECKOUT / "runs/latest/summary.json").read_text())
    assert (summary["status"], summary["first_cause"]["host"]) == ("failed", "node1")
    assert "init_process_group" in summary["first_cause"]["remedy"]
